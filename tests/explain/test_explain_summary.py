"""What ``specexport explain`` makes of a trace: sums, acceptance by position, verdict, and the table."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from specexport.bench.acceptance import Position, count_positions, judge
from specexport.explain.report import (
    NARROW,
    Pieces,
    end_line,
    make_table,
    short_lines,
    show_draft,
    summary_lines,
    verdict_line,
)
from specexport.explain.summary import DrafterSummary, compare_ways, summarize
from specexport_runtime.costs.curves import CostCurves, LayerShares, StepCost
from specexport_runtime.requests.layer_choice import LayerChoice
from specexport_runtime.requests.records import Asked, Promise, RoundTrace


def make_round(drafted=(), accepted=0, *, drafter="self", emitted=None, reason="goodput", end="lookahead", **values):
    drafted = tuple(drafted)
    given = {
        "round": 1, "num_rows": 1, "num_tokens": 1 + len(drafted), "prompt_tokens": 0,
        "asked": (Asked(drafter, len(drafted), reason),), "drafter": drafter if drafted else "", "drafted": drafted,
        "accepted": accepted, "end": end, "emitted": (*drafted[:accepted], 9) if emitted is None else emitted,
        "gamma": None, "milliseconds": 3.0, "plain_milliseconds": 2.0 * (accepted + 1),
    }  # fmt: skip
    return RoundTrace(**(given | values))


TRACE = [
    make_round([1, 2, 3], 3), make_round([1, 2, 3], 1, end="exit"), make_round([4], 0, end="exit"),
    make_round([], end="none", reason="bypass"), make_round([5, 6], 2, drafter="lookup", end="text"),
]  # fmt: skip
CURVES = CostCurves(StepCost(1.9e-3, 1e-4), {"draft-model": StepCost(1e-4, 0.0)}, LayerShares(4, mixer=0.1, mlp=0.1))


def test_sums():
    summary = summarize(TRACE, curves=None, longest=4, context=10)
    assert (summary.rounds, summary.tokens, summary.drafted, summary.accepted) == (5, 11, 9, 6)
    assert (summary.milliseconds, summary.plain_milliseconds, summary.saved_milliseconds) == (15.0, 22.0, 7.0)
    assert summary.ends == {"lookahead": 1, "exit": 2, "none": 1, "text": 1}
    assert summary.reasons == {"goodput": 4, "bypass": 1}
    assert not summary.verdicts
    data = json.loads(json.dumps(summary.to_json()))
    assert data["positions"] == {"self": [[3, 2], [2, 1], [1, 1]], "lookup": [[1, 1], [1, 1]]}
    # The second and third tokens after a rejected first one were never tested.
    assert count_positions([make_round([1, 2, 3], 0)], "self") == [Position(1, 0)]
    open_ = summarize([*TRACE, make_round([1], 1, plain_milliseconds=None)], curves=None, longest=4, context=10)
    assert (open_.milliseconds, open_.saved_milliseconds) == (18.0, None), "a round without a price"
    assert any("18.0" in line and "saved" not in line for line in summary_lines(open_))


PLAIN, COPY, MODEL = Promise("", 0, 1.0, 100.0), Promise("suffix", 3, 2.0, 150.0), Promise("draft-model", 4, 3.0, 200.0)
WEIGHED = [
    make_round([1, 2], 2, drafter="draft-model", promised=(PLAIN, COPY, MODEL)),  # three tokens in 3 ms
    make_round([1, 2], 0, drafter="draft-model", promised=(PLAIN, MODEL._replace(tokens_per_second=300.0))),
    make_round([1], 1, drafter="suffix", promised=(PLAIN, COPY._replace(tokens_per_second=250.0), MODEL)),
    make_round([], end="none", reason="bypass", promised=(PLAIN, MODEL._replace(tokens_per_second=90.0))),
]


def test_what_was_turned_down_is_compared_with_what_was_taken():
    first, *_, last = WEIGHED
    assert first.taken is MODEL
    assert first.turned_down == [COPY, PLAIN]
    assert (last.taken, [each.drafter for each in last.turned_down]) == (PLAIN, ["draft-model"])
    assert "; promised draft-model K=4 200.0, suffix K=3 150.0, plain 100.0 tokens/s" in first.describe()
    assert "promised" not in TRACE[0].describe()
    assert first.to_json()["promised"][0] == PLAIN._asdict()
    model, copy, plain = compare_ways(WEIGHED)
    assert model == DrafterSummary("draft-model", 2, 250.0, pytest.approx(4 / 6e-3), 2, 145.0, 175.0)
    assert copy == DrafterSummary("suffix", 1, 250.0, pytest.approx(2 / 3e-3), 1, 150.0, 200.0)
    assert plain == DrafterSummary("", 1, 100.0, pytest.approx(1 / 3e-3), 3, 100.0, 250.0)
    own, copied, plain = compare_ways(TRACE)  # nobody weighed them
    assert own == DrafterSummary("self", 3, None, pytest.approx(7 / 9e-3), 0, None, None)
    assert (copied.drafter, copied.taken, plain.drafter, plain.taken) == ("lookup", 1, "", 1)
    said = "\n".join(summary_lines(summarize(WEIGHED, curves=None, longest=4, context=10)))
    assert re.search(r"draft-model: .* 2 rounds .*250\.0.*666\.7.* 2 rounds .*145\.0.*175\.0", said)
    assert re.search(r"Plain decoding: .* 1 round \(100\.0 ", said)


def test_verdict_weighs_tokens_against_seconds():
    verdict = judge("self", [Position(10, 8)], 3, lambda k: 1.0 + 0.1 * k, lambda k: 0.5 * k)
    assert verdict.speedups == pytest.approx([1, 1.8 / 1.6, 2.44 / 2.2, 2.952 / 2.8])
    assert verdict.best == 1
    assert judge("self", [Position(10, 1)], 3, lambda k: 1.0 + 0.1 * k, lambda k: 0.5 * k).best == 0
    assert judge("lookup", [Position(10, 10)], 3, lambda k: 1.0, lambda k: 0.0).best == 3


@pytest.mark.parametrize(
    ("drafter", "layers", "step"),
    [
        ("lookup", None, 0.0),
        ("draft-model", None, 1e-4),
        ("self", None, 2e-3),
        ("self", LayerChoice((True, False, False, True), (True, True, False, True)), 4e-4 + 6e-4 + 4e-4),
    ],
)
def test_each_drafter_has_its_price(drafter, layers, step):
    trace = [make_round([1, 2], 2, drafter=drafter)] * 4 + [make_round([1, 2], 0, drafter=drafter)]
    (verdict,) = summarize(trace, curves=CURVES, longest=2, context=0, layers=layers).verdicts
    assert verdict.drafter == drafter
    assert verdict.speedups[2] == pytest.approx((1 + 0.8 + 0.8) * 2e-3 / (2.2e-3 + 2 * step))


def test_sentences():
    layers = LayerChoice((True, False), (True, True), (0.5, 0.99))
    text = "\n".join(summary_lines(summarize(TRACE, curves=CURVES, longest=2, context=0, layers=layers), layers))
    assert re.search(r"11 .* 5 .* 6 of 9 .*0\.667.*\n.*15\.0 ms.* 22\.0 ms.* 7\.0 ms saved .1\.47", text)
    assert "1: 0.67 (2/3), 2: 0.50 (1/2), 3: 1.00 (1/1)" in text
    assert re.search(r"Verdict, lookup: .* K=2 .*0: 1\.00×", text)
    assert "attention of layers 1 and MLPs of layers none" in text
    hybrid = replace(layers, kinds=("attention", "MLP", "attention and recurrence", "MLP"))
    assert "recurrences of layers 1" in "\n".join(
        summary_lines(summarize(TRACE, curves=None, longest=2, context=0), hybrid)
    )
    assert text.count("Drafts tested: only 3.") == 1
    many = summary_lines(summarize([make_round([1], 1)] * 10, curves=CURVES, longest=2, context=0))
    assert "only" not in "".join(many)
    lost = summarize([make_round([1], 0)], curves=None, longest=1, context=0)
    assert "1.0 ms lost (0.67×)" in "".join(summary_lines(lost))
    assert "0 of 0" in summary_lines(summarize([], curves=None, longest=1, context=0))[0]


WORDS = {1: " one", 2: " two", 3: "\nthree", 4: " [bold]four", 5: " five", 6: " six", 9: " nine"}


def decode(ids):
    return "".join(WORDS[token] for token in ids).lstrip(" ")  # as many decoders do


def test_tokens_keep_the_space_before_them():
    pieces = Pieces(decode, 9)
    assert pieces.of([1, 3, 1]) == [" one", "⏎three", " one"]
    pieces.advance([1])
    pieces.advance([])
    assert pieces.of([2]) == [" two"]


BESIDE = {"branches": ((3, -1), (1, 0), (2, 3)), "asked": (Asked("self", 2, "goodput"),)}
TREES = [
    make_round([1, 2], 2, path=(0, 3), emitted=(1, 1, 9), **BESIDE),  # left the chain after its first token
    make_round([1, 2], 2, **BESIDE),
    make_round([1, 2], 1, path=(2,), emitted=(3, 9), **BESIDE),
    make_round([1, 2], 3, path=(0, 3, 4), emitted=(1, 1, 2), **BESIDE),  # the text ended
]


@pytest.mark.parametrize(
    ("r", "shown", "styles"),
    [
        (make_round([1, 2], 2), " one two →  nine", {" nine": "cyan"}),
        (make_round([1, 2], 1), " one│ two →  nine", {" two": "red"}),
        (make_round([1, 2], 0), "│ one two →  nine", {}),
        (make_round([]), " →  nine", {}),
        (make_round([1, 2], 2, emitted=(1, 2)), " one two", {}),  # the text ended before the target's own token
        (TREES[0], " one│ two┬ one →  nine", {" nine": None}),
        (TREES[1], " one two →  nine", {" nine": "cyan"}),  # nothing was drafted after the path: a bonus
        (TREES[2], "│ one two┬⏎three →  nine", {" nine": "cyan"}),
        (TREES[3], " one│ two┬ one two", {" nine": None}),
    ],
)
def test_a_draft_with_what_became_of_it(r, shown, styles):
    text = show_draft(r, Pieces(decode, 9))
    assert text.plain == shown
    found = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert {piece: found.get(piece) for piece in styles} == styles


def test_table_shows_every_round():
    out = io.StringIO()
    rounds = [*TRACE, make_round([4], 1, gamma=0.61)]
    Console(file=out, width=140).print(make_table(rounds, Pieces(decode, 9), whole=True))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert "│ four" not in lines[4]
    assert "[bold]four" in lines[4]  # text of a model is no markup
    assert "0.610" in lines[7]
    assert lines[2].split()[-2:] == ["3.00", "+5.00"]
    names = {column.header for column in make_table([make_round([1], 1)], Pieces(decode, 9)).columns}
    assert not names & {"gamma", "branches"}, "columns that say nothing"
    assert {"drafter", "saved ms"} <= names


def test_the_table_fits_and_shows_every_drafter():
    long = [
        make_round([1, 2, 3] * 9, 20, drafter="draft-model", promised=(PLAIN, MODEL), milliseconds=1234.56, gamma=0.5),
        *WEIGHED, *TREES,
    ]  # fmt: skip
    for width in (NARROW, 80):
        out = io.StringIO()
        Console(file=out, width=width).print(make_table(long, Pieces(decode, 9)))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in out.getvalue(), "nothing is cut"
        assert "1234.56" in out.getvalue()
        assert "draft-model" in out.getvalue()


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (TRACE, "Drafting saved 32 % of the time: 733.3 tokens/s, against 500.0 plain."),
        ([make_round([1], 0)], "Drafting took 50 % more time: 333.3 tokens/s, against 500.0 plain."),
        ([make_round([], end="none")], "Nothing was drafted: this text was decoded plainly."),
        ([make_round([1], 1, plain_milliseconds=None)], "1 of 1 draft tokens were accepted; what that saved is not"),
    ],
)
def test_the_first_line_is_a_verdict(trace, said):
    assert verdict_line(summarize(trace, curves=None, longest=4, context=10)).startswith(said)


def test_drafts_of_the_prompts_round_are_not_denied():
    summary = summarize([], curves=None, longest=4, context=10)
    assert verdict_line(summary, (4, 3)) == (
        "All drafts were in the round that read the prompt: 3 of 4 tokens were accepted."
    )


def test_it_says_why_a_text_is_short():
    assert end_line("length", 24, 24) == []
    assert end_line("stop", 21, 24) == ["The text ended after 21 of at most 24 tokens, at its end token, or a stop."]
    assert "no more room" in end_line("length", 21, 24)[0]
    kept = [make_round([1, 2], 2, drafter="draft-model", promised=(PLAIN, MODEL._replace(tokens_per_second=900.0)))]
    assert len(short_lines(summarize(kept, curves=None, longest=4, context=10))) == 3


def test_sums_of_trees():
    summary = summarize(TREES, curves=None, longest=4, context=10)
    assert (summary.drafted, summary.accepted, summary.branches, summary.accepted_branches) == (20, 8, 12, 4)
    # Of the chain: its first token passed in three rounds of four, and its second in one of these three.
    assert summary.positions == {"self": [Position(4, 3), Position(3, 1)]}
    assert summary_lines(summary)[0].endswith("8 of 20 draft tokens accepted (0.400), 4 of 12 on branches.")
    table = make_table(TREES, Pieces(decode, 9), whole=True)
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["accepted"] == ["2/5", "2/5", "1/5", "3/5"]
    assert columns["branches"] == ["3"] * 4

"""The greedy part: equal outputs pass, a near-tie is explained, anything else fails and says where."""

import pytest

from specexport.verify.greedy import (
    ScriptedDrafter,
    check_greedy,
    compare_outputs,
    explain_difference,
    logits_one_at_a_time,
)
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.verify_fakes import LOOKAHEAD, PROMPTS, VOCAB, WidthDependent, make_engine, make_executor


@pytest.mark.parametrize("draft", ["good", "adversarial", None])
def test_a_right_engine_passes_with_any_draft(draft):
    result = check_greedy(make_engine(draft), PROMPTS, max_tokens=24)
    assert result.passed
    assert result.differences == ()
    copies = [("lookup", min(7, LOOKAHEAD)), ("suffix", min(7, LOOKAHEAD))]
    models = [("draft model", 1), ("draft model", 2), ("draft model", 4)] if draft else []
    chained = [("chained", LOOKAHEAD)] if draft else []
    expected = [*models, *copies, *chained, ("scripted", LOOKAHEAD)]
    assert [(run.drafter, run.lookahead) for run in result.runs] == expected
    assert all(run.identical == len(PROMPTS) and run.tokens_compared == 24 * len(PROMPTS) for run in result.runs)


@pytest.mark.parametrize(("draft", "drafter"), [("good", "draft model"), (None, "lookup")])
def test_one_run_has_trees_if_the_target_takes_them(draft, drafter):
    target = make_executor()
    target.takes_trees = True
    result = check_greedy(make_engine(draft, target), PROMPTS, max_tokens=24)
    assert result.passed
    (run,) = (run for run in result.runs if run.tree_size)
    assert (run.drafter, run.lookahead, run.tree_size) == (f"{drafter}, trees of 12", LOOKAHEAD, 12)
    assert run.identical == len(PROMPTS)
    if draft:
        chain = next(run for run in result.runs if run.drafter == drafter and run.lookahead == LOOKAHEAD)
        assert run.mean_accepted_length > 1.2 * chain.mean_accepted_length


def test_a_wrong_path_fails_the_run_with_trees():
    class Misplaced(FakeExecutor):
        def move_entries(self, row, entries, start):
            """Leaves everything where it was."""

    target = make_executor(Misplaced)
    target.takes_trees = True
    result = check_greedy(make_engine("good", target), PROMPTS, max_tokens=24)
    assert not result.passed
    assert {difference.drafter for difference in result.differences} == {"draft model, trees of 12"}


def test_a_target_with_gates_also_drafts_for_itself():
    result = check_greedy(make_engine(target=make_executor(num_gates=8)), PROMPTS, max_tokens=24)
    assert result.passed
    assert [run.drafter for run in result.runs][-4:] == ["self", "suffix", "chained", "scripted"], "as in the registry"
    run = result.runs[-4]
    assert (run.lookahead, run.identical) == (LOOKAHEAD, len(PROMPTS))
    assert run.mean_accepted_length > 1


def test_scripted_drafts_are_accepted_at_every_length():
    drafter = ScriptedDrafter([[1, 2, 3, 4, 5, 6]], VOCAB, lookahead=4)
    seq = Request(0, [7], SamplingParams(max_tokens=9), vocab_size=VOCAB, max_model_len=40)
    right = set()
    for _ in range(5):
        tokens = drafter.propose([seq], [4])[0].tokens
        right.add(next((i for i, (a, b) in enumerate(zip(tokens, [1, 2, 3, 4], strict=True)) if a != b), 4))
    assert right == {0, 1, 2, 3, 4}
    assert drafter.propose([seq], [0])[0].tokens == []


def test_a_near_tie_is_explained_where_bits_may_differ():
    engine = make_engine(target=make_executor(WidthDependent, gap=1e-6))
    result = check_greedy(engine, PROMPTS, max_tokens=16, tolerance=1e-5)
    assert result.differences
    assert result.passed
    assert (result.failures, result.near_ties) == (0, len(result.differences))
    for item in result.differences:
        assert item.plain_token != item.speculative_token
        assert item.gap == item.shortfall == pytest.approx(1e-6, rel=0.5)
        assert item.gap <= item.limit
    exact = check_greedy(make_engine(target=make_executor(WidthDependent, gap=1e-6)), PROMPTS, max_tokens=16)
    assert not exact.passed
    assert (exact.failures, exact.near_ties) == (len(exact.differences), 0)


@pytest.mark.parametrize(
    ("above", "options", "shortfall", "explained"),
    [(1, {}, 0, False), (1, {"tolerance": 1e-5}, 0, True), (-1, {"tolerance": 1e-5}, 1, False)],
    ids=["the same bits are asked for", "a tie at the top", "a tie far below the top"],
)
def test_what_explains_a_difference(above, options, shortfall, explained):
    logits = make_executor().logits_after([1]).copy()
    logits[2] = logits[3] = logits.max() + above
    found = explain_difference(logits, (2, 3), **options)
    assert (found["gap"], found["shortfall"], found["explained"]) == (0, pytest.approx(shortfall), explained)
    logits[5] = float("nan")
    assert not explain_difference(logits, (2, 3), **options)["explained"]


def test_a_real_difference_fails_and_says_where():
    engine = make_engine(target=make_executor(WidthDependent, gap=0.5))
    result = check_greedy(engine, PROMPTS, max_tokens=16, tolerance=1e-5)
    assert not result.passed
    assert result.failures == len(result.differences)
    first = result.differences[0]
    assert first.gap == pytest.approx(0.5)
    plain = engine.generate(PROMPTS[first.prompt], speculation=False)[0].token_ids
    assert plain[first.position] == first.plain_token
    run = next(run for run in result.runs if run.lookahead == first.lookahead)
    assert run.identical < len(PROMPTS)
    assert run.tokens_compared < 16 * len(PROMPTS)
    (short,) = compare_outputs(make_executor(), [[1]], [[1, 2, 3]], [[1, 2]], "draft model", 4)
    assert (short.position, short.plain_token, short.speculative_token, short.explained) == (2, 3, -1, False)
    with pytest.raises(InvalidRequestError, match="empty"):
        check_greedy(make_engine(), [[]])


@pytest.mark.parametrize("output", [[], [5, 6, 7]])
def test_the_rerun_goes_one_token_at_a_time(output):
    executor = make_executor()
    logits = logits_one_at_a_time(executor, [1, 2, 3], output)
    assert (logits == executor.logits_after([1, 2, 3, *output])).all()
    assert {shape.num_tokens for shape in executor.calls[1:]} == {1}

"""Running a benchmark over fake engines: its prompts, what is run, in which order, and what is recorded."""

import json

import pytest

from specexport.bench.methods import Method, ablation, lookaheads, make_cells, resolve_methods
from specexport.bench.options import parse_lengths
from specexport.bench.prompts import BenchPrompt, group_by_domain, mix_domains, read_prompts
from specexport.bench.runner import WARMUP_TOKENS, Meter, draw_lengths, run_bench
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.stats import PaddingStats, PhaseTimes
from tests.support.fakes.bench_fakes import PROMPTS, make_options, make_subject

ALL = ["draft-model", "lookup", "chained", "vanilla", "unpad-kv", "unpad-input"]


def methods(*names, drafter="lookup", has_draft=True, **modes):
    return resolve_methods(names or None, drafter=drafter, has_draft=has_draft, **modes)


def measured(log):
    return [event for event in log if event[0] == "generate" and event[4][0].max_tokens > WARMUP_TOKENS]


def test_methods_are_a_drafter_and_two_switches():
    assert methods(*ALL, "plain") == [
        Method("plain", "none", True, True), Method("draft-model", "draft-model", True, True),
        Method("lookup", "lookup", True, True), Method("chained", "chained", True, True),
        Method("vanilla", "lookup", False, False), Method("unpad-kv", "lookup", True, False),
        Method("unpad-input", "lookup", False, True),
    ]  # fmt: skip
    assert [method.name for method in methods()] == ["plain", "draft-model", "lookup", "chained", "auto"]
    assert [method.name for method in methods(has_draft=False)] == ["plain", "lookup", "auto"]
    assert methods("lookup", unpad_input=False)[1:] == [Method("lookup", "lookup", True, False)]
    assert methods(*ablation("chained"), drafter="chained")[1:] == [
        Method("chained", "chained", True, True),
        Method("unpad-kv", "chained", True, False),
        Method("unpad-input", "chained", False, True),
        Method("vanilla", "chained", False, False),
    ]


def test_lookahead_is_the_drafters_own_unless_asked_for():
    plain, draft, lookup = methods("draft-model", "lookup")
    assert lookaheads(plain, [2, 4], built=8) == [0]
    assert lookaheads(draft, None, built=8) == [4]
    assert lookaheads(lookup, None, built=8) == [7]
    assert lookaheads(lookup, None, built=5) == [5]
    assert lookaheads(draft, [2, 6, 2], built=8) == [2, 6]
    with pytest.raises(InvalidRequestError, match="9; this engine was built for 1 to 8"):
        lookaheads(draft, [2, 9], built=8)


def test_lengths_are_drawn_from_the_seed():
    options = [make_options([], max_tokens=parse_lengths("3:40"), seed=seed) for seed in (1, 1, 2)]
    many = [BenchPrompt(str(i), "d", "x") for i in range(50)]
    one, same, other = (draw_lengths(many, each) for each in options)
    assert one == same != other
    assert 3 <= min(one.values()) < max(one.values()) <= 40
    assert parse_lengths("9") == (9, 9)


def test_every_method_writes_the_text_of_plain_decoding():
    options = make_options(
        methods(*ALL), batch_sizes=(1, 3), num_speculative_tokens=(2, 5), batchings=("continuous", "static"),
        max_tokens=(5, 30),
    )  # fmt: skip
    result = run_bench(make_subject(), PROMPTS, options)
    combinations = 2 * 2 * 2 * (1 + 6 * 2)  # batch sizes, batchings, domains, plain and each method at each K
    assert len(result.runs) == combinations
    assert len(result.compared) == len(result.prompts) == combinations // 2 * len(PROMPTS)  # each of one domain
    assert not result.different
    lengths = draw_lengths(PROMPTS, options)
    assert all(record.new_tokens == record.max_tokens == lengths[record.id] for record in result.prompts)


def test_a_method_that_changes_one_token_is_caught():
    result = run_bench(make_subject(broken=True), PROMPTS, make_options(methods("lookup", "draft-model"), repeats=2))
    found = {(r.cell.method, r.cell.domain, r.id, r.repeat, r.first_difference) for r in result.different}
    assert found == {("lookup", d, i, repeat, 4) for d, i in (("a", "a/2"), ("b", "b/1")) for repeat in (0, 1)}
    sampled = run_bench(make_subject(broken=True), PROMPTS, make_options(methods("lookup"), temperatures=(0.7,)))
    assert sampled.prompts
    assert not sampled.compared


def test_records_say_what_happened():
    result = run_bench(make_subject(), PROMPTS, make_options(methods("lookup"), batch_sizes=(2,), max_tokens=(20, 20)))
    by_run = {}
    for record in result.prompts:
        by_run.setdefault((record.cell, record.repeat), []).append(record)
        assert sum(record.accepted_lengths) == record.new_tokens == 20
        assert len(record.accepted_lengths) == record.rounds
        assert 0 <= record.accepted <= record.drafted
        assert record.wall_s > 0
        assert record.queued_s >= 0
        assert record.time_to_first_token_s + record.decode_s == pytest.approx(record.wall_s)
        assert record.finish_reason == "length"
        assert (record.cell.method == "plain") is (record.drafted == 0)
    for run in result.runs:
        records = by_run[run.cell, run.repeat]
        assert run.num_prompts == len(records)
        assert run.new_tokens == sum(record.new_tokens for record in records)
        assert run.tokens_per_second == run.new_tokens / run.wall_s
        assert run.wall_s > max(record.queued_s + record.wall_s for record in records) * 0.9
        assert run.padding["accepted"] == sum(sum(record.accepted_lengths[1:]) for record in records)
        assert run.padding["ratio"] == run.padding["padding"] / run.padding["accepted"]
        assert 0 < run.phases["total"] < run.wall_s
        assert run.decode_tokens_per_second == run.padding["accepted"] / run.phases["total"]
    queued = [record.queued_s for record in by_run[result.runs[0].cell, 0]]
    assert queued[2] > max(queued[:2])  # the third prompt of two rows waits


def test_warm_up_is_short_uses_every_drafter_and_leaves_no_record():
    log = []
    options = make_options(methods("lookup"), batch_sizes=(2,), max_tokens=(30, 30), warmup=2)
    result = run_bench(make_subject(log), PROMPTS, options)
    requests = [event for event in log if event[0] == "generate"]
    warm = [event for event in requests if event not in measured(log)]
    assert [event[2] for event in warm] == ["none", "lookup"] * 2
    assert all(event[3] == ["w1 w2", "w7 w8"] for event in warm)  # one of each domain
    assert len(result.runs) == len(measured(log)) == 4


def test_static_batching_is_one_call_a_group():
    log = []
    options = make_options(methods("lookup"), batch_sizes=(2,), batchings=("static",), max_tokens=(18, 18))
    run_bench(make_subject(log), PROMPTS, options)
    assert [event[3] for event in measured(log) if event[2] == "lookup"] == [
        ["w1 w2", "w3 w3 w4 w5"], ["w16"], ["w7 w8", "w2 w2 w2"],
    ]  # fmt: skip


def test_references_go_to_drafters_that_copy_and_only_there():
    log = []
    run_bench(
        make_subject(log), PROMPTS[3:], make_options(methods("draft-model", "lookup", "chained"), max_tokens=(20, 20))
    )
    given = {event[2]: event[5]["references"] for event in measured(log)}
    wanted = [PROMPTS[3].reference, None]
    assert given == {"none": None, "draft-model": None, "lookup": wanted, "chained": wanted}


def test_every_method_gets_the_same_parameters():
    log = []
    options = make_options(methods("lookup", "vanilla"), max_tokens=(17, 40), temperatures=(0.5,), seed=3)
    run_bench(make_subject(log), PROMPTS[:3], options)
    first, *others = [event[4] for event in measured(log)]
    assert len(others) == 2
    assert all(params == first for params in others)
    assert [params.seed for params in first] == [3, 4, 5]


def test_a_prompt_that_does_not_fit_is_named_and_the_engine_is_closed():
    log = []
    long = BenchPrompt("too/long", "a", "w1 " * 80)
    with pytest.raises(InvalidRequestError, match="prompt 'too/long': the prompt has 80 tokens"):
        run_bench(make_subject(log), [*PROMPTS, long], make_options(methods("lookup")))
    assert [event[0] for event in log] == ["load", "close"]


class CarriesOn:
    """An engine that was never idle: its counters go on. It can also start new ones, as an idle engine does."""

    def __init__(self, *, new):
        self.times, self.padding, self.new = PhaseTimes(total=5.0, rounds=3), PaddingStats(accepted=100, padding=9), new

    def generate(self, prompts):
        if self.new:
            self.times, self.padding = PhaseTimes(), PaddingStats()
        self.times.total += 0.5
        self.times.rounds += 4
        self.padding.accepted += 8
        self.padding.padding += 2
        return []


@pytest.mark.parametrize("new", [True, False])
def test_a_run_is_metered_alone_whether_or_not_the_engine_was_idle(new):
    engine = CarriesOn(new=new)
    meter = Meter(engine)
    meter.generate({"prompts": []})
    meter.generate({"prompts": []})
    cell = make_cells(methods("lookup"), 2, requested=None, built=8, temperatures=[0], domains=["a"], batchings=["c"])
    record = meter.record(cell[0], 0, [])
    assert (record.phases["total"], record.phases["rounds"]) == (1.0, 8)
    assert record.padding["accepted"] == 16
    assert record.padding["ratio"] == 0.25
    assert record.decode_tokens_per_second == 16


def test_fields_of_a_line_and_what_stands_in_for_them(tmp_path):
    lines = [{"prompt": "p", "id": "x", "domain": "d", "reference": "r", "other": 1}, {"prompt": "q"}]
    lines.append({"prompt": "s\u2028t", "id": 7})
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "two.jsonl").write_text('{"prompt": "u"}\n')
    assert read_prompts([tmp_path / "one.jsonl", tmp_path / "two.jsonl"]) == [
        BenchPrompt("x", "d", "p", "r"),
        BenchPrompt("one/2", "one", "q"),
        BenchPrompt("7", "one", "s\u2028t"),
        BenchPrompt("two/1", "two", "u"),
    ]


def test_builtin_prompts_have_three_domains_of_eight_and_some_are_chosen():
    prompts = read_prompts([])
    assert {domain: len(each) for domain, each in group_by_domain(prompts).items()} == {"code": 8, "math": 8, "copy": 8}
    assert len({prompt.text for prompt in prompts}) == 24
    few = read_prompts([], num_prompts=2, domains=["copy", "code"])
    assert [prompt.id for prompt in few] == ["code/0", "code/1", "copy/0", "copy/1"]
    with pytest.raises(InvalidRequestError, match="did you mean 'code'"):
        read_prompts([], domains=["cod"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}', "line 2: there is no field `prompt`"), (b'{"prompt": ""}', "line 2: `prompt` is ''"),
        (b'{"prompt": "a", "domain": []}', "line 2: `domain` is"),
        (b'{"prompt": "a", "id": "x"}', "two prompts have the id 'x'"), (None, "has no prompts"),
    ],
)  # fmt: skip
def test_bad_lines_and_files_are_named(tmp_path, content, said):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n\n" if content is None else b'{"prompt": "fine", "id": "x"}\n' + content + b"\n")
    with pytest.raises(InvalidRequestError, match=said) as caught:
        read_prompts([path])
    assert caught.value.hint


def test_mixed_domains_take_turns():
    prompts = [*(BenchPrompt(f"a{i}", "a", "x") for i in range(3)), BenchPrompt("b0", "b", "y")]
    mixed = mix_domains(prompts)
    assert [prompt.id for prompt in mixed] == ["a0", "b0", "a1", "a2"]
    assert {prompt.domain for prompt in mixed} == {"mixed"}

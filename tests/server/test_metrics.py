"""Every metric by name, type and label; numbers equal to what the requests' own statistics say."""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.metrics import EngineMetrics
from specexport_runtime.requests.records import Proposal
from specexport_runtime.requests.results import GenerationResult
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.telemetry.counts import EngineCounts, Histogram, length_bounds
from specexport_runtime.telemetry.observers import RoundRecord
from tests.support.servers.serving import MAX_MODEL_LEN, VOCAB, fake_engine

LABELS = {"model_name", "engine"}
COUNTERS = {
    "vllm:prompt_tokens": set(), "vllm:generation_tokens": set(), "vllm:request_success": {"finished_reason"},
    "vllm:num_preemptions": set(), "specexport:reread_tokens": set(), "specexport:observers_dropped": set(),
    "vllm:prefix_cache_queries": set(), "vllm:prefix_cache_hits": set(), "vllm:spec_decode_num_drafts": set(),
    "vllm:spec_decode_num_draft_tokens": set(), "vllm:spec_decode_num_accepted_tokens": set(),
    "vllm:spec_decode_num_accepted_tokens_per_pos": {"position"}, "specexport:branch_tokens": set(),
    "specexport:accepted_branch_tokens": set(), "specexport:steps": set(), "specexport:step_seconds": set(),
    "specexport:saved_seconds": set(), "specexport:lost_seconds": set(), "specexport:request_failures": {"error"},
    "specexport:requests_refused": {"reason"}, "specexport:drafter_drafts": {"drafter"},
    "specexport:drafter_draft_tokens": {"drafter"}, "specexport:drafter_accepted_tokens": {"drafter"},
    "specexport:drafter_saved_seconds": {"drafter"}, "specexport:drafter_lost_seconds": {"drafter"},
}  # fmt: skip
GAUGES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "specexport:acceptance_rate",
    "specexport:mean_acceptance_length", "specexport:max_num_seqs", "specexport:prefixes_kept", "specexport:engine_up",
    "specexport:kv_cache_resident_bytes", "specexport:kv_cache_reserved_bytes", "specexport:kv_cache_budget_bytes",
    "specexport:drafter_never_accepted",
}  # fmt: skip
OF_DRAFTERS = {"specexport:drafter_never_accepted"}
HISTOGRAMS = {
    "vllm:iteration_tokens_total", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_max_tokens",
}  # fmt: skip
REQUESTS = [
    ("w1 w2 w3", SamplingParams(max_tokens=20), {}),
    ("w4 w5", SamplingParams(max_tokens=7, temperature=1.0, seed=3), {"num_speculative_tokens": 3}),
    ("w6 w7 w6 w7 w6 w7 w6", SamplingParams(max_tokens=30), {"drafter": "lookup"}),
    ("w8", SamplingParams(max_tokens=5), {"speculation": False}),
    ("w9 w2 w9", SamplingParams(max_tokens=1), {}),
    ("w3 w3", SamplingParams(max_tokens=60, stop="w5"), {}),
]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., SpecEngine]]:
    engines: list[SpecEngine] = []

    def make(*args: int, **options: object) -> SpecEngine:
        engines.append(fake_engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def watched(engine: SpecEngine, name: str = "fake") -> EngineMetrics:
    metrics = EngineMetrics(name)
    metrics.attach(engine)
    return metrics


def samples(metrics: EngineMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the page by its name and labels, those of the engine left out."""
    found = {}
    for family in parse_text(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = frozenset((key, value) for key, value in sample.labels.items() if key not in LABELS)
            found[sample.name, labels] = sample.value
    return found


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def run_all(engine: SpecEngine) -> list[GenerationResult]:
    handles = [engine.submit(prompt, params, **drafting) for prompt, params, drafting in REQUESTS]
    return [handle.result(30) for handle in handles]


class Ran(NamedTuple):
    """An engine of two rows that did ``REQUESTS``, and nothing else: read only."""

    engine: SpecEngine
    metrics: EngineMetrics
    results: list[GenerationResult]


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    engine = fake_engine(2)
    metrics = watched(engine)
    yield Ran(engine, metrics, run_all(engine))
    engine.close()


def test_every_name_type_and_label(ran):
    metrics = ran.metrics
    families = {family.name: family for family in metrics.registry.collect()}
    ours = {name: family for name, family in families.items() if ":" in name}
    assert {name for name, family in ours.items() if family.type == "counter"} == set(COUNTERS)
    assert {name for name, family in ours.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in ours.items() if family.type == "histogram"} == HISTOGRAMS
    for name, family in ours.items():
        assert family.documentation.endswith(".")
        for sample in family.samples:
            own = {"drafter"} if name in OF_DRAFTERS else COUNTERS.get(name, set())
            assert set(sample.labels) - {"le"} == LABELS | own, sample
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"
    assert families["process_resident_memory_bytes"].samples[0].value > 0


def test_counts_are_those_of_the_results(ran):
    _, metrics, results = ran
    stats = [result.stats for result in results]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    drafts = sum(s.draft_rounds for s in stats)
    assert drafted > accepted > 0
    assert value(metrics, "vllm:prompt_tokens_total") == sum(s.num_prompt_tokens for s in stats)
    assert value(metrics, "vllm:generation_tokens_total") == sum(len(result.token_ids) for result in results)
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == drafts
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == drafted
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert value(metrics, "specexport:acceptance_rate") == accepted / drafted
    assert value(metrics, "specexport:mean_acceptance_length") == 1 + accepted / drafts
    reasons = Counter(result.finish_reason for result in results)
    assert set(reasons) == {"stop", "length"}
    for reason in ("stop", "length", "abort", "error"):
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == reasons[reason]


def test_accepted_tokens_by_position(ran):
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    histograms = [result.stats.accepted_histogram for result in ran.results]
    for position in range(ran.engine.lookahead):
        expected = sum(n for histogram in histograms for count, n in histogram.items() if count > position)
        assert value(ran.metrics, name, position=str(position)) == expected
    assert (name, frozenset({("position", "8")})) not in samples(ran.metrics)


def test_each_drafter_has_its_own_counts(ran):
    metrics = ran.metrics
    by_drafter = {"lookup": [0, 0, 0], "draft-model": [0, 0, 0]}
    for result, (_, _, drafting) in zip(ran.results, REQUESTS, strict=True):
        if drafting.get("speculation", True):
            counts = by_drafter[drafting.get("drafter", "draft-model")]
            counts[0] += result.stats.drafted
            counts[1] += result.stats.accepted
            counts[2] += result.stats.draft_rounds
    for drafter, (drafted, accepted, rounds) in by_drafter.items():
        assert drafted
        assert value(metrics, "specexport:drafter_drafts_total", drafter=drafter) == rounds
        assert value(metrics, "specexport:drafter_draft_tokens_total", drafter=drafter) == drafted
        assert value(metrics, "specexport:drafter_accepted_tokens_total", drafter=drafter) == accepted
    for side in ("saved", "lost"):
        parts = [value(metrics, f"specexport:drafter_{side}_seconds_total", drafter=drafter) for drafter in by_drafter]
        assert sum(parts) == value(metrics, f"specexport:{side}_seconds_total")


def test_histograms_hold_each_request_once(ran):
    _, metrics, results = ran
    stats = [result.stats for result in results]
    assert sum(s.queued_s for s in stats) > 1e-4  # six on two rows: the time to the first token has that of the queue
    sums: dict[str, Iterable[float]] = {
        "vllm:time_to_first_token_seconds": (s.first_token_time - s.submit_time for s in stats),
        "vllm:e2e_request_latency_seconds": (s.end_time - s.submit_time for s in stats),
        "vllm:request_queue_time_seconds": (s.queued_s for s in stats),
        "vllm:request_prefill_time_seconds": (s.time_to_first_token_s for s in stats),
        "vllm:request_decode_time_seconds": (s.decode_s for s in stats),
        "vllm:request_inference_time_seconds": (s.end_time - s.start_time for s in stats),
        "vllm:request_time_per_output_token_seconds": (
            s.decode_s / (s.num_generated_tokens - 1) if s.num_generated_tokens > 1 else 0 for s in stats
        ),
        "vllm:request_prompt_tokens": (s.num_prompt_tokens for s in stats),
        "vllm:request_generation_tokens": (s.num_generated_tokens for s in stats),
        "vllm:request_params_max_tokens": (params.max_tokens for _, params, _ in REQUESTS),
    }
    for name, values in sums.items():
        assert value(metrics, f"{name}_count") == len(results), name
        assert value(metrics, f"{name}_sum") == pytest.approx(sum(values)), name
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == sum(s.rounds - 1 for s in stats)
    between = value(metrics, "vllm:inter_token_latency_seconds_sum")
    assert 0 < between < 2 * sum(s.decode_s for s in stats)
    assert value(metrics, "vllm:iteration_tokens_total_count") == value(metrics, "specexport:steps_total")
    tokens = sum(s.num_prompt_tokens + s.num_generated_tokens for s in stats)
    assert value(metrics, "vllm:iteration_tokens_total_sum") == tokens
    assert value(metrics, "specexport:step_seconds_total") > 0


def test_buckets_take_their_bound():
    histogram = Histogram((1, 2, 5))
    for number in (0.5, 1, 1.1, 2, 5, 5.1):
        histogram.observe(number)
    assert histogram.counts == [2, 2, 1, 1]
    assert length_bounds(400) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert length_bounds(1) == (1,)
    assert length_bounds(500)[-1] == 500


def test_buckets_are_cumulative_and_end_in_all(ran):
    for family in ran.metrics.registry.collect():
        if family.type == "histogram":
            buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
            numbers = [sample.value for sample in buckets]
            assert numbers == sorted(numbers)
            assert buckets[-1].labels["le"] == "+Inf"
            assert numbers[-1] == value(ran.metrics, f"{family.name}_count")
    at_most = sum(result.stats.num_generated_tokens <= 5 for result in ran.results)
    assert value(ran.metrics, "vllm:request_generation_tokens_bucket", le="5.0") == at_most


def test_cancelled_and_failed_requests_are_counted_apart(make_engine):
    engine = make_engine(2, step_seconds=0.005)
    metrics = watched(engine)
    first = engine.submit("w1", SamplingParams(max_tokens=300), speculation=False)
    chunks = iter(first)  # kept: letting go of it would cancel the request
    next(chunks)
    waiting = [engine.submit("w2", SamplingParams(max_tokens=300)) for _ in range(3)]
    for handle in (first, *waiting):
        handle.cancel()
        assert handle.result(30).finish_reason == "cancelled"
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 4
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_count") >= 1

    def broken(*args: object) -> None:
        raise MemoryError("no more")

    execute, engine.target.execute = engine.target.execute, broken
    with pytest.raises(Exception, match="no more"):
        engine.submit("w1").result(30)
    engine.target.execute = execute
    engine.submit("w1").result(30)
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "specexport:request_failures_total", error="MemoryError") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert metrics._counts.last_token == {}  # nothing is kept of sequences that have ended


def test_gauges_say_how_busy_the_engine_is(make_engine):
    engine = make_engine(2, step_seconds=0.01)
    metrics = watched(engine)
    assert math.isnan(value(metrics, "specexport:acceptance_rate"))
    handles = [engine.submit("w1 w2", SamplingParams(max_tokens=300), speculation=False) for _ in range(5)]
    chunks = iter(handles[0])  # kept: letting go of it would cancel the request
    next(chunks)
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 3
    assert 0 < value(metrics, "vllm:kv_cache_usage_perc") < 1
    assert value(metrics, "specexport:max_num_seqs") == 2
    for handle in handles:
        handle.cancel()
        handle.result(30)
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0


def test_a_drafter_that_is_never_accepted_is_marked(make_engine):
    engine = make_engine(draft=FakeExecutor(VOCAB, 4, MAX_MODEL_LEN + 16, negate=True))
    metrics = watched(engine)
    engine.submit("w1 w2", SamplingParams(max_tokens=10), num_speculative_tokens=4).result(30)
    assert value(metrics, "specexport:drafter_never_accepted", drafter="draft-model") == 0  # too early to say
    engine.submit("w1 w2", SamplingParams(max_tokens=40), num_speculative_tokens=4).result(30)
    assert value(metrics, "specexport:drafter_accepted_tokens_total", drafter="draft-model") == 0
    assert value(metrics, "specexport:drafter_never_accepted", drafter="draft-model") == 1
    engine.submit("w1 w2 w1 w2 w1 w2 w1", SamplingParams(max_tokens=40), drafter="lookup").result(30)
    assert value(metrics, "specexport:drafter_never_accepted", drafter="lookup") == 0


class Event:
    def __init__(self, tokens: int, drafted: int = 2, drafter: str = "") -> None:
        self.tokens, self.drafted, self.accepted, self.on_chain = [0] * tokens, drafted, 0, 0
        self.proposal = Proposal([0] * drafted, drafter=drafter)
        self.request = type("S", (), {"stats": type("T", (), {"rounds": 2})(), "finish_reason": None})()


def test_drafters_of_a_round_share_its_seconds_by_their_tokens():
    counts = EngineCounts()
    # Three rows with six tokens, where plain decoding needs 10 ms for three: 20 - 12 ms are saved.
    three = [Event(3, 6, "suffix"), Event(2, 2, "draft-model"), Event(1, 0)]
    counts.add_round(RoundRecord(three, 0, 0.012, 0.010), 1.0)
    assert counts.saved == {"suffix": pytest.approx(0.006), "draft-model": pytest.approx(0.002)}
    counts.add_round(RoundRecord([Event(1, 4, "draft-model")], 0, 0.030, 0.010), 2.0)
    assert counts.lost == {"draft-model": pytest.approx(0.020)}
    counts.add_round(RoundRecord([Event(1, 1, "suffix"), Event(1, 3)], 0, 0.014, 0.010), 3.0)
    assert counts.lost == {
        "draft-model": pytest.approx(0.020),
        "suffix": pytest.approx(0.001),
        "other": pytest.approx(0.003),
    }
    counts.add_round(RoundRecord([Event(5)], 7, 0.010, 0.010), 3.0)  # with a prompt: nobody knows
    counts.add_round(RoundRecord([Event(5)], 0, 0.010, None), 3.0)
    counts.add_round(RoundRecord([Event(1, 0)], 0, 0.030, 0.010), 3.0)  # nobody drafted: chance
    failed = Event(0, 4, "draft-model")  # its draft was not tested
    counts.add_round(RoundRecord([failed, Event(4, 3, "suffix")], 0, 0.010, 0.010), 4.0)
    assert counts.saved == {"suffix": pytest.approx(0.036), "draft-model": pytest.approx(0.002)}
    assert counts.saved_seconds == sum(counts.saved.values()) == pytest.approx(0.038)
    assert counts.lost_seconds == sum(counts.lost.values()) == pytest.approx(0.024)


def test_two_engines_do_not_collide(make_engine):
    one, other = make_engine(), make_engine()
    first, second = watched(one, "one"), watched(other, "other")
    one.submit("w1", SamplingParams(max_tokens=4)).result(30)
    assert value(first, "vllm:generation_tokens_total") == 4
    assert value(second, "vllm:generation_tokens_total") == 0
    assert b'model_name="one"' not in second.render()[0]
    shared = CollectorRegistry()
    EngineMetrics("one", shared)
    with pytest.raises(ValueError, match="Duplicated"):
        EngineMetrics("other", shared)


def test_a_page_without_an_engine_can_be_read():
    page = EngineMetrics('odd "name"\nwith\\all').render()[0].decode()
    families = {family.name: family for family in parse_text(page)}
    assert families["vllm:num_requests_running"].samples == []
    assert families["vllm:generation_tokens"].samples[0].labels["model_name"] == 'odd "name"\nwith\\all'


@pytest.mark.parametrize(("openmetrics", "parse"), [(False, parse_text), (True, parse_openmetrics)])
def test_both_formats_parse(ran, openmetrics, parse):
    metrics = ran.metrics
    page, content_type = metrics.render(openmetrics_format=openmetrics)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain")
    assert page.endswith(b"# EOF\n") == openmetrics
    # The parser of the text format drops the suffix of counters, and cannot know that of a histogram is not one.
    found = {family.name.removesuffix("_total") for family in parse(page.decode())}
    assert found >= set(COUNTERS) | GAUGES | {name.removesuffix("_total") for name in HISTOGRAMS}
    told = {(s.name, frozenset(s.labels)) for family in parse(page.decode()) for s in family.samples}
    assert told == {(s.name, frozenset(s.labels)) for family in metrics.registry.collect() for s in family.samples}


def test_scrapes_while_busy_see_one_moment(make_engine):
    engine = make_engine(4)
    metrics = watched(engine)
    done = threading.Event()
    errors: list[BaseException] = []
    scrapes = []

    def scrape() -> None:
        try:
            while not done.is_set():
                seen = samples(metrics)
                per_position = [v for (name, _), v in seen.items() if name.endswith("per_pos_total")]
                drafted = seen["vllm:spec_decode_num_draft_tokens_total", frozenset()]
                accepted = seen["vllm:spec_decode_num_accepted_tokens_total", frozenset()]
                assert sum(per_position) == accepted <= drafted
                generated = seen["vllm:generation_tokens_total", frozenset()]
                fed = seen["vllm:prompt_tokens_total", frozenset()]
                assert seen["vllm:iteration_tokens_total_sum", frozenset()] == generated + fed
                scrapes.append(generated)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=scrape)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that a scrape is interrupted often
    thread.start()
    try:
        results = [result for _ in range(2) for result in run_all(engine)]
        while len(set(scrapes)) < 2 and not errors:  # it has to look in between, when it gets a turn
            results += run_all(engine)
    finally:
        done.set()
        thread.join(30)
        sys.setswitchinterval(interval)
    assert not errors
    assert scrapes == sorted(scrapes)
    assert value(metrics, "vllm:generation_tokens_total") == sum(len(result.token_ids) for result in results)


def test_metrics_never_change_the_text(ran, make_engine):
    assert [result.token_ids for result in run_all(make_engine(2))] == [result.token_ids for result in ran.results]


def test_a_copy_of_the_counts_stays_as_it_is(make_engine):
    engine = make_engine()
    metrics = watched(engine)
    run_all(engine)
    before = metrics.counts()
    told = (before.generation_tokens, list(before.accepted), before.histograms["e2e"].total, dict(before.finished))
    run_all(engine)
    assert told == (before.generation_tokens, before.accepted, before.histograms["e2e"].total, before.finished)
    assert metrics.counts().generation_tokens == 2 * before.generation_tokens

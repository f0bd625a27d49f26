"""Prometheus metrics of an engine, by vLLM's names and definitions where they exist (extra ``serve``)."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from specexport_runtime.telemetry.counts import EngineCounts, Histogram

if TYPE_CHECKING:
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.requests.request import Request
    from specexport_runtime.telemetry.observers import RoundRecord

LABELS = ("model_name", "engine")
"""Labels of every metric, as in vLLM."""
QUEUE_FULL = "queue_full"


class _Number(NamedTuple):
    """A counter without labels of its own."""

    name: str
    text: str
    value: Callable[[EngineCounts], float]


class _Labelled(NamedTuple):
    """A counter with a label of its own."""

    name: str
    text: str
    label: str
    values: Callable[[EngineCounts], Iterable[tuple[str, float]]]


_NUMBERS = (
    _Number("vllm:prompt_tokens", "Prompt tokens that were fed.", lambda c: c.prompt_tokens),
    _Number("vllm:generation_tokens", "Tokens that were generated.", lambda c: c.generation_tokens),
    _Number(
        "vllm:num_preemptions",
        "How often a request was paused, so that another did not wait for a row.",
        lambda c: c.preemptions,
    ),
    _Number("specexport:reread_tokens", "Tokens of paused requests that were fed again.", lambda c: c.reread_tokens),
    _Number(
        "vllm:prefix_cache_queries",
        "Prompt tokens, of requests that ended, for which cache rows were searched.",
        lambda c: c.prefix_queries,
    ),
    _Number("vllm:prefix_cache_hits", "Of these, tokens that a row had.", lambda c: c.prefix_hits),
    _Number("vllm:spec_decode_num_drafts", "Rounds of a request that had a draft.", lambda c: c.all_drafts().rounds),
    _Number(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens that the target tested.", lambda c: c.all_drafts().drafted
    ),
    _Number(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted and emitted.",
        lambda c: c.all_drafts().accepted,
    ),
    _Number(
        "specexport:branch_tokens",
        "Draft tokens tested beside the chain of their draft.",
        lambda c: c.all_drafts().branches,
    ),
    _Number(
        "specexport:accepted_branch_tokens",
        "Of these, tokens that were accepted and emitted.",
        lambda c: c.all_drafts().accepted_branches,
    ),
    _Number("specexport:steps", "Steps of the engine.", lambda c: c.steps),
    _Number("specexport:step_seconds", "Seconds that the steps took, drafting included.", lambda c: c.step_seconds),
    _Number(
        "specexport:saved_seconds",
        "Seconds saved against plain decoding, in the rounds with drafts that were faster.",
        lambda c: c.saved_seconds,
    ),
    _Number(
        "specexport:lost_seconds",
        "Seconds lost against plain decoding, in the rounds with drafts that were slower.",
        lambda c: c.lost_seconds,
    ),
)


def _of_drafters(value: Callable[[EngineCounts, str], float]) -> Callable[[EngineCounts], Iterable[tuple[str, float]]]:
    return lambda counts: [(name, value(counts, name)) for name in sorted(counts.drafters)]


_LABELLED = (
    _Labelled(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their position in the draft, from 0.",
        "position",
        lambda c: ((str(position), number) for position, number in enumerate(c.accepted_at())),
    ),
    _Labelled(
        "vllm:request_success",
        "Requests that ended, by reason: stop, length, abort (cancelled) or error.",
        "finished_reason",
        lambda c: c.finished.items(),
    ),
    _Labelled(
        "specexport:request_failures",
        "Requests that were ended by an exception, by its class.",
        "error",
        lambda c: c.failures.items(),
    ),
    _Labelled(
        "specexport:requests_refused",
        "Requests that were answered with an error before they reached the engine, by its code.",
        "reason",
        lambda c: c.refused.items(),
    ),
    _Labelled(
        "specexport:drafter_drafts",
        "Rounds of a request that had a draft, by drafter.",
        "drafter",
        _of_drafters(lambda counts, name: counts.drafters[name].rounds),
    ),
    _Labelled(
        "specexport:drafter_draft_tokens",
        "Draft tokens that the target tested, by drafter.",
        "drafter",
        _of_drafters(lambda counts, name: counts.drafters[name].drafted),
    ),
    _Labelled(
        "specexport:drafter_accepted_tokens",
        "Draft tokens that were accepted and emitted, by drafter.",
        "drafter",
        _of_drafters(lambda counts, name: counts.drafters[name].accepted),
    ),
    _Labelled(
        "specexport:drafter_saved_seconds",
        "Part of specexport:saved_seconds, by drafter: those of a round share its seconds by their tokens tested.",
        "drafter",
        _of_drafters(lambda counts, name: counts.saved.get(name, 0.0)),
    ),
    _Labelled(
        "specexport:drafter_lost_seconds",
        "Part of specexport:lost_seconds, by drafter: those of a round share its seconds by their tokens tested.",
        "drafter",
        _of_drafters(lambda counts, name: counts.lost.get(name, 0.0)),
    ),
)

_HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("step_tokens", "Tokens of a step: prompt tokens fed and tokens generated."),
    "vllm:time_to_first_token_seconds": ("first_token", "Seconds from submission to the first token, queue included."),
    "vllm:inter_token_latency_seconds": ("between_tokens", "Seconds between rounds that gave a request tokens."),
    "vllm:request_time_per_output_token_seconds": ("per_token", "Mean seconds a token after the first, a request."),
    "vllm:e2e_request_latency_seconds": ("e2e", "Seconds from submission to the last token."),
    "vllm:request_queue_time_seconds": ("queue", "Seconds from submission to a cache row."),
    "vllm:request_prefill_time_seconds": ("prefill", "Seconds from a cache row to the first token."),
    "vllm:request_decode_time_seconds": ("decode", "Seconds from the first token to the last."),
    "vllm:request_inference_time_seconds": ("inference", "Seconds from a cache row to the last token."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request."),
    "vllm:request_generation_tokens": ("generation_tokens", "Tokens generated for a request."),
    "vllm:request_params_max_tokens": ("max_tokens", "The parameter max_tokens of a request."),
}


class EngineMetrics:
    """Metrics of one engine; an ``EngineObserver``, and a collector of Prometheus.

    They are registered once; ``registry`` None makes a new one, with the metrics of the process. ``model_name`` and
    ``engine`` are values of labels; ``"0"`` is that of a vLLM of one engine.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None, *, engine: str = "0") -> None:
        self.model_name = model_name
        self._labels = (model_name, engine)
        self._lock = threading.Lock()
        self._counts = EngineCounts(refused={QUEUE_FULL: 0})
        self._engine: SpecEngine | None = None
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
        self.registry = registry
        self.registry.register(self)

    def attach(self, engine: "SpecEngine") -> None:
        """Count what an engine does from now on, and read how busy it is when asked."""
        with self._lock:
            self._counts.set_limits(engine.max_model_len, engine.lookahead)
        self._engine = engine
        engine.add_observer(self)

    def on_round(self, record: "RoundRecord") -> None:
        """Count a step (decoding thread)."""
        now = time.perf_counter()
        with self._lock:
            self._counts.add_round(record, now)

    def on_finish(self, request: "Request") -> None:
        """Count the end of a request (decoding thread)."""
        with self._lock:
            self._counts.add_end(request)

    def count_refused(self, reason: str) -> None:
        """Count a request that was answered with an error before it reached the engine (any thread)."""
        with self._lock:
            self._counts.refused[reason] = self._counts.refused.get(reason, 0) + 1

    def counts(self) -> EngineCounts:
        """All numbers, of one moment."""
        with self._lock:
            return self._counts.copy()

    def render(self, *, openmetrics_format: bool = False) -> tuple[bytes, str]:
        """The page for Prometheus, in its own format or in OpenMetrics': body and content type."""
        if openmetrics_format:
            # Otherwise it writes `vllm_…` for `vllm:…`, though a colon is as legal there as here.
            names_as_they_are = openmetrics.ALLOWUTF8
            body = openmetrics.generate_latest(self.registry, names_as_they_are)  # type: ignore[no-untyped-call]
            return bytes(body), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def describe(self) -> list[Metric]:
        """The metrics without values: a registry refuses a second engine's."""
        return [Metric(family.name, family.documentation, family.type) for family in self.collect()]

    def collect(self) -> Iterator[Metric]:
        """The metrics, for Prometheus' client."""
        counts = self.counts()
        yield from self._gauges(counts)
        for number in _NUMBERS:
            counter = CounterMetricFamily(number.name, number.text, labels=LABELS)
            counter.add_metric(self._labels, number.value(counts))
            yield counter
        for part in _LABELLED:
            counter = CounterMetricFamily(part.name, part.text, labels=[*LABELS, part.label])
            for label, value in part.values(counts):
                counter.add_metric([*self._labels, label], value)
            yield counter
        for name, (key, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=LABELS)
            histogram = counts.histograms[key]
            family.add_metric(self._labels, _cumulative(histogram), histogram.total)
            yield family

    def _gauges(self, counts: EngineCounts) -> Iterator[Metric]:
        drafts = counts.all_drafts()
        unknown = float("nan")  # nothing was drafted
        rate = drafts.accepted / drafts.drafted if drafts.drafted else unknown
        length = 1 + drafts.accepted / drafts.rounds if drafts.rounds else unknown
        rows: list[tuple[str, str, float | None]] = [
            ("specexport:acceptance_rate", "Accepted share of all draft tokens since the start.", rate),
            ("specexport:mean_acceptance_length", "Mean tokens of a round with a draft since the start.", length),
        ]
        engine = self._engine
        load = None if engine is None else engine.current_load()
        rows += [
            (
                "specexport:engine_up",
                "1 while the engine takes requests and its steps go on, else 0.",
                None if engine is None else float(engine.trouble is None),
            ),
            ("vllm:num_requests_running", "Requests that hold a cache row.", load and load.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for a cache row.", load and load.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", load and load.kv_usage),
            ("specexport:kv_cache_resident_bytes", "Memory of cache rows written to.", load and load.kv_bytes_resident),
            (
                "specexport:kv_cache_reserved_bytes",
                "Memory that running requests may come to need, and of pinned prefixes.",
                load and load.kv_bytes_reserved,
            ),
            ("specexport:kv_cache_budget_bytes", "Bound of the cache's memory.", load and load.kv_bytes_budget),
            ("specexport:prefixes_kept", "Texts kept in rows where no request runs.", load and load.num_prefixes),
            ("specexport:max_num_seqs", "Cache rows: the most requests at a time.", load and load.max_num_seqs),
        ]
        for name, text, value in rows:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            if value is not None:
                gauge.add_metric(self._labels, value)
            yield gauge
        dropped = CounterMetricFamily(
            "specexport:observers_dropped", "Observers, these metrics say, that raised and hear no more.", labels=LABELS
        )
        dropped.add_metric(self._labels, engine.observers_dropped if engine else 0)
        yield dropped
        text = "1 for a drafter of which nothing was accepted since the start, though enough was tested; else 0."
        useless = GaugeMetricFamily("specexport:drafter_never_accepted", text, labels=[*LABELS, "drafter"])
        for drafter in sorted(counts.drafters):
            useless.add_metric([*self._labels, drafter], float(counts.drafters[drafter].never_accepted))
        yield useless


def _cumulative(histogram: Histogram) -> Sequence[tuple[str, float]]:
    total = 0
    pairs = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        pairs.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
    return pairs

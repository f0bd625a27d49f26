"""Prometheus metrics of an engine, by vLLM's names and definitions where they exist (extra ``serve``)."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import TYPE_CHECKING

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


_NUMBERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens that were fed."),
    "vllm:generation_tokens": ("generation_tokens", "Tokens that were generated."),
    "vllm:num_preemptions": ("preemptions", "How often a request was paused, so that another did not wait for a row."),
    "specexport:reread_tokens": ("reread_tokens", "Tokens of paused requests that were fed again."),
    "vllm:prefix_cache_queries": (
        "prefix_queries",
        "Prompt tokens, of requests that ended, for which cache rows were searched.",
    ),
    "vllm:prefix_cache_hits": ("prefix_hits", "Of these, tokens that a row had."),
    "vllm:spec_decode_num_drafts": ("all_drafts.rounds", "Rounds of a request that had a draft."),
    "vllm:spec_decode_num_draft_tokens": ("all_drafts.drafted", "Draft tokens that the target tested."),
    "vllm:spec_decode_num_accepted_tokens": ("all_drafts.accepted", "Draft tokens that were accepted and emitted."),
    "specexport:branch_tokens": ("all_drafts.branches", "Draft tokens tested beside the chain of their draft."),
    "specexport:accepted_branch_tokens": (
        "all_drafts.accepted_branches",
        "Of these, tokens that were accepted and emitted.",
    ),
    "specexport:steps": ("steps", "Steps of the engine."),
    "specexport:step_seconds": ("step_seconds", "Seconds that the steps took, drafting included."),
    "specexport:saved_seconds": (
        "saved_seconds",
        "Seconds saved against plain decoding, in the rounds with drafts that were faster.",
    ),
    "specexport:lost_seconds": (
        "lost_seconds",
        "Seconds lost against plain decoding, in the rounds with drafts that were slower.",
    ),
}
"""Counters without a label of their own, and where :class:`EngineCounts` has them."""
_LABELLED = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "position",
        "accepted_at",
        "Accepted draft tokens by their position in the draft, from 0.",
    ),
    "vllm:request_success": (
        "finished_reason",
        "finished",
        "Requests that ended, by reason: stop, length, abort (cancelled) or error.",
    ),
    "specexport:request_failures": ("error", "failures", "Requests that were ended by an exception, by its class."),
    "specexport:requests_refused": (
        "reason",
        "refused",
        "Requests that were answered with an error before they reached the engine, by its code.",
    ),
}
"""Those with one."""
_BY_DRAFTER: dict[str, tuple[Callable[[EngineCounts, str], float], str]] = {
    "specexport:drafter_drafts": (
        lambda counts, name: counts.drafters[name].rounds,
        "Rounds of a request that had a draft, by drafter.",
    ),
    "specexport:drafter_draft_tokens": (
        lambda counts, name: counts.drafters[name].drafted,
        "Draft tokens that the target tested, by drafter.",
    ),
    "specexport:drafter_accepted_tokens": (
        lambda counts, name: counts.drafters[name].accepted,
        "Draft tokens that were accepted and emitted, by drafter.",
    ),
    "specexport:drafter_saved_seconds": (
        lambda counts, name: counts.saved.get(name, 0.0),
        "Part of specexport:saved_seconds, by drafter: those of a round share its seconds by their tokens tested.",
    ),
    "specexport:drafter_lost_seconds": (
        lambda counts, name: counts.lost.get(name, 0.0),
        "Part of specexport:lost_seconds, by drafter: those of a round share its seconds by their tokens tested.",
    ),
}
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
    ``engine`` are values of labels; ``"0"`` is that of a vLLM of one engine. ``beside`` are those of another model,
    on whose page these come too.
    """

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry | None = None,
        *,
        engine: str = "0",
        beside: "EngineMetrics | None" = None,
    ) -> None:
        self.model_name = model_name
        self._labels = (model_name, engine)
        self._lock = threading.Lock()
        self._counts = EngineCounts(refused={QUEUE_FULL: 0})
        self._engine: SpecEngine | None = None
        self._page: list[EngineMetrics] = [] if beside is None else beside._page  # of this class
        self._page.append(self)
        if beside is not None:
            registry = beside.registry
        elif registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
        self.registry: CollectorRegistry = registry
        if beside is None:
            self.registry.register(self)

    def attach(self, engine: "SpecEngine") -> None:
        """Count what an engine does from now on, and read how busy it is when asked."""
        with self._lock:
            self._counts.set_limits(engine.max_model_len, engine.lookahead)
        self._engine = engine
        engine.add_observer(self)

    def detach(self) -> None:
        """The engine was closed; what was counted stays."""
        self._engine = None

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
            return deepcopy(self._counts)

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
        """The metrics of all engines of the page, each family once, for Prometheus' client."""
        for families in zip(*[each._families() for each in self._page], strict=True):
            families[0].samples = [sample for family in families for sample in family.samples]
            yield families[0]

    def _families(self) -> Iterator[Metric]:
        counts = self.counts()
        yield from self._gauges(counts)
        for name, (where, text) in _NUMBERS.items():
            yield self._counter(name, text, attrgetter(where)(counts))
        for name, (label, where, text) in _LABELLED.items():
            yield self._labelled(CounterMetricFamily, name, text, label, getattr(counts, where))
        for name, (value, text) in _BY_DRAFTER.items():
            values = {drafter: value(counts, drafter) for drafter in sorted(counts.drafters)}
            yield self._labelled(CounterMetricFamily, name, text, "drafter", values)
        for name, (key, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=LABELS)
            histogram = counts.histograms[key]
            family.add_metric(self._labels, _cumulative(histogram), histogram.total)
            yield family

    def _gauges(self, counts: EngineCounts) -> Iterator[Metric]:
        drafts = counts.all_drafts
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
        text = "Observers, these metrics say, that raised and hear no more."
        yield self._counter("specexport:observers_dropped", text, engine.observers_dropped if engine else 0)
        text = "1 for a drafter of which nothing was accepted since the start, though enough was tested; else 0."
        useless = {drafter: float(counts.drafters[drafter].never_accepted) for drafter in sorted(counts.drafters)}
        yield self._labelled(GaugeMetricFamily, "specexport:drafter_never_accepted", text, "drafter", useless)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _labelled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(name, text, labels=[*LABELS, label])
        for each, value in values.items():
            family.add_metric([*self._labels, each], value)
        return family


def _cumulative(histogram: Histogram) -> Sequence[tuple[str, float]]:
    total = 0
    pairs = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        pairs.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
    return pairs

"""Measures every K side by side: repeat r of all before repeat r + 1 of any, every other repeat backwards.

Prompts get their lengths from their own text: repeated in front where they are too short, cut in front where they are
too long. All are decoded greedily, so that every K gives the same tokens.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.bench.meter import Meter
from specexport.bench.methods import Cell, EngineKey
from specexport.bench.subject import Subject
from specexport.progress import Progress, ProgressEvent
from specexport.tune.options import TuneOptions
from specexport_runtime.costs.tune_profile import TuneCell

if TYPE_CHECKING:
    from specexport_runtime import SpecEngine

WARMUP_TOKENS = 8
TOLERANCE = 0.01
"""The smallest K within this share of the fastest is chosen: a longer draft must be worth it."""


class _Way(NamedTuple):
    drafter: str
    lookahead: int


def fit_prompt(ids: Seq[int], length: int) -> list[int]:
    """A prompt of exactly ``length`` tokens that ends as ``ids`` does.

    The first token, often one that begins a sequence, stays in front; behind it the rest is repeated, or cut in front.

    Args:
        ids: token ids, at least one.
        length: tokens wanted.
    """
    first, rest = ids[0], list(ids[1:]) or [ids[0]]
    times = -(-length // len(rest))
    return [first, *(rest * times)[len(rest) * times - length + 1 :]] if length > 1 else [ids[-1]]


def choose_lookahead(rates: Mapping[int, float]) -> int:
    """The smallest K whose tokens/s are within ``TOLERANCE`` of the best."""
    best = max(rates.values())
    return min(k for k, rate in rates.items() if rate >= best * (1 - TOLERANCE))


class Tuner:
    """Measures all that the options ask for.

    Args:
        subject: the bundle.
        texts: prompts.
        options: what to measure.
        progress: called before each run.
    """

    def __init__(
        self, subject: Subject, texts: Seq[str], options: TuneOptions, progress: Progress | None = None
    ) -> None:
        self._subject, self._texts, self._options, self._progress = subject, texts, options, progress
        pairs = [_Way(name, k) for name in options.drafters for k in options.lookaheads if k]
        self._ways = [_Way("none", 0), *pairs]
        self._done = 0
        self._total = options.repeats * len(options.batch_sizes) * len(options.contexts) * len(self._ways)

    def run(self) -> tuple[TuneCell, ...]:
        """Measure.

        Returns:
            a cell for each drafter, batch size and context, in this order.

        Raises:
            SpecexportError: loading or decoding failed.
        """
        rates: dict[tuple[int, int, _Way], list[float]] = {}
        for size in self._options.batch_sizes:
            self._report(f"loading for batch size {size}")
            engine = self._subject.load(EngineKey(unpad_kv=True, unpad_input=True, max_num_seqs=size))
            try:
                self._measure_batch(engine, size, rates)
            finally:
                engine.close()
        return tuple(self._cells({key: median(values) for key, values in rates.items()}))

    def _measure_batch(self, engine: "SpecEngine", size: int, rates: dict[tuple[int, int, _Way], list[float]]) -> None:
        ids = [engine.encode(text) for text in islice(cycle(self._texts), max(size, self._options.num_prompts))]
        longest = {way.drafter: way for way in self._ways}
        for way in longest.values():
            engine.generate(**self._request(way, [fit_prompt(ids[0], self._options.contexts[0])], WARMUP_TOKENS))
        for repeat in range(self._options.repeats):
            for context in self._options.contexts:
                prompts = [fit_prompt(each, context) for each in ids]
                for way in self._ways if repeat % 2 == 0 else reversed(self._ways):
                    rate = self._measure(engine, way, size, prompts)
                    rates.setdefault((size, context, way), []).append(rate)

    def _measure(self, engine: "SpecEngine", way: _Way, size: int, prompts: Seq[list[int]]) -> float:
        """Tokens/s of the rounds; of the whole run where every text ended with its first token."""
        self._report(f"{way.drafter}, K={way.lookahead}, batch size {size}, context {len(prompts[0])}")
        self._done += 1
        meter = Meter(engine)
        results = meter.generate(self._request(way, prompts, self._options.tokens))
        cell = Cell(way.drafter, way.drafter, True, True, size, way.lookahead, 0.0, "tune", "continuous")
        record = meter.record(cell, 0, results)
        return record.decode_tokens_per_second or record.tokens_per_second

    @staticmethod
    def _request(way: _Way, prompts: Seq[list[int]], tokens: int) -> dict[str, Any]:
        from specexport_runtime.sampling.params import SamplingParams

        return {
            "prompts": list(prompts),
            "params": [SamplingParams(max_tokens=tokens)] * len(prompts),
            "drafter": way.drafter,
            "num_speculative_tokens": way.lookahead or None,
        }

    def _cells(self, rates: Mapping[tuple[int, int, _Way], float]) -> Iterator[TuneCell]:
        for name in self._options.drafters:
            for size in self._options.batch_sizes:
                for context in self._options.contexts:
                    ways = [self._ways[0], *(way for way in self._ways if way.drafter == name)]
                    found = {way.lookahead: rates[size, context, way] for way in ways}
                    yield TuneCell(name, size, context, choose_lookahead(found), found)

    def _report(self, message: str) -> None:
        if self._progress is not None:
            self._progress(ProgressEvent("tune", "", self._done, self._total, message))

"""Measures every K of every bundle side by side: repeat r of all before repeat r + 1 of any, every other one backwards.

For that the engines of all bundles are loaded at once. What does not depend on a bundle's own draft, plain decoding
above all, is measured with the first bundle and holds for all, since they have the same target.

Prompts get their lengths from their own text: repeated in front where they are too short, cut in front where they are
too long. All are decoded greedily, so that every K of every bundle gives the same tokens.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport.bench.meter import Meter
from specexport.bench.methods import Cell, EngineKey
from specexport.bench.records import RunRecord
from specexport.bench.subject import Subject
from specexport.progress import Progress, ProgressEvent
from specexport.tune.options import TuneOptions
from specexport.tune.table import TuneCell, TuneRounds
from specexport.tune.texts import TextCheck

if TYPE_CHECKING:
    from specexport_runtime import GenerationResult, SpecEngine

WARMUP_TOKENS = 8
TOLERANCE = 0.01
"""The smallest K within this share of the fastest is chosen: a longer draft must be worth it."""


class _Way(NamedTuple):
    bundle: str
    drafter: str
    lookahead: int


class _Run(NamedTuple):
    record: RunRecord
    drafted: int
    accepted: int
    draft_rounds: int


_Runs = dict[tuple[int, int, _Way], list[_Run]]


def fit_prompt(ids: Seq[int], length: int) -> list[int]:
    """A prompt of exactly ``length`` tokens that ends as ``ids``, at least one token, does.

    The first token, often one that begins a sequence, stays in front; behind it the rest is repeated, or cut in front.
    """
    first, rest = ids[0], list(ids[1:]) or [ids[0]]
    times = -(-length // len(rest))
    return [first, *(rest * times)[len(rest) * times - length + 1 :]] if length > 1 else [ids[-1]]


def choose_lookahead(rates: Mapping[int, float]) -> int:
    """The smallest K whose tokens/s are within ``TOLERANCE`` of the best."""
    best = max(rates.values())
    return min(k for k, rate in rates.items() if rate >= best * (1 - TOLERANCE))


def _having(subjects: Mapping[str, Subject], drafter: str) -> list[str]:
    """The bundles whose own draft a drafter is for; none of a drafter that needs the target alone."""
    return [name for name, subject in subjects.items() if subject.own_drafter == drafter]


def _rate(runs: Seq[_Run]) -> float:
    """Tokens/s of the rounds; of the whole run where every text ended with its first token: median."""
    return median(run.record.decode_tokens_per_second or run.record.tokens_per_second for run in runs)


def describe_rounds(runs: Seq[_Run]) -> TuneRounds:
    """What the rounds of some runs of one K were like."""
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    draft_rounds = sum(run.draft_rounds for run in runs)
    phases = [run.record.phases for run in runs]
    drafting = [(each["draft"] - each["draft_prefill"]) / each["draft_steps"] for each in phases if each["draft_steps"]]
    verifying = [each["verify"] / each["rounds"] for each in phases if each["rounds"]]
    return TuneRounds(
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=1 + accepted / draft_rounds if draft_rounds else None,
        draft_milliseconds=1e3 * median(drafting) if drafting else None,
        verify_milliseconds=1e3 * median(verifying) if verifying else None,
    )


class Tuner:
    """Measures all that the options ask for, with one bundle or more of the same target, by their names.

    ``progress`` is called before each run.
    """

    def __init__(
        self, subjects: Mapping[str, Subject], texts: Seq[str], options: TuneOptions, progress: Progress | None = None
    ) -> None:
        self._subjects, self._texts, self._options, self._progress = subjects, texts, options, progress
        self._plain = _Way(next(iter(subjects)), "none", 0)
        drafting = [
            _Way(bundle, drafter, k)
            for drafter in options.drafters
            for k in options.lookaheads
            if k
            for bundle in (_having(subjects, drafter) or [self._plain.bundle])
        ]
        self._ways = [self._plain, *drafting]
        self._plain_texts: dict[tuple[int, int, int], list[int]] = {}
        self.checks = {name: TextCheck() for name in subjects}  # texts of each bundle against plain decoding's
        self._done = 0
        self._total = options.repeats * len(options.batch_sizes) * len(options.contexts) * len(self._ways)

    def run(self) -> dict[str, tuple[TuneCell, ...]]:
        """By the bundles' names, a cell for each drafter, batch size and context, in this order.

        Raises SpecexportError if loading or decoding fails.
        """
        runs: _Runs = {}
        for size in self._options.batch_sizes:
            with ExitStack() as stack:
                engines = {}
                for name, subject in self._subjects.items():
                    self._report(name, f"loading for batch size {size}")
                    key = EngineKey(unpad_kv=True, unpad_input=True, max_num_seqs=size)
                    engines[name] = stack.enter_context(closing(subject.load(key)))
                self._measure_batch(engines, size, runs)
        return {name: tuple(self._cells(name, runs)) for name in self._subjects}

    def _measure_batch(self, engines: "Mapping[str, SpecEngine]", size: int, runs: _Runs) -> None:
        encode = engines[self._plain.bundle].encode
        ids = [encode(text) for text in islice(cycle(self._texts), max(size, self._options.num_prompts))]
        longest = {(way.bundle, way.drafter): way for way in self._ways}
        for way in longest.values():
            prompt = fit_prompt(ids[0], self._options.contexts[0])
            engines[way.bundle].generate(**self._request(way, [prompt], WARMUP_TOKENS))
        for repeat in range(self._options.repeats):
            for context in self._options.contexts:
                prompts = [fit_prompt(each, context) for each in ids]
                for way in self._ways if repeat % 2 == 0 else reversed(self._ways):
                    run = self._measure(engines[way.bundle], way, size, prompts)
                    runs.setdefault((size, context, way), []).append(run)

    def _measure(self, engine: "SpecEngine", way: _Way, size: int, prompts: Seq[list[int]]) -> _Run:
        what = f"{way.drafter}, K={way.lookahead}, batch size {size}, context {len(prompts[0])}"
        self._report(way.bundle, what)
        self._done += 1
        meter = Meter(engine)
        results = meter.generate(self._request(way, prompts, self._options.tokens))
        self._compare(way, size, len(prompts[0]), results, what)
        cell = Cell(way.drafter, way.drafter, True, True, size, way.lookahead, 0.0, "tune", "continuous")
        stats = [result.stats for result in results]
        return _Run(
            meter.record(cell, 0, results),
            drafted=sum(each.drafted for each in stats),
            accepted=sum(each.accepted for each in stats),
            draft_rounds=sum(each.draft_rounds for each in stats),
        )

    def _compare(self, way: _Way, size: int, context: int, results: "Seq[GenerationResult]", what: str) -> None:
        """Compare with plain decoding's first texts, which are the first of all."""
        for index, result in enumerate(results):
            wanted = self._plain_texts.setdefault((size, context, index), result.token_ids)
            self.checks[way.bundle].compare(result.token_ids, wanted, f"{what}, prompt {index + 1}")

    @staticmethod
    def _request(way: _Way, prompts: Seq[list[int]], tokens: int) -> dict[str, Any]:
        from specexport_runtime.sampling.params import SamplingParams

        return {
            "prompts": list(prompts),
            "params": [SamplingParams(max_tokens=tokens)] * len(prompts),
            "drafter": way.drafter,
            "num_speculative_tokens": way.lookahead or None,
        }

    def _cells(self, bundle: str, runs: _Runs) -> Iterator[TuneCell]:
        for drafter in self._options.drafters:
            having = _having(self._subjects, drafter)
            if having and bundle not in having:
                continue
            measured_with = bundle if having else self._plain.bundle
            ways = [self._plain, *(way for way in self._ways if way[:2] == (measured_with, drafter))]
            for size in self._options.batch_sizes:
                for context in self._options.contexts:
                    found = {way.lookahead: runs[size, context, way] for way in ways}
                    rates = {k: _rate(each) for k, each in found.items()}
                    rounds = {k: describe_rounds(each) for k, each in found.items()}
                    yield TuneCell(drafter, size, context, choose_lookahead(rates), rates, rounds)

    def _report(self, bundle: str, message: str) -> None:
        if self._progress is not None:
            whose = f"{bundle}: " if len(self._subjects) > 1 else ""
            self._progress(ProgressEvent("tune", "", self._done, self._total, whose + message))

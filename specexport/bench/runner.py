"""Runs the combinations, side by side, through ``SpecEngine.generate`` alone: plain decoding too.

One engine is alive at a time: the spinning threads of two would slow each other down. At each batch size, repeat r of
every method, of all bundles, comes before repeat r + 1 of any, and every other repeat goes backwards, so that a machine
that gets slower or faster favours none. Loading and warming up are outside the measured time.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.bench.methods import Cell, LoadKey, is_copying, make_cells
from specexport.bench.options import BenchOptions
from specexport.bench.prompts import BenchPrompt, fit_prompt, group_by_domain, mix_domains
from specexport.bench.records import BenchResult, PromptRecord, RunRecord
from specexport.bench.subject import Subject, describe_machine
from specexport.progress import Progress, ProgressEvent
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from specexport_runtime import GenerationResult, SamplingParams, SpecEngine

WARMUP_TOKENS = 16


class BenchRunner:
    """Measures every combination; a K that the bundle was not built for raises InvalidRequestError."""

    def __init__(
        self, subject: Subject, prompts: Sequence[BenchPrompt], options: BenchOptions, progress: Progress | None = None
    ) -> None:
        self.runs: list[RunRecord] = []  # one record a run
        self.records: list[PromptRecord] = []  # one a prompt and run
        self._subject = subject
        self._options = options
        self._progress = progress
        self._domains = group_by_domain(prompts)
        self._lengths = draw_lengths(prompts, options)
        self._seeds = {prompt.id: options.seed + index for index, prompt in enumerate(prompts)}
        self._plain_texts: dict[tuple[str, int], list[int]] = {}
        self._engine: SpecEngine | None = None
        self._key: LoadKey | None = None
        self._cells = {size: self._plan(size) for size in dict.fromkeys(options.batch_sizes)}
        self._total = options.repeats * sum(map(len, self._cells.values()))

    def run(self) -> None:
        """Run everything; ``progress`` is called before each run."""
        try:
            for cells in self._cells.values():
                groups: dict[LoadKey, list[Cell]] = {}
                for cell in cells:
                    bundle = cell.bundle or self._subject.first
                    key = LoadKey(cell.unpad_kv, cell.unpad_input, cell.batch_size, bundle)
                    groups.setdefault(key, []).append(cell)
                for repeat in range(self._options.repeats):
                    for key, group in _alternate_order(list(groups.items()), repeat):
                        engine = self._use(key, group)
                        for cell in _alternate_order(group, repeat):
                            self._measure(engine, cell, repeat)
        finally:
            self._close()

    def _plan(self, batch_size: int) -> list[Cell]:
        options = self._options
        return make_cells(
            options.methods, batch_size, requested=options.num_speculative_tokens, built=self._subject.lookahead,
            temperatures=options.temperatures, domains=list(self._domains), batchings=options.batchings,
            contexts=options.contexts or (0,), trees=options.tree_sizes,
        )  # fmt: skip

    def _use(self, key: LoadKey, cells: Sequence[Cell]) -> "SpecEngine":
        """The engine of ``key``, warm."""
        if self._engine is not None and self._key == key:
            return self._engine
        self._close()
        first = self._key is None
        self._report(f"loading for batch size {key.max_num_seqs}")
        self._engine, self._key = self._subject.load(key), key
        if first:
            for prompt in (prompt for prompts in self._domains.values() for prompt in prompts):
                encode_prompt(self._engine, prompt)
        self._warm_up(self._engine, key, cells)
        gc.collect()  # not in the next run's time
        return self._engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _warm_up(self, engine: "SpecEngine", key: LoadKey, cells: Sequence[Cell]) -> None:
        """Short runs with each drafter, on prompts of every domain: bindings, memory, threads."""
        mixed = mix_domains([prompt for prompts in self._domains.values() for prompt in prompts])
        ordered = sorted(cells, key=lambda cell: (cell.num_speculative_tokens, cell.tree_size, -cell.context))
        largest = {cell.drafter: cell for cell in ordered}
        for _ in range(self._options.warmup):
            for cell in largest.values():
                request = self._request(engine, cell, mixed[: key.max_num_seqs], most=WARMUP_TOKENS)
                engine.generate(**request, remember=False)

    def _measure(self, engine: "SpecEngine", cell: Cell, repeat: int) -> None:
        self._report(describe_cell(cell))
        prompts = self._domains[cell.domain]
        size = cell.batch_size if cell.batching == "static" else len(prompts)
        groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        # A drafter that learns begins each run with nothing, and learns from one of its prompts for the next.
        salt = f"run {len(self.runs)}"
        requests = [self._request(engine, cell, group) | {"cache_salt": salt} for group in groups]
        meter = Meter(engine)
        start = time.perf_counter()
        results = [result for request in requests for result in meter.generate(request)]
        self.runs.append(meter.record(cell, repeat, results))
        for prompt, result in zip(prompts, results, strict=True):
            self.records.append(self._prompt_record(cell, repeat, prompt, result, start))

    def _request(
        self, engine: "SpecEngine", cell: Cell, prompts: Sequence[BenchPrompt], most: int | None = None
    ) -> dict[str, Any]:
        """Arguments of ``SpecEngine.generate``."""
        texts = [prompt.text for prompt in prompts]
        references = [prompt.reference for prompt in prompts]
        return {
            "prompts": [fit_prompt(engine.encode(text), cell.context) for text in texts] if cell.context else texts,
            "params": [self._params(prompt, cell.temperature, most) for prompt in prompts],
            "drafter": cell.drafter,
            "num_speculative_tokens": cell.requested,
            "tree_size": cell.requested_tree,
            "references": references if is_copying(cell.drafter) and any(references) else None,
        }

    def _params(self, prompt: BenchPrompt, temperature: float, most: int | None) -> "SamplingParams":
        from specexport_runtime.sampling.params import SamplingParams

        length = self._lengths[prompt.id]
        return SamplingParams(
            temperature=temperature,
            max_tokens=length if most is None else min(length, most),
            ignore_eos=self._options.ignore_eos,
            seed=self._seeds[prompt.id],
        )

    def _prompt_record(
        self, cell: Cell, repeat: int, prompt: BenchPrompt, result: "GenerationResult", start: float
    ) -> PromptRecord:
        stats = result.stats
        equal, position = self._compare(cell, (prompt.id, cell.context), result.token_ids)
        return PromptRecord(
            cell, repeat, prompt.id, stats.num_prompt_tokens, self._lengths[prompt.id], len(result.token_ids),
            stats.rounds, stats.draft_rounds, stats.drafted, stats.accepted, list(stats.accepted_lengths),
            wall_s=(stats.end_time or stats.start_time) - stats.start_time,
            queued_s=max(stats.start_time - start, 0.0),
            time_to_first_token_s=stats.time_to_first_token_s,
            decode_s=stats.decode_s,
            finish_reason=result.finish_reason,
            equal_to_plain=equal,
            first_difference=position,
            branches=stats.branches,
            accepted_branches=stats.accepted_branches,
        )  # fmt: skip

    def _compare(self, cell: Cell, prompt: tuple[str, int], tokens: list[int]) -> tuple[bool | None, int | None]:
        """Compare with plain greedy decoding's first text of the prompt at its context; it is the first of all runs."""
        if cell.temperature:
            return None, None
        wanted = self._plain_texts.setdefault(prompt, tokens) if cell.method == "plain" else self._plain_texts[prompt]
        if tokens == wanted:
            return True, None
        differing = (i for i, pair in enumerate(zip_longest(wanted, tokens)) if pair[0] != pair[1])
        return False, next(differing)

    def _report(self, message: str) -> None:
        if self._progress is not None:
            self._progress(ProgressEvent("bench", "", len(self.runs), self._total, message))


def encode_prompt(engine: "SpecEngine", prompt: BenchPrompt) -> list[int]:
    """Token ids of a prompt; InvalidRequestError names one that the engine cannot take."""
    try:
        return engine.encode(prompt.text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {prompt.id!r}: {error.message}", error.hint) from error


def draw_lengths(prompts: Sequence[BenchPrompt], options: BenchOptions) -> dict[str, int]:
    """Most new tokens of each prompt, by id: drawn from the seed, the same for every method."""
    low, high = options.max_tokens
    drawn = np.random.default_rng(options.seed).integers(low, high + 1, len(prompts))
    return {prompt.id: int(length) for prompt, length in zip(prompts, drawn, strict=True)}


def describe_cell(cell: Cell) -> str:
    """One line about a combination."""
    parts = [cell.label, f"batch size {cell.batch_size}"]
    parts += [f"context {cell.context}"] if cell.context else []
    parts += [f"K={cell.requested}"] if cell.requested else []
    parts += [f"temperature {cell.temperature:g}"] if cell.temperature else []
    parts += [] if cell.batching == "continuous" else [cell.batching]
    return ", ".join([*parts, cell.domain])


def _alternate_order(items: Sequence[Any], repeat: int) -> Iterator[Any]:
    return iter(items) if repeat % 2 == 0 else reversed(items)


def run_bench(
    subject: Subject,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    progress: Progress | None = None,
    *,
    command: Sequence[str] = (),
) -> BenchResult:
    """Measure everything that ``options`` asks for; InvalidRequestError if the bundle or a prompt does not fit."""
    machine = describe_machine()  # its load before ours
    runner = BenchRunner(subject, prompts, options, progress)
    runner.run()
    return BenchResult(command, machine, subject.details, options.to_json(), runner.runs, runner.records)


class Meter:
    """Sums wall time and the engine's own counters over the calls of one run."""

    def __init__(self, engine: "SpecEngine") -> None:
        self._engine = engine
        self._seconds = 0.0
        self._phases: dict[str, float] = {}
        self._padding: dict[str, float] = {}

    def generate(self, request: Mapping[str, Any]) -> "list[GenerationResult]":
        """``SpecEngine.generate`` with the clock running, less what counters of a call before it held."""
        times, padding = self._engine.times, self._engine.padding
        before = asdict(times), asdict(padding)
        start = time.perf_counter()
        results = self._engine.generate(**request)
        self._seconds += time.perf_counter() - start
        _add(self._phases, asdict(self._engine.times), before[0] if self._engine.times is times else {})
        _add(self._padding, asdict(self._engine.padding), before[1] if self._engine.padding is padding else {})
        return results

    def record(self, cell: Cell, repeat: int, results: "Sequence[GenerationResult]") -> RunRecord:
        """The record of the run; ``results`` are those of all its calls, ``repeat`` counts from 0."""
        tokens = sum(len(result.token_ids) for result in results)
        in_rounds, seconds_of_rounds = self._padding["accepted"], self._phases["total"]
        return RunRecord(
            cell,
            repeat,
            num_prompts=len(results),
            new_tokens=tokens,
            wall_s=self._seconds,
            tokens_per_second=tokens / self._seconds,
            decode_tokens_per_second=in_rounds / seconds_of_rounds if in_rounds and seconds_of_rounds else None,
            phases=self._phases,
            padding={**self._padding, "ratio": self._padding["padding"] / in_rounds if in_rounds else 0.0},
        )


def _add(total: dict[str, float], now: Mapping[str, float], before: Mapping[str, float]) -> None:
    for name, value in now.items():
        total[name] = total.get(name, 0) + value - before.get(name, 0)

"""The one place where a run is timed and its tokens are counted, for every method."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specexport.bench.methods import Cell
from specexport.bench.records import RunRecord

if TYPE_CHECKING:
    from specexport_runtime import GenerationResult, SpecEngine


class Meter:
    """Sums wall time and the engine's own counters over the calls of one run."""

    def __init__(self, engine: "SpecEngine") -> None:
        self._engine = engine
        self._seconds = 0.0
        self._phases: dict[str, float] = {}
        self._padding: dict[str, float] = {}

    def generate(self, request: Mapping[str, Any]) -> "list[GenerationResult]":
        """``SpecEngine.generate`` with the clock running.

        The engine starts new counters when it was idle; if its thread has not yet ended, a call goes on with the old
        ones, so what they held before is subtracted.
        """
        times, padding = self._engine.times, self._engine.padding
        before = asdict(times), asdict(padding)
        start = time.perf_counter()
        results = self._engine.generate(**request)
        self._seconds += time.perf_counter() - start
        _add(self._phases, asdict(self._engine.times), before[0] if self._engine.times is times else {})
        _add(self._padding, asdict(self._engine.padding), before[1] if self._engine.padding is padding else {})
        return results

    def record(self, cell: Cell, repeat: int, results: "Seq[GenerationResult]") -> RunRecord:
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

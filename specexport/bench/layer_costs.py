"""What a round of drafts with some of a target's layers takes, from steps that were timed on this machine."""

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from specexport_runtime.executors.base import BoolArray
from specexport_runtime.packing.batch import ModelRunner, RowWork

_REPEATS = 7  # of each step, in turns; medians count


class LayerPromise(NamedTuple):
    """What a choice of layers promises."""

    speedup: float  # over plain decoding
    lookahead: int  # K that it has with
    tokens_a_round: float  # with that K, the target's own included


class LayerCosts(NamedTuple):
    """Seconds of one sequence's steps."""

    verify: tuple[float, ...]  # of the target's step with 1, 2, … tokens
    parts: tuple[float, ...]  # [2N], of each part in a step with one token; 0 where a layer has none

    def draft(self, mask: BoolArray) -> float:
        """Seconds of a draft step with the parts of ``mask`` on; no step is quicker than a twentieth of the whole."""
        off = sum(part for part, on in zip(self.parts, mask, strict=True) if not on)
        return max(self.verify[0] - off, self.verify[0] / 20)

    def promise(self, mask: BoolArray, tokens: Sequence[float]) -> LayerPromise:
        """The best of all K from 1 on; ``tokens`` are those of a round, by K from 0."""
        step = self.draft(mask)
        return max(
            LayerPromise(self.verify[0] * tokens[k] / (self.verify[k] + k * step), k, tokens[k])
            for k in range(1, len(tokens))
        )


def measure_costs(runner: ModelRunner, tokens: Sequence[int], lookahead: int) -> LayerCosts:
    """Time steps behind what is in row 0, with ``tokens`` fed again and again; a part by leaving its kind out."""
    kinds = np.array(runner.executor.gate_kinds or ("attention", "MLP") * (runner.executor.num_gates // 2))
    masks = {kind: kinds != kind for kind in sorted({*kinds} - {""})}
    seconds: dict[int | str, list[float]] = {}
    for _ in range(_REPEATS):
        for count in range(1, lookahead + 2):
            seconds.setdefault(count, []).append(_time(runner, tokens[:count], None))
        for kind, mask in masks.items():
            seconds.setdefault(kind, []).append(_time(runner, tokens[:1], mask))
    middle = {what: median(times) for what, times in seconds.items()}
    each = {kind: max(middle[1] - middle[kind], 0.0) / int((~mask).sum()) for kind, mask in masks.items()}
    return LayerCosts(
        tuple(middle[count] for count in range(1, lookahead + 2)), tuple(each.get(kind, 0.0) for kind in kinds)
    )


def _time(runner: ModelRunner, tokens: Sequence[int], mask: BoolArray | None) -> float:
    """Seconds inside the engine of a step whose tokens are not committed."""
    executor = runner.executor
    executor.set_layers(mask)
    try:
        start = time.perf_counter()
        runner.step(0, [RowWork(tokens, len(tokens), settles=False)], "token_ids")
        return time.perf_counter() - start
    finally:
        executor.set_layers(None)

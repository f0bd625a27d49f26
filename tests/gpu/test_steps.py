"""Steps of a model of 1.1 B parameters: verify(K+1) against decode(1), by batch and entries of a row."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner
from tools.proof.steps import fill, random_tokens, time_step

if TYPE_CHECKING:
    from tests.gpu.conftest import Engines, Rows

pytestmark = pytest.mark.gpu
RATIO = 1.15
"""Most that verify(5) may take of decode(1), of one sequence alone."""
LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8)
Steps = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
STEPS: Steps = {
    256: ((1, LOOKAHEADS), (2, LOOKAHEADS), (4, LOOKAHEADS), (8, LOOKAHEADS)),
    2048: ((1, (2, 4, 8)), (8, (4,))),
    8192: ((1, (2, 4, 8)), (8, (4,))),
}
"""Batches and K, by entries of each row."""
PROOF_STEPS = {past: ((1, (2, 4, 8)), *(((8, (4,)), (32, (4,))) if past == 256 else ((8, (4,)),))) for past in STEPS}
"""Those that have a profile."""


def test_time_of_verify_steps(engines: "Engines", rows: "Rows") -> None:
    if rows.tiny and engines.kind == "proof":
        pytest.skip("the interpreter takes minutes")
    steps = PROOF_STEPS if engines.kind == "proof" else STEPS
    if rows.tiny:
        steps = {32: ((1, (1, 4)), (4, (4,)))}
    largest = max(batch for groups in steps.values() for batch, _ in groups)
    measure_steps(engines.kind, engines.open(size="large", num_rows=largest), steps, rows)


def measure_steps(kind: str, target: Executor, steps: Steps, rows: "Rows") -> None:
    """A row for each number of entries and batch."""
    for past, groups in steps.items():
        runner = ModelRunner(target)
        fill(runner, random_tokens(target.vocab_size, max(batch for batch, _ in groups), past))
        for batch, lookaheads in groups:
            what, limits = f"{kind}, {past} past: steps, batch {batch}", (5 if rows.tiny else 50, 1.5 / batch**0.5)
            decode_ms, *others = (
                time_step(runner, batch, new, repeats=limits[0], seconds=limits[1])
                for new in (1, *(k + 1 for k in lookaheads))
            )
            ratios = {k: ms / decode_ms for k, ms in zip(lookaheads, others, strict=True)}
            shown = ", ".join(f"K={k}: {ratio:.2f}" for k, ratio in ratios.items())
            rows.row(what, f"decode(1) {decode_ms:.3f} ms; verify(K+1)/decode(1): {shown}", ms=decode_ms, ratios=ratios)
            if batch == 1:
                rows.reach(f"{kind}, {past} past: verify(5)/decode(1), batch 1", f"{ratios[4]:.3f}",
                           f"at most {RATIO}", ratios[4] <= RATIO)  # fmt: skip

"""The build's own proof of a draft head: its engine in ragged steps, against the head in torch."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specexport.build.built import EngineCheck
from specexport.rounding import logit_tolerance
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import CheckFailedError

CHECK_CAPACITY = 32
CHECK_LENS, CHECK_STEPS = (11, 8), ((5, 2), (3, 1), (1, 3), (1, 1), (1, 1))
"""Tokens of the two sequences, in all and in each step: several, one, and one of each row alone."""
QUANTIZED_ERROR = 0.25
"""Most of what a quantized head hands on that may be error, as a share of its size; a graph that is wrong is off by as
much as it is large."""


class CheckedRow(NamedTuple):
    """What one sequence is fed in a step, and what comes of it in torch."""

    tokens: np.ndarray  # input ids, int64 [n]
    features: np.ndarray  # float32 [n, E]
    kept: int  # how many of these entries are committed
    logits: np.ndarray  # of the last r entries, which want logits [r, N]
    handed_on: np.ndarray  # of the same [r, E]


class LentRows(NamedTuple):
    """What a head that reads the target's caches finds in them."""

    caches: Mapping[str, np.ndarray]  # by name [2, 1, H, L, D]
    lens: Seq[tuple[int, int]]  # entries of the two rows, in each step

    def lend(self, layers: Seq[int]) -> dict[str, np.ndarray]:  # noqa: ARG002 - it has those that are asked for
        """See ``CacheLender.lend``."""
        return dict(self.caches)


class HeadReference(NamedTuple):
    """What a head is checked against."""

    steps: Seq[Seq[CheckedRow]]  # the two rows of each step
    lent: LentRows | None = None  # of a head without a cache


def causal_reference(
    tokens: Seq[np.ndarray], features: Seq[np.ndarray], logits: Seq[np.ndarray], handed_on: Seq[np.ndarray]
) -> HeadReference:
    """Ragged steps of a causal head, from what it computes of each whole sequence of ``CHECK_LENS`` tokens.

    Of each sequence: token ids int64 [n], features float32 [n, E], logits [n, N] and what it hands on [n, E].
    """
    steps, done = [], [0, 0]
    for counts in CHECK_STEPS:
        spans = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        steps.append(
            [
                CheckedRow(tokens[row][span], features[row][span], counts[row], logits[row][span], handed_on[row][span])
                for row, span in enumerate(spans)
            ]
        )
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return HeadReference(steps)


def check_head(folder: Path, entry: ModelEntry, reference: HeadReference) -> EngineCheck:
    """Run a head's engine in ragged steps; raises CheckFailedError if what it gives differs from torch."""
    from specexport_runtime.executors.base import EngineRequest, as_head
    from specexport_runtime.executors.open import backend_of
    from specexport_runtime.packing.batch import ModelRunner, RowWork
    from specexport_runtime.packing.kv import BorrowedKv, KvArena

    backend = backend_of(entry.backend)
    assert backend is not None  # noqa: S101 - it has just been built for it
    request = EngineRequest(
        folder=folder,
        entry=entry,
        role="head",
        num_rows=2,
        kv_capacity=CHECK_CAPACITY,
        lookahead=1,
        spin=False,
        cuda_graphs=False,
        lender=reference.lent,
    )
    lengths = KvArena(2, CHECK_CAPACITY)
    executor = backend.open(request)
    try:
        kv = None if reference.lent is None else BorrowedKv(lengths)
        head, runner = as_head(executor), ModelRunner(executor, kv=kv)
        if head is None:
            raise CheckFailedError("the new engine is no draft head's.")
        found: dict[str, list[np.ndarray]] = {"logits": [], "handed_on": []}
        wanted: dict[str, list[np.ndarray]] = {"logits": [], "handed_on": []}
        for step, rows in enumerate(reference.steps):
            for index, count in enumerate(() if reference.lent is None else reference.lent.lens[step]):
                lengths.release(index)
                lengths.write(index, [count])
                lengths.commit(index, count)
            work = [RowWork(row.tokens.tolist(), len(row.logits), row.features) for row in rows]
            found["logits"].append(np.array(runner.step(0, work)))
            found["handed_on"].append(head.next_features.copy())
            wanted["logits"] += [row.logits for row in rows]
            wanted["handed_on"] += [row.handed_on for row in rows]
            for index, row in enumerate(rows):
                runner.kv.commit(index, runner.kv.kv_len(index) + row.kept)
    finally:
        executor.close()
    return EngineCheck(
        max(_compare(entry, name, np.concatenate(found[name]), np.concatenate(wanted[name])) for name in found)
    )


def _compare(entry: ModelEntry, name: str, found: np.ndarray, wanted: np.ndarray) -> float:
    error, scale = float(np.abs(found - wanted).max()), max(1.0, float(np.abs(wanted).max()))
    if entry.quantize is not None:
        ratio = float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-6)
        fits = ratio <= QUANTIZED_ERROR
    else:
        fits = error <= logit_tolerance(entry.dtype, len(entry.attention.layers)).largest * scale
    if not fits:  # a NaN must fail
        raise CheckFailedError(
            f"the head's engine differs from torch: {name.replace('_', ' ')} by {error:.3g} of {scale:.3g}.",
            "report this head; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )
    return error

"""The build's own proof of a draft head: its engine in ragged steps, against the head in torch.

What it is to give is computed by its kind (``HeadKind.reference``).
"""

from pathlib import Path

import numpy as np

from specexport.compare import logit_scale, relative_error
from specexport.compile.built import EngineCheck
from specexport.compile.check import open_new_engine
from specexport.heads.reference import CHECK_CAPACITY, HeadReference
from specexport.rounding import logit_tolerance
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import CheckFailedError

QUANTIZED_ERROR = 0.25
"""Most of what a quantized head hands on that may be error, as a share of its size; a graph that is wrong is off by as
much as it is large."""


def check_head(folder: Path, entry: ModelEntry, reference: HeadReference) -> EngineCheck:
    """Run a head's engine in ragged steps; raises CheckFailedError if what it gives differs from torch."""
    from specexport_runtime.packing.batch import ModelRunner, RowWork
    from specexport_runtime.packing.kv import BorrowedKv, KvArena

    lengths = KvArena(2, CHECK_CAPACITY)
    executor = open_new_engine(folder, entry, num_rows=2, kv_capacity=CHECK_CAPACITY, lender=reference.lent)
    try:
        kv = None if reference.lent is None else BorrowedKv(lengths)
        runner = ModelRunner(executor, kv=kv)
        if not executor.reads_features:
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
            found["handed_on"].append(executor.next_features.copy())
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
    error, scale = float(np.abs(found - wanted).max()), logit_scale(wanted)
    if entry.quantize is not None:
        fits = relative_error(found, wanted) <= QUANTIZED_ERROR
    else:
        fits = error <= logit_tolerance(entry.dtype, len(entry.attention.layers)).largest * scale
    if not fits:  # a NaN must fail
        raise CheckFailedError(
            f"the head's engine differs from torch: {name.replace('_', ' ')} by {error:.3g} of {scale:.3g}.",
            "report this head; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )
    return error

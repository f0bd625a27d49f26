"""First steps of an engine on a GPU, run when it is opened: libraries set themselves up in them, and graphs are made.

Rows hold nothing yet. What the steps leave in caches lies after each row's length, where nothing is read.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np

from specexport_runtime.abi import StepShape
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.trt_pack import DUMMY_TOKEN, index_inputs

WARM_SECONDS = 3.0
"""No further step is begun after so long."""

_log = logging.getLogger(__name__)


def warm_up(
    executor: Executor,
    shapes: Sequence[StepShape],  # on the first rows
    behind: Sequence[int],  # entries that rows are said to hold
    what: object,
    seconds: float = WARM_SECONDS,  # steps of the first two shapes run in any case
) -> int:
    """Run a step of each shape after each length that leaves room for it; returns how many ran. Errors as a step."""
    steps = [(i, shape, kv_len) for i, shape in enumerate(shapes) for kv_len in behind]
    fitting = [each for each in steps if each[2] + each[1].max_new_tokens <= executor.kv_capacity]
    _log.warning("%s: warms up %d steps, for about %g s.", what, len(fitting), seconds)
    start = time.perf_counter()
    for done, (i, shape, kv_len) in enumerate(fitting):
        if i > 1 and time.perf_counter() - start >= seconds:
            return done
        _fill(executor, shape, kv_len)
        executor.execute("token_ids")
    return len(fitting)


def _fill(executor: Executor, shape: StepShape, kv_len: int) -> None:
    """Inputs of a step whose rows have the same number of tokens; positions do not matter."""
    buffers, width = executor.prepare(shape), shape.max_new_tokens
    index = index_inputs(np.full(shape.num_seqs, width, np.int64), shape)
    for name in ("cu_new_tokens", "row_starts", "row_ends", "pad_index", "unpad_index"):
        getattr(buffers, name)[...] = index[name]
    buffers.input_ids.fill(DUMMY_TOKEN)
    buffers.positions[:] = np.tile(np.arange(width), shape.num_seqs)
    buffers.logit_rows[:] = np.arange(shape.num_logit_rows) % shape.num_tokens
    buffers.kv_lens.fill(kv_len)
    buffers.row_totals.fill(kv_len + width)

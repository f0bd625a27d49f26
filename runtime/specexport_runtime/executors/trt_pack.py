"""A packed step in the sizes an engine was built for: pure functions on arrays.

A *ranged* profile takes a step as it is. A *fixed* profile has B' rows of exactly Q' tokens; how the step is put there
depends on what the engine's attention can do:

::

    step on rows 2, 3:   a b c | d                 profile: 4 rows of 3 tokens, rows 1 … 4 of the cache

    "dense" (TensorRT's own attention):            "packed" (our plugin):
    . . . | a b c | d . . | . . .                  a b c d . . . . . . . .
    cu     0  3  6  9  12                          cu     0  0  3  4  4

In a dense window every row has Q' tokens: dummies after the real ones, whose cache entries are never committed. Rows
that are not in the step write after everything that was ever written to them, so that padding a batch costs what these
rows hold and not what they could hold. In a packed window dummies belong to no row, and the attention skips them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import ALIGNED_STEP_INPUTS, STEP_INPUTS, TOKEN_FEATURES, StepShape, TensorSpec
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors.base import Int64Array, StepBuffers

Fill = Literal["ranged", "dense", "packed"]
SPECS: Mapping[str, TensorSpec] = {spec.name: spec for spec in (*STEP_INPUTS, *ALIGNED_STEP_INPUTS, TOKEN_FEATURES)}
"""Every step input that an engine may take, by name."""
DUMMY_TOKEN = 0  # any id that the model can embed; nothing of it is ever read


class Window(NamedTuple):
    """Where a step lies in an engine's sizes."""

    fill: Fill  # how rows and tokens are padded
    shape: StepShape  # the step as the engine sees it; ``first_row`` is the first cache row that is bound
    offset: int  # window row of the step's first row


class PackPlan(NamedTuple):
    """All of a step that depends on its counts only, and not on tokens and lengths."""

    window: Window
    tokens: Int64Array  # slot of each of the step's T tokens among the engine's T'
    rows: Int64Array  # window rows that have tokens
    sources: Int64Array  # the step's rows that these are
    counts: npt.NDArray[np.int32]  # [B', 1]: new tokens in each row's length, with dummies unless tokens see later ones
    own: npt.NDArray[np.int32]  # [len(rows), 1]: new tokens of each of ``rows`` that are no dummies
    constants: dict[str, npt.NDArray[Any]]  # inputs that are the same in every step of this plan, by name
    runs: tuple[tuple[int, int, int], ...]  # of ``tokens`` that lie together: the first, its slot, how many


def place_step(shape: StepShape, profile: Profile, num_rows: int, *, packed: bool) -> Window:
    """Where a step lies in a profile that it fits; ``packed`` or dense (see the module) if the profile is fixed."""
    if not profile.is_fixed:
        return Window("ranged", shape._replace(fold=profile.fold), 0)
    first = min(shape.first_row, num_rows - profile.num_seqs)
    engine = profile.largest._replace(first_row=first, kv_span=shape.kv_span)
    return Window("packed" if packed else "dense", engine, shape.first_row - first)


def plan_step(
    window: Window, counts: Sequence[int], logit_rows: Int64Array, names: Sequence[str], *, sees_ahead: bool = False
) -> PackPlan:
    """All that follows from each row's new tokens and the logits wanted, for the inputs ``names`` of an engine."""
    fill, shape, offset = window
    real = np.zeros(shape.num_seqs, np.int64)
    real[offset : offset + len(counts)] = counts
    rows = np.flatnonzero(real)
    given = np.full_like(real, shape.max_new_tokens) if fill == "dense" else real
    ends = np.cumsum(given)
    # The j-th token of a row goes to its j-th slot, wherever the row begins among the engine's tokens.
    tokens = np.concatenate(
        [np.arange(end - count, end - count + own) for end, count, own in zip(ends, given, real, strict=True)]
    )
    # The wanted rows come first, in the order they were asked for: what the engine returns needs no sorting.
    wanted = np.zeros(shape.num_logit_rows, np.int64)
    wanted[: len(logit_rows)] = tokens[logit_rows]
    index = index_inputs(given, shape)
    index["logit_rows"] = wanted
    kept = {name: array for name, array in index.items() if name in names}
    counted = real if sees_ahead else given
    seen, own = (array[:, None].astype(np.int32) for array in (counted, real[rows]))
    begins = [0, *(np.flatnonzero(np.diff(tokens) != 1) + 1).tolist(), len(tokens)] if len(tokens) else [0]
    runs = tuple((i, int(tokens[i]), end - i) for i, end in pairwise(begins))
    return PackPlan(window, tokens, rows, rows - offset, seen, own, kept, runs)


def index_inputs(counts: Int64Array, shape: StepShape) -> dict[str, npt.NDArray[Any]]:
    """Inputs by name that depend only on ``counts``, the new tokens of each row [B], T or fewer in all."""
    left_width, width, last = shape.max_new_tokens, shape.tile_width, shape.num_tokens - 1
    cu = np.concatenate([[0], np.cumsum(counts)])
    starts = np.minimum(cu[:-1], last)[:, None]
    ends = np.maximum(cu[1:, None], starts + 1)
    rows = np.arange(len(counts))
    owner = np.repeat(rows, counts)
    within = np.arange(cu[-1]) - cu[owner]
    left, right = np.zeros((2, shape.num_tokens), np.int64)
    left[: len(owner)] = owner * left_width + within
    right[: len(owner)] = owner * width + within + width - counts[owner]
    return {
        "cu_new_tokens": cu.astype(np.int32),
        "row_starts": starts,
        "row_ends": ends,
        "pad_index": np.minimum(starts + np.arange(left_width), ends - 1)[:, None],
        "unpad_index": left,
        # Right-aligned: slot W-1 holds a row's last token. Slots before its first token repeat it.
        "tile_index": np.maximum(ends - width + np.arange(width), starts),
        "untile_index": right,
    }


def fill_step(
    plan: PackPlan,
    buffers: StepBuffers,
    arrays: Mapping[str, npt.NDArray[Any]],
    ends: npt.NDArray[np.int32],
    last_position: int,
) -> None:
    """Write what changes from step to step beside ``plan.constants``; ``ends`` [B', 1] are updated."""
    fill, shape, _ = plan.window
    arrays["input_ids"][plan.tokens] = buffers.input_ids
    if "token_features" in arrays and buffers.token_features is not None:
        arrays["token_features"][plan.tokens] = buffers.token_features
    kv_lens = np.zeros((shape.num_seqs, 1), np.int32)
    if fill == "ranged":
        kv_lens[:] = buffers.kv_lens
    else:
        if fill == "dense":
            kv_lens[:] = ends
        kv_lens[plan.rows] = buffers.kv_lens[plan.sources]
    ends[plan.rows] = kv_lens[plan.rows] + plan.own
    if "kv_lens" in arrays:
        arrays["kv_lens"][:] = kv_lens
    if "row_totals" in arrays:
        np.maximum(kv_lens + plan.counts, 1, out=arrays["row_totals"])
    if "positions" in arrays:
        if fill == "dense":
            # A dummy goes on where its row ends: a position that no mask can take for one without any visible entry.
            beyond = kv_lens + np.arange(shape.max_new_tokens, dtype=np.int64)
            np.minimum(beyond, last_position, out=arrays["positions"].reshape(beyond.shape))
        arrays["positions"][plan.tokens] = buffers.positions


def start_plan(plan: PackPlan, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what stays the same as long as steps follow ``plan``; slots that it does not use become dummies."""
    arrays["input_ids"].fill(DUMMY_TOKEN)
    for name in ("positions", "token_features"):  # pinned memory holds anything: a dummy's keys must be numbers
        if name in arrays:
            arrays[name].fill(0)
    for name, array in plan.constants.items():
        arrays[name][:] = array

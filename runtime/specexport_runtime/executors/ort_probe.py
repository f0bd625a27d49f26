"""Probe steps of an ONNX Runtime session: what it computes at the widths that decoding uses, as digests.

Two sessions of one engine that give the same digests give the same logits, bit for bit. Needs the graph contract only:
no model, no sequence, no cache arena. Imports numpy only.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import (
    ADAPTER_IDS,
    FEATURES,
    GATE_INPUTS,
    LAYER_MASK,
    LOGITS,
    NEXT_FEATURES,
    PADDED_STEP_INPUTS,
    PENDING,
    STATE,
    STATE_STEPS,
    TOKEN_FEATURES,
    WANT_FEATURES,
    StepShape,
)

PREFILL_WIDTH = 16
_PAST = 5
_SLACK = 3
"""Entries that stay free: a lone token may be computed twice, and writes two."""
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
_KEPT = tuple(spec.name.partition(".")[0] for spec in (STATE, PENDING))
_ADAPTERS = 4
_INT8_SPREAD = 40.0
"""Standard deviation of what int8 caches are filled with."""


class ProbedStep(NamedTuple):
    """What one probe step gave.

    Attributes:
        width: its tokens.
        digest: SHA-256 of the bytes of all its logits.
        is_finite: every logit is a finite number.
    """

    width: int
    digest: str
    is_finite: bool


def probe_widths(lookahead: int) -> tuple[int, ...]:
    """Tokens of the probe steps: plain decoding, a catch-up, a verify step of K+1 and a chunk of a prompt.

    Args:
        lookahead: K.
    """
    return tuple(sorted({1, 2, lookahead + 1, PREFILL_WIDTH}))


def probe_session(session: Any, widths: tuple[int, ...]) -> list[ProbedStep]:
    """Run one step of each width, all rows with logits, over a cache that holds a few entries.

    A step of w tokens is one row's; in a one-token graph, whose caches lack the second dimension, that of w rows. Gates
    are open, and features are wanted.

    Args:
        session: an ``onnxruntime.InferenceSession`` of a graph by the contract.
        widths: tokens of the steps.
    """
    vocab_size = next(output.shape[1] for output in session.get_outputs() if output.name == LOGITS.name)
    given = {output.name for output in session.get_outputs()}
    names = [name for name in (LOGITS.name, FEATURES.name, NEXT_FEATURES.name) if name in given]
    steps = []
    for width in widths:
        found = session.run(names, _feed(session.get_inputs(), width, vocab_size))
        digest = hashlib.sha256()
        for array in found:
            digest.update(np.ascontiguousarray(array).data)
        steps.append(ProbedStep(width, digest.hexdigest(), all(bool(np.isfinite(array).all()) for array in found)))
    return steps


def difference(expected: list[ProbedStep], found: list[ProbedStep]) -> str | None:
    """In what the steps of two sessions differ, for messages; None if they are the same and finite."""
    for want, got in zip(expected, found, strict=True):
        if not want.is_finite:
            return f"its own logits are not finite in a step of {want.width} tokens"
        if got.digest != want.digest:
            what = "other logits" if got.is_finite else "logits that are not finite"
            return f"they give {what} in a step of {want.width} tokens"
    return None


def _feed(inputs: Any, width: int, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """Every input of a step, the same at each call."""
    generator = np.random.default_rng(width)
    caches = {value.name: value for value in inputs if value.name.startswith(("k_cache.", "v_cache."))}
    rows = width if any(len(value.shape) == 4 for value in caches.values()) else 1
    arrays = _step_arrays(rows, width // rows, generator.integers(0, vocab_size, width))
    gates = {spec.name for spec in (*GATE_INPUTS, WANT_FEATURES)}
    feed: dict[str, npt.NDArray[Any]] = {}
    for value in inputs:
        if value.name in caches:
            _, *middle, heads, _, depth = value.shape
            shape = (rows, *middle, heads, _PAST + width + _SLACK, depth)
            dtype = _DTYPES[value.type]
            spread = _INT8_SPREAD if dtype is np.int8 else 1.0
            entries = np.clip(spread * generator.standard_normal(shape, np.float32), -127, 127)
            feed[value.name] = entries.astype(dtype)
        elif value.name in gates:
            feed[value.name] = np.full(value.shape, value.name in (LAYER_MASK.name, WANT_FEATURES.name))
        elif value.name.partition(".")[0] in _KEPT:
            shape = tuple(size if isinstance(size, int) else rows for size in value.shape)
            if value.name.startswith(_KEPT[1]):
                shape = (*shape[:2], width, shape[3])
            feed[value.name] = generator.standard_normal(shape, np.float32)
        elif value.name == STATE_STEPS.name:  # as a verify step: all behind the first token are drafts
            feed[value.name] = np.array([[0, 0, 1, width - 1]])
        elif value.name == ADAPTER_IDS.name:
            feed[value.name] = np.arange(1, width + 1) % _ADAPTERS  # a number beyond the last is nobody's
        elif value.name == TOKEN_FEATURES.name:
            feed[value.name] = generator.standard_normal((width, value.shape[1]), np.float32)
        else:
            feed[value.name] = arrays[value.name]
    return feed


def _step_arrays(rows: int, count: int, tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """Step inputs by name for ``count`` new tokens in each of ``rows`` rows; see ``abi``."""
    num_tokens, end = rows * count, _PAST + count
    cu = np.arange(rows + 1) * count
    slots = np.arange(num_tokens)
    values: dict[str, Any] = {
        "input_ids": tokens,
        "positions": np.tile(np.arange(_PAST, end), rows),
        "logit_rows": slots,
        "kv_lens": _PAST,
        "cu_new_tokens": cu,
        "row_starts": cu[:-1, None],
        "row_ends": cu[1:, None],
        "row_totals": end,
        "pad_index": slots.reshape(rows, 1, count),
        "unpad_index": slots,
        "kv_positions": np.arange(end),
    }
    shape = StepShape(0, rows, num_tokens, count, num_tokens, end)
    return {
        spec.name: np.broadcast_to(values[spec.name], shape.shape_of(spec)).astype(spec.dtype)
        for spec in PADDED_STEP_INPUTS
    }

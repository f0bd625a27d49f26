"""What the ops that keep a state mean, in plain numpy and loops. Their lowering is tested against this.

Imports numpy only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Advance = Callable[[Array, Array], tuple[Array, Array]]
"""From a state and what one token gives to the state behind it and the token's output."""


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    decay: Array | None,
    beta: Array | None,
    state: Array,
    pending: Array,
    state_steps: Array,
    cu_new_tokens: Array,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
) -> tuple[Array, Array, Array]:
    """One token and one head at a time, in float64.

    Args:
        q: queries [T, num_heads*Dk].
        k: keys [T, kv_num_heads*Dk].
        v: values [T, kv_num_heads*Dv].
        decay: in log space, [T, kv_num_heads] or [T, kv_num_heads*Dk]; None for none.
        beta: of the delta rule [T, kv_num_heads]; None for none.
        state: [B, 1, kv_num_heads, Dk, Dv].
        pending: inputs of drafts, ``[q | k | v | decay | beta]``, [B, 1, S, F].
        state_steps: see ``ops.recurrence`` [B, 4].
        cu_new_tokens: running sum of the rows' new tokens [B+1].
        num_heads: query heads; head h reads query head ``h // (kv_num_heads / num_heads)``.
        kv_num_heads: heads.
        scale: factor on the output.

    Returns:
        output [T, kv_num_heads*Dv], states and pending entries, all float64. Pending entries behind the drafts are as
        they were.
    """
    parts = [part for part in (q, k, v, decay, beta) if part is not None]
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]

    def advance(before: Array, given: Array) -> tuple[Array, Array]:
        query, key, value, *rest = np.split(given, ends)
        heads = before.shape[0]
        key, value = key.reshape(heads, -1), value.reshape(heads, -1)
        after, attended = before.copy(), np.zeros_like(value)
        for head in range(heads):
            if decay is not None:
                after[head] *= np.exp(rest[0].reshape(heads, -1)[head])[:, None]
            change = value[head]
            if beta is not None:
                change = rest[-1][head] * (value[head] - after[head].T @ key[head])
            after[head] += np.outer(key[head], change)
            own = query.reshape(num_heads, -1)[head * num_heads // kv_num_heads]
            attended[head] = scale * (after[head].T @ own)
        return after, attended.ravel()

    return _run(advance, np.concatenate(parts, axis=1), v.shape[1], state, pending, state_steps, cu_new_tokens)


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    pending: Array,
    state_steps: Array,
    cu_new_tokens: Array,
    *,
    silu: int = 0,
) -> tuple[Array, Array, Array]:
    """One token at a time, in float64.

    Args:
        x: inputs [T, C].
        weight: [C, 1, W].
        bias: [C], or None.
        state: the inputs before each row's first [B, 1, W-1, C].
        pending: inputs of drafts [B, 1, S, C].
        state_steps: see ``ops.recurrence`` [B, 4].
        cu_new_tokens: running sum of the rows' new tokens [B+1].
        silu: 1 puts the output through ``x * sigmoid(x)``.

    Returns:
        as :func:`linear_attention`; output [T, C].
    """
    taps = weight[:, 0].astype(np.float64).T

    def advance(before: Array, given: Array) -> tuple[Array, Array]:
        seen = np.concatenate([before, given[None]])
        output = (seen * taps).sum(axis=0) + (0.0 if bias is None else bias)
        return seen[1:], output / (1 + np.exp(-output)) if silu else output

    return _run(advance, x, x.shape[1], state, pending, state_steps, cu_new_tokens)


def _run(
    advance: Advance, x: Array, width: int, state: Array, pending: Array, state_steps: Array, cu_new_tokens: Array
) -> tuple[Array, Array, Array]:
    """Every row: what is for good, then the drafts, from the state behind that."""
    states, waiting, output = state.astype(np.float64), pending.astype(np.float64), np.zeros((len(x), width))
    for row, (settled, drafts, certain, drafted) in enumerate(state_steps.tolist()):
        first = int(cu_new_tokens[row])
        given = np.concatenate([waiting[row, 0, : settled + drafts], x[first : first + certain + drafted]])
        at, outputs = states[row, 0], []
        for i, entry in enumerate(given):
            at, attended = advance(at, entry.astype(np.float64))
            outputs.append(attended)
            if i + 1 == settled + certain:
                states[row, 0] = at
        own = outputs[settled + drafts :]
        if own:
            output[first : first + len(own)] = own
        waiting[row, 0, : drafts + drafted] = given[settled + certain :]
    return output, states, waiting

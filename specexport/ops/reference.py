"""What our ops mean, in plain numpy and loops. Every lowering and kernel is tested against this.

Imports numpy only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _attend(
    query: Array, keys: Array, values: Array, bias: Array, scale: float, softcap: float, sink: float | None
) -> Array:
    """One query [D] of one head over the entries it may see, keys [n, D], values [n, Dv] and bias [n]."""
    scores = keys @ query * scale
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + bias
    top = scores.max() if sink is None else max(scores.max(), sink)
    weights = np.exp(scores - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))  # a sink takes weight and gives nothing
    result: Array = weights @ values / total
    return result


def _seen_entries(entry_at: Array, query_at: int, window: int, causal: bool) -> Array:
    """Indices of the entries that a token at ``query_at`` sees, given the position in each entry (-1: padding)."""
    seen = entry_at >= 0
    if causal:
        seen &= entry_at <= query_at
    if window > 0:
        seen &= entry_at > query_at - window
    return np.flatnonzero(seen)


def unpadded_attention(
    q: Array,
    k: Array | None,
    v: Array | None,
    k_cache: Array,
    v_cache: Array,
    kv_lens: Array,
    cu_new_tokens: Array,
    sinks: Array | None = None,
    slopes: Array | None = None,
    *,
    positions: Array | None = None,
    kv_positions: Array | None = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    window: int = -1,
    softcap: float = 0.0,
    causal: int = 1,
) -> tuple[Array, Array, Array]:
    """Append and attend, one token and one head at a time, in float64.

    Args:
        q: queries [T, num_heads*D].
        k: new keys [T, kv_num_heads*D]; None where the caches are another model's: the last entries of a row then
            stand for its tokens.
        v: new values [T, kv_num_heads*Dv], or None likewise.
        k_cache: [B, 1, kv_num_heads, L, D].
        v_cache: [B, 1, kv_num_heads, L, Dv].
        kv_lens: committed entries of each row [B, 1].
        cu_new_tokens: running sum of the rows' new tokens [B+1].
        sinks: one extra score a head [num_heads], or None.
        slopes: what a head's scores lose for each position between token and entry [num_heads], or None.
        positions: position of each token [T]; only with ``kv_positions``.
        kv_positions: position of the token in each cache entry [B, 1, P], this step's included, -1 for padding: a token
            then sees the entries at positions up to its own (in the window), in whatever entries they lie. None: every
            entry counts, and its position is its index.
        num_heads: query heads; head ``h`` reads key/value head ``h // (num_heads / kv_num_heads)``.
        kv_num_heads: key/value heads.
        scale: factor on every score.
        window: positions a token sees, its own included; -1 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for off.
        causal: 0 lets a token see what comes after it in its row too.

    Returns:
        output [T, num_heads*Dv] (zeros for a token that sees nothing) and the two caches, all float64; entries beyond a
        row's new length stay as they were.
    """
    keys, values = k_cache.astype(np.float64), v_cache.astype(np.float64)
    queries = q.astype(np.float64).reshape(len(q), num_heads, -1)
    output = np.zeros((len(q), num_heads, values.shape[-1]))
    for row, kv_len in enumerate(kv_lens[:, 0]):
        tokens = range(cu_new_tokens[row], cu_new_tokens[row + 1])
        past = int(kv_len) if k is not None else max(int(kv_len) - len(tokens), 0)
        end = past + len(tokens)
        if k is not None and v is not None:
            keys[row, 0, :, past:end] = k[tokens].reshape(len(tokens), kv_num_heads, keys.shape[-1]).swapaxes(0, 1)
            values[row, 0, :, past:end] = v[tokens].reshape(len(tokens), kv_num_heads, values.shape[-1]).swapaxes(0, 1)
        for query_at, token in enumerate(tokens, start=past):
            if positions is None or kv_positions is None:
                entry_at, at = np.arange(end), query_at
            else:
                entry_at, at = kv_positions[row, 0, :end], int(positions[token])
            seen = _seen_entries(entry_at, at, window, bool(causal))
            for head in range(num_heads if len(seen) else 0):
                group = head * kv_num_heads // num_heads
                sink = None if sinks is None else float(sinks[head])
                bias = (0.0 if slopes is None else float(slopes[head])) * (entry_at[seen] - at)
                given = queries[token, head], keys[row, 0, group, seen], values[row, 0, group, seen]
                output[token, head] = _attend(*given, bias, scale, softcap, sink)
    return output.reshape(len(q), -1), keys, values


Advance = Callable[[Array, Array], tuple[Array, Array]]
"""From a state and what one token gives to the state after it and the token's output."""


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
        pending: inputs of drafts, ``[q | k | v | decay | beta]``, [B, 1, S, Y].
        state_steps: see ``ops.spec`` [B, 4].
        cu_new_tokens: running sum of the rows' new tokens [B+1].
        num_heads: query heads; head h reads query head ``h // (kv_num_heads / num_heads)``.
        kv_num_heads: heads.
        scale: factor on the output.

    Returns:
        output [T, kv_num_heads*Dv], states and pending entries, all float64. Pending entries after the drafts are as
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

    return _run_recurrence(
        advance, np.concatenate(parts, axis=1), v.shape[1], state, pending, state_steps, cu_new_tokens
    )


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
        state_steps: see ``ops.spec`` [B, 4].
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

    return _run_recurrence(advance, x, x.shape[1], state, pending, state_steps, cu_new_tokens)


def _run_recurrence(
    advance: Advance, x: Array, width: int, state: Array, pending: Array, state_steps: Array, cu_new_tokens: Array
) -> tuple[Array, Array, Array]:
    """Every row: what is for good, then the drafts, from the state after that."""
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


def experts(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
    *,
    interleaved: int = 0,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = 0.0,
) -> Array:
    """One token and one expert at a time, in float64.

    Args:
        x: [T, H].
        expert_ids: [T, K], from 0 to E-1.
        expert_weights: [T, K].
        gate_up: [E, 2*I, H], or [E, I, H] where each output is gate and up.
        gate_up_bias: [E, 2*I] or [E, I], or None.
        down: [E, H, I].
        down_bias: [E, H], or None.
        interleaved: 1 for gate, up, gate, up …; 0 for all gates first; 2 where each output is both.
        alpha: factor inside the sigmoid.
        beta: what is added to ``up``.
        limit: of ``gate`` from above and of ``up`` on both sides; 0 for none.

    Returns:
        [T, H], float64.
    """
    output = np.zeros(x.shape, np.float64)
    for token, chosen in enumerate(expert_ids):
        for place, expert in enumerate(chosen):
            both = gate_up[expert].astype(np.float64) @ x[token]
            both = both if gate_up_bias is None else both + gate_up_bias[expert]
            if interleaved == 2:
                gate, up = both, both
            else:
                gate, up = (both[::2], both[1::2]) if interleaved else np.split(both, 2)
            if limit > 0:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            given = down[expert].astype(np.float64) @ (gate * np.exp(-np.logaddexp(0, -alpha * gate)) * (up + beta))
            given = given if down_bias is None else given + down_bias[expert]
            output[token] += expert_weights[token, place] * given
    return output

"""What ``UnpaddedAttention`` means, in plain numpy and loops. Every lowering and kernel is tested against this.

Imports numpy only.
"""

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
        causal: 0 lets a token see what comes behind it in its row too.

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

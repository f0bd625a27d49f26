"""The torch form of ``UnpaddedAttention``: correct on ragged rows when run, and shape-exact when traced.

Imports torch; import it only where torch is needed.
"""

from typing import Any

import torch
from torch import Tensor

from specexport.ops.spec import UNPADDED_ATTENTION


def _attend_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Attention of one row: q [n, H, g, D] over keys [H, past+n, D] and values [H, past+n, Dv]."""
    new = q.shape[0]
    scores = torch.einsum("nhgd,hld->hgnl", q, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query_at, key_at = torch.arange(past, past + new)[:, None], torch.arange(past + new)[None]
    if slopes is not None:
        scores = scores + (slopes.view(*q.shape[1:3], 1, 1) * (key_at - query_at)).to(scores.dtype)
    seen = (key_at <= query_at) if causal else torch.ones(new, past + new, dtype=torch.bool)
    if window > 0:
        seen &= key_at > query_at - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.view(*q.shape[1:3], 1, 1).expand(-1, -1, new, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hgnl,hld->nhgd", weights, values)


def _unpadded_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    cu_new_tokens: Tensor,
    row_starts: Tensor,  # noqa: ARG001 - for lowerings that work row by row
    row_ends: Tensor,  # noqa: ARG001
    row_totals: Tensor,  # noqa: ARG001
    pad_index: Tensor,  # noqa: ARG001
    unpad_index: Tensor,  # noqa: ARG001
    sinks: Tensor | None,
    slopes: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    window: int,
    softcap: float,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor]:
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "causal": bool(causal)}
    keys, values = k_cache.clone(), v_cache.clone()
    queries = q.view(len(q), kv_num_heads, num_heads // kv_num_heads, -1)
    output = q.new_zeros(len(q), num_heads * v_cache.shape[-1])
    bounds = cu_new_tokens.tolist()
    for row, kv_len in enumerate(kv_lens[:, 0].tolist()):
        tokens = slice(bounds[row], bounds[row + 1])
        count = bounds[row + 1] - bounds[row]
        past = kv_len if k is not None else max(kv_len - count, 0)
        end = past + count
        if k is not None and v is not None:
            keys[row, 0, :, past:end] = k[tokens].view(count, kv_num_heads, keys.shape[-1]).transpose(0, 1)
            values[row, 0, :, past:end] = v[tokens].view(count, kv_num_heads, values.shape[-1]).transpose(0, 1)
        seen_keys, seen_values = keys[row, 0, :, :end], values[row, 0, :, :end]
        attended = _attend_row(queries[tokens], seen_keys, seen_values, past, sinks, slopes, **how)
        output[tokens] = attended.flatten(1)
    return output, keys, values


def _fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = dict(zip(UNPADDED_ATTENTION.argument_names[1:], arguments, strict=True))
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    output = q.new_empty(q.shape[0], given["num_heads"] * v_cache.shape[-1])
    return output, torch.empty_like(k_cache), torch.empty_like(v_cache)


unpadded_attention = torch.library.custom_op(
    f"{UNPADDED_ATTENTION.domain}::{UNPADDED_ATTENTION.torch_name}",
    _unpadded_attention,
    mutates_args=(),
    schema=UNPADDED_ATTENTION.torch_schema,
)
"""``torch.ops.specexport.unpadded_attention``; arguments and meaning as declared in ``spec``."""
unpadded_attention.register_fake(_fake)

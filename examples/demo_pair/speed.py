"""What makes training on two CPU cores fast enough to be worth doing.

Neither function changes what is computed. Together they more than double the tokens
per second of a plain transformers loop on a CPU with bfloat16 instructions.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from transformers import AttentionInterface

ATTENTION = "folded"
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed buffers instead of returning them to the system.

    Every step frees and allocates the same large activations; otherwise a quarter of
    the time goes into the kernel zeroing pages. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@cache
def _causal_mask(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the additive mask that hides later positions."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu(1)


def folded_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,  # shape (rows, heads, length, head size)
    key: torch.Tensor,  # shape (rows, key-value heads, length, head size)
    value: torch.Tensor,  # shape (rows, key-value heads, length, head size)
    _mask: torch.Tensor | None,  # unused: training rows have no padding
    *,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole rows, as two large matrix products; gives no weights.

    The query heads that share a key-value head become rows of one product, so keys and values are never repeated. At a
    few hundred positions this is faster on a CPU than the fused kernel, which works head by head. The output has the
    shape (rows, length, heads, head size).
    """
    rows, heads, length, size = query.shape
    pairs, group = rows * key.shape[1], heads // key.shape[1]
    dtype = value.dtype
    folded = (query * scaling).to(dtype).reshape(pairs, group * length, size)
    keys = key.to(dtype).reshape(pairs, length, size)
    scores = torch.bmm(folded, keys.transpose(1, 2)).view(pairs, group, length, length)
    weights = torch.softmax(scores + _causal_mask(length, dtype), -1, dtype=dtype)
    mixed = torch.bmm(weights.view(pairs, -1, length), value.reshape(pairs, length, size))
    return mixed.view(rows, heads, length, size).transpose(1, 2), None


AttentionInterface.register(ATTENTION, folded_attention)

"""How large keys and values get in a model's KV caches on texts."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from specexport.channel_ranges import CacheRange
from specexport.frontend.calls import ModelCalls
from specexport.frontend.check import empty_states, packed_step
from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.streaming import streamed


def cache_ranges(
    checkpoint: Checkpoint, calls: ModelCalls, pieces: Seq[npt.NDArray[np.int64]], max_len: int
) -> list[CacheRange]:
    """See ``specexport.frontend.cache_ranges``; ``calls`` is what the layers ask for."""
    model = checkpoint.model
    # Rotation moves what is large in one channel into another, by position: texts begin all over the positions.
    room = max(0, max_len - max(map(len, pieces)))
    starts = np.linspace(0, room, len(pieces), dtype=np.int64)
    lengths = [len(piece) for piece in pieces]
    caches = []
    for heads, k_dim, v_dim in (call.geometry for call in calls.attention):
        caches += [torch.zeros(len(pieces), 1, heads, max(lengths), dim, dtype=model.dtype) for dim in (k_dim, v_dim)]
    with streamed(model, checkpoint.stored):
        _, filled = packed_step(
            model,
            calls,
            tokens=np.concatenate(pieces),
            positions=np.concatenate([np.arange(n) + start for n, start in zip(lengths, starts, strict=True)]),
            kv_lens=[0] * len(pieces),
            counts=lengths,
            kept=[*caches, *empty_states(calls, len(pieces))],
            logit_rows=[0],
        )
    found = [
        cache.abs().amax(dim=(0, 1, 3)).flatten().float().numpy() for cache in filled[: len(caches)]
    ]  # zeros where none were
    return [CacheRange(keys, values) for keys, values in zip(found[0::2], found[1::2], strict=True)]

"""How large the inputs of a model's linear layers get on texts, and keys and values in its KV caches."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.channel_ranges import CacheRange, ChannelRanges
from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.stored import WEIGHT_PREFIX
from specexport.checkpoint.streaming import streamed, use_random_weights
from specexport.trace.check import empty_states, packed_step
from specexport.trace.experts import make_experts_traceable
from specexport.trace.geometry import ModelCalls, probe_layers


def measure_activation_ranges(
    checkpoint: Checkpoint, pieces: Sequence[npt.NDArray[np.int64]]
) -> dict[str, ChannelRanges]:
    """How large each input channel of each linear layer gets, by the name of its weight in a traced graph."""
    from transformers.pytorch_utils import Conv1D

    model: Any = checkpoint.model
    seen: dict[str, _LayerInputs] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(WEIGHT_PREFIX + name)
    head, batches = model.get_output_embeddings(), _batches(pieces)
    now = [0, 0]

    def watch(module: Any, inputs: tuple[Tensor, ...]) -> None:
        # A text's first token apart: attention rests there, and its outliers are found in no other token.
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).abs().float()
        texts = len(rows) == now[0] * now[1]  # a router may have chosen some of the tokens
        first = rows[:: now[1]] if texts else rows[:1]
        rest = rows.unflatten(0, now)[:, 1:].flatten(0, 1) if texts else rows[1:]
        if len(rest):
            for name in names[id(module.weight)]:
                seen.setdefault(name, _LayerInputs(rows.shape[-1])).add(first, rest)
        if module is head:
            raise _HeadReachedError

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(watch) for module in layers]
    try:
        with torch.inference_mode(), streamed(model, checkpoint.stored):
            for batch in batches:
                now[:] = batch.shape
                with contextlib.suppress(_HeadReachedError):
                    model(input_ids=torch.from_numpy(batch), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found.ranges() for name, found in seen.items()}


class _LayerInputs:
    """What a layer has read so far."""

    def __init__(self, depth: int) -> None:
        self._largest, self._first, self._squares = torch.zeros(3, depth).unbind()
        self._count = 0

    def add(self, first: Tensor, rest: Tensor) -> None:
        """Magnitudes of some first tokens and of others, float32 [n, K] each."""
        self._largest = torch.maximum(self._largest, rest.amax(dim=0))
        self._first = torch.maximum(self._first, first.amax(dim=0))
        self._squares = self._squares + first.square().sum(dim=0) + rest.square().sum(dim=0)
        self._count += len(first) + len(rest)

    def ranges(self) -> ChannelRanges:
        """Of all tokens."""
        squares = (self._squares / self._count).numpy()
        return ChannelRanges(self._largest.numpy(), self._first.numpy(), squares)


class _HeadReachedError(Exception):
    """The LM head was reached: a logit for each token and word, which no caller wants."""


def _batches(pieces: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """Pieces of one length as one batch [n, T], so that weights are read once for all of them."""
    lengths = dict.fromkeys(len(piece) for piece in pieces)
    return [np.stack([piece for piece in pieces if len(piece) == length]) for length in lengths]


def cache_ranges(checkpoint: Checkpoint, pieces: Sequence[npt.NDArray[np.int64]], *, max_len: int) -> list[CacheRange]:
    """How large the keys and values of each layer get on token ids, int64, spread over ``max_len`` positions."""
    with make_experts_traceable(checkpoint.model, grouped=False):
        with use_random_weights(checkpoint.model, checkpoint.stored):
            calls = probe_layers(checkpoint.model)
        return _cache_ranges(checkpoint, calls, pieces, max_len)


def _cache_ranges(
    checkpoint: Checkpoint, calls: ModelCalls, pieces: Sequence[npt.NDArray[np.int64]], max_len: int
) -> list[CacheRange]:
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

"""How large the inputs of a model's linear layers get on texts."""

import contextlib
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.streaming import streamed
from specexport.frontend.trace import WEIGHT_PREFIX


def ranges(checkpoint: Checkpoint, pieces: Seq[npt.NDArray[np.int64]]) -> dict[str, npt.NDArray[np.float32]]:
    """See ``specexport.frontend.activation_ranges``."""
    from transformers.pytorch_utils import Conv1D

    model: Any = checkpoint.model
    largest: dict[str, Tensor] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(WEIGHT_PREFIX + name)
    head, batches = model.get_output_embeddings(), _batches(pieces)
    now = [0, 0]

    def watch(module: Any, inputs: tuple[Tensor, ...]) -> None:
        # Without a text's first token: attention rests there, and its outliers are found in no other token.
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).abs()
        texts = len(rows) == now[0] * now[1]  # a router may have chosen some of the tokens
        rows = rows.unflatten(0, now)[:, 1:].flatten(0, 1) if texts else rows[1:]
        if len(rows):
            found = rows.amax(dim=0).float()
            for name in names[id(module.weight)]:
                largest[name] = torch.maximum(largest[name], found) if name in largest else found
        if module is head:
            raise _EnoughError

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(watch) for module in layers]
    try:
        with torch.inference_mode(), streamed(model, checkpoint.stored):
            for batch in batches:
                now[:] = batch.shape
                with contextlib.suppress(_EnoughError):
                    model(input_ids=torch.from_numpy(batch), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found.numpy() for name, found in largest.items()}


class _EnoughError(Exception):
    """The LM head was reached: what it gives is a number for each token and word, and nobody asks for them."""


def _batches(pieces: Seq[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """Pieces of one length as one batch [n, T], so that weights are read once for all of them."""
    lengths = dict.fromkeys(len(piece) for piece in pieces)
    return [np.stack([piece for piece in pieces if len(piece) == length]) for length in lengths]

"""How large the inputs of a model's linear layers get on texts."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.trace import WEIGHT_PREFIX


def ranges(checkpoint: Checkpoint, pieces: Seq[npt.NDArray[np.int64]]) -> dict[str, npt.NDArray[np.float32]]:
    """See ``specexport.frontend.activation_ranges``."""
    from transformers.pytorch_utils import Conv1D

    model: Any = checkpoint.model
    largest: dict[str, Tensor] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(WEIGHT_PREFIX + name)

    def watch(module: Any, inputs: tuple[Tensor, ...]) -> None:
        # Without a text's first token: attention rests there, and its outliers are found in no other token.
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])[1:].abs()
        if not len(rows):
            return
        found = rows.amax(dim=0).float()
        for name in names[id(module.weight)]:
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(watch) for module in layers]
    try:
        with torch.inference_mode():
            for piece in pieces:
                model(input_ids=torch.from_numpy(piece)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found.numpy() for name, found in largest.items()}

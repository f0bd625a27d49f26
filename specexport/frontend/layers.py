"""Where a model has its decoder layers, found by their numbers and not by names."""

from typing import Any

import torch
from torch import Tensor

from specexport.frontend.refuse import refuse


def find_layers(model: Any, hint: str) -> Any:
    """The list of the decoder layers: the one of which each member has its own number in its attention.

    Raises ``UnsupportedModelError`` with ``hint`` if there is none, or more than one.
    """
    size = model.config.get_text_config().num_hidden_layers
    found = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == size
        and all(i in _numbers(layer) for i, layer in enumerate(module))
    ]
    if len(found) != 1:
        raise refuse(model, f"its {size} decoder layers are in {len(found)} lists of modules, not in one", hint)
    return found[0]


def _numbers(layer: Any) -> set[int]:
    return {module.layer_idx for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)}


def hidden_of(output: Any) -> Tensor:
    """The hidden state of what a layer, or a whole model without its LM head, gives."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden

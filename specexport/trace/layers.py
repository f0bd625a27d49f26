"""A model's decoder layers, found by their numbers and not by names, and hidden states read while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.trace.refuse import refuse
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError


def find_layers(model: Any, hint: str) -> Any:
    """The decoder layers: the list whose members have their own numbers in their attention."""
    size = model.config.get_text_config().num_hidden_layers
    found = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == size
        and all(i in _find_layer_numbers(layer) for i, layer in enumerate(module))
    ]
    if len(found) != 1:
        raise refuse(model, f"its {size} decoder layers are in {len(found)} lists of modules, not in one", hint)
    return found[0]


def _find_layer_numbers(layer: Any) -> set[int]:
    return {module.layer_idx for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)}


def get_hidden_state(output: Any) -> Tensor:
    """The hidden state of what a layer, or a whole model without its LM head, gives."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


class FeatureRequest(NamedTuple):
    """The features that a target is to give."""

    # Hidden states: ``i`` is what decoder layer ``i`` reads, N (how many there are) what the last one gives,
    # ``abi.AFTER_NORM`` what is after the last norm
    taps: tuple[int, ...]
    projection: Any  # a module from the list of ``taps``, [..., H] each, to the features [..., E]
    size: int  # E


@contextmanager
def record_taps(model: Any, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block, what the model's last run had at ``taps``, [B, T, H] each, by tap."""
    if not taps:  # a model without a head may have its layers anywhere
        yield {}
        return
    layers = find_layers(model, _HINT)
    count = len(layers)
    beyond = [tap for tap in taps if not (tap == AFTER_NORM or 0 <= tap <= count)]
    if beyond:
        raise CheckpointError(
            f"the head reads hidden state {beyond[0]}, and the target has {count} layers: 0 to {count}.",
            "give a head that was made for this target.",
        )
    found: dict[int, Tensor] = {}

    def before(index: int) -> Any:
        def note(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[index] = given[0] if given else named["hidden_states"]

        return note

    def after(index: int) -> Any:
        def note(_module: Any, _given: Any, output: Any) -> None:
            found[index] = get_hidden_state(output)

        return note

    hooks = [layers[i].register_forward_pre_hook(before(i), with_kwargs=True) for i in taps if 0 <= i < count]
    if count in taps:
        hooks.append(layers[count - 1].register_forward_hook(after(count)))
    if AFTER_NORM in taps:
        if model.base_model is model:
            raise refuse(model, "what its LM head reads cannot be watched", _HINT)
        hooks.append(model.base_model.register_forward_hook(after(AFTER_NORM)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


_HINT = "draft with a model or with `lookup` instead."

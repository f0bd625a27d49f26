"""Position embeddings that number the tokens themselves, by the ids or by the cache: a packed step numbers them.

Some decoders do not hand on the positions that they are given: BART and its kin count from the cache's length. RoBERTa
and its kin count the ids that are no padding, and begin behind the padding token's id. What such a module takes is
replaced, by the form of the module and not by model. A padding token inside a text is a token as any other here.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_BY_IDS = "create_position_ids_from_input_ids"


def first_position(module: Any) -> int | None:
    """Number that a module's embedding gives a text's first token; None if it is no embedding that takes positions.

    Tables that add an offset themselves (BART, OPT) begin with 0: what they are given has none.
    """
    if hasattr(module, _BY_IDS) and isinstance(getattr(module, "padding_idx", None), int):
        return int(module.padding_idx) + 1
    return 0 if isinstance(module, torch.nn.Embedding) and type(module) is not torch.nn.Embedding else None


def reserved_positions(model: Any) -> int:
    """Rows of a model's position table that no text uses, before its first token's."""
    return max((first_position(module) or 0 for module in model.modules()), default=0)


@contextmanager
def positions_hook(model: Any, positions: Tensor) -> Iterator[None]:
    """Within the block, position embeddings read ``positions`` [T], from 0 in each text, whatever the model passes."""
    hooks = []
    for module in model.modules():
        first = first_position(module)
        if first is None or "position_ids" not in inspect.signature(module.forward).parameters:
            continue

        def told(_: Any, given: Any, named: dict[str, Any], first: int = first) -> tuple[Any, dict[str, Any]]:
            before = named.get("position_ids")
            shape = (-1,) if before is None else before.shape
            return given, {**named, "position_ids": (positions + first if first else positions).view(shape)}

        hooks.append(module.register_forward_pre_hook(told, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

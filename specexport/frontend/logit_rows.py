"""Logits of some tokens: asked of the forward pass, or taken in front of the LM head where it cannot be asked."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_ARGUMENT = "logits_to_keep"


def takes_rows(model: Any) -> bool:
    """Whether the forward pass can be asked."""
    return _ARGUMENT in inspect.signature(model.forward).parameters


def can_select(model: Any) -> bool:
    """Whether a model can be kept from computing all logits."""
    return takes_rows(model) or model.get_output_embeddings() is not None


@contextmanager
def logit_rows(model: Any, rows: Tensor) -> Iterator[dict[str, Tensor]]:
    """Within the block, forward passes with the given arguments compute the logits of tokens ``rows`` [R] alone."""
    if takes_rows(model):
        yield {_ARGUMENT: rows}
        return
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][:, rows], *given[1:]))
    try:
        yield {}
    finally:
        hook.remove()

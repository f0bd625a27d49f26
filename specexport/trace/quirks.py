"""What some families of models do otherwise than a packed step wants, each mended around their forward pass.

To add one: a function of the model and the step, and a line in :data:`QUIRKS`.

- Positions: some decoders do not hand on the positions that they are given. BART and its kin count from the cache's
  length; RoBERTa and its kin count the ids that are no padding, and begin after the padding token's id. What such a
  module takes is replaced, by the form of the module and not by model. A padding token inside a text is a token as any
  other here.
- Complex numbers: rotary embeddings of some models are written as complex products. ONNX has no complex type, and
  torch's exporter knows few of its operators, so they are pairs of real ones.
- Logits of some tokens are asked of the forward pass, or taken in front of the LM head where it cannot be asked.

Unusual attention is in ``attention.py`` and ``outside.py``, states in ``recurrence.py``, experts in
``experts.py``, lengths in ``specexport.checkpoint.lengths``.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from specexport.checkpoint.lengths import first_position

_ARGUMENT = "logits_to_keep"


class PackedTokens(NamedTuple):
    """What a packed step says of its tokens."""

    positions: Tensor  # [T], from 0 in each text
    wanted: Tensor  # [R], the tokens of which logits are wanted


@contextmanager
def positions_hook(model: Any, positions: Tensor) -> Iterator[None]:
    """Within the block, position embeddings read ``positions`` [T], from 0 in each text, whatever the model passes."""
    hooks = []
    for module in model.modules():
        first = first_position(module)
        if first is None or "position_ids" not in inspect.signature(module.forward).parameters:
            continue

        def pass_positions(_: Any, given: Any, named: dict[str, Any], first: int = first) -> tuple[Any, dict[str, Any]]:
            before = named.get("position_ids")
            shape = (-1,) if before is None else before.shape
            return given, {**named, "position_ids": (positions + first if first else positions).view(shape)}

        hooks.append(module.register_forward_pre_hook(pass_positions, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Pair:
    """A complex tensor as two parts of one shape; what models do with one between making and reading it."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real, self.imag = real, imag

    @property
    def device(self) -> Any:
        """Where it is."""
        return self.real.device

    @property
    def shape(self) -> Any:
        """Of each part."""
        return self.real.shape

    def __mul__(self, other: Union["Pair", Tensor, float]) -> "Pair":
        """The product, of two complex tensors or with a real factor."""
        if isinstance(other, Pair):
            real = self.real * other.real - self.imag * other.imag
            return Pair(real, self.real * other.imag + self.imag * other.real)
        return Pair(self.real * other, self.imag * other)

    def __getitem__(self, index: Any) -> "Pair":
        """A part of it."""
        return Pair(self.real[index], self.imag[index])

    def to(self, *arguments: Any, **named: Any) -> "Pair":
        """On a device."""
        return Pair(self.real.to(*arguments, **named), self.imag.to(*arguments, **named))

    def unsqueeze(self, dim: int) -> "Pair":
        """With one more dimension."""
        return Pair(self.real.unsqueeze(dim), self.imag.unsqueeze(dim))


@contextmanager
def complex_as_pairs() -> Iterator[None]:
    """Within the block, torch's functions that make and read complex tensors work with pairs."""
    stand_ins: dict[str, Any] = {
        "polar": lambda size, angle: Pair(size * angle.cos(), size * angle.sin()),
        "view_as_complex": lambda x: Pair(x[..., 0], x[..., 1]),
        "view_as_real": lambda pair: torch.stack((pair.real, pair.imag), -1),
    }
    before = {name: getattr(torch, name) for name in stand_ins}
    try:
        for name, function in stand_ins.items():
            setattr(torch, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def has_logits_to_keep(model: Any) -> bool:
    """Whether the forward pass can be asked."""
    return _ARGUMENT in inspect.signature(model.forward).parameters


def can_select(model: Any) -> bool:
    """Whether a model can be kept from computing all logits."""
    return has_logits_to_keep(model) or model.get_output_embeddings() is not None


@contextmanager
def logit_rows(model: Any, rows: Tensor) -> Iterator[dict[str, Tensor]]:
    """Within the block, forward passes with the given arguments compute the logits of tokens ``rows`` [R] alone."""
    if has_logits_to_keep(model):
        yield {_ARGUMENT: rows}
        return
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][:, rows], *given[1:]))
    try:
        yield {}
    finally:
        hook.remove()


Quirk = Callable[[Any, PackedTokens], AbstractContextManager[Any]]
"""Gives more arguments of the forward pass by name, or None."""
QUIRKS: tuple[Quirk, ...] = (
    lambda model, tokens: positions_hook(model, tokens.positions),
    lambda _model, _tokens: complex_as_pairs(),
    lambda model, tokens: logit_rows(model, tokens.wanted),
)


@contextmanager
def quirks(model: Any, tokens: PackedTokens) -> Iterator[dict[str, Tensor]]:
    """Within the block, the model computes the packed tokens; gives arguments that its forward pass wants for it."""
    arguments: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for quirk in QUIRKS:
            more = stack.enter_context(quirk(model, tokens))
            arguments |= more or {}
        yield arguments

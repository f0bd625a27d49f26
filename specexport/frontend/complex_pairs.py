"""Complex numbers as pairs of real ones: rotary embeddings of some models are written as complex products.

ONNX has no complex type, and torch's exporter knows few of its operators.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Union

import torch
from torch import Tensor


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

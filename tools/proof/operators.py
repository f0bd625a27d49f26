"""Torch for the standard ONNX operators of the kept graphs.

An argument that says how (a shape, axes, bounds) is a constant of the graph and comes as a list of ints, so that no
operator ever waits for the GPU. What is not in ``OPERATORS`` is refused when an engine is loaded.
"""
# mypy: disable-error-code="no-any-unimported"

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Attributes = Mapping[str, Any]
Ints = list[int]

_DTYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
"""Names in torch of ONNX's numbers of element types."""


class Operator(NamedTuple):
    """How an operator runs."""

    run: Callable[..., Any]  # takes its inputs (tensors, lists of ints, None) and its attributes; returns its outputs
    ints: tuple[int, ...] = ()  # positions of the inputs that are lists of ints


def _cast(x: "Tensor", *, to: int) -> "Tensor":
    import torch

    return x.to(getattr(torch, _DTYPES[to]))


def _gemm(a: "Tensor", b: "Tensor", c: "Tensor | None" = None, **attributes: Any) -> "Tensor":
    import torch

    scales = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if scales != (1.0, 1.0) or attributes.get("transA"):
        raise ValueError(f"Gemm with {attributes}")
    weight = b if attributes.get("transB") else b.T
    return torch.nn.functional.linear(a, weight, c)


def _rms_norm(x: "Tensor", scale: "Tensor", *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> "Tensor":
    # ONNX normalizes in float32, rounds, and then scales; torch's own function scales before it rounds.
    if axis not in (-1, x.ndim - 1) or stash_type != 1:
        raise ValueError(f"RMSNormalization over axis {axis} with stash type {stash_type}")
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype) * scale


def _reshape(x: "Tensor", shape: Ints, *, allowzero: int = 0) -> "Tensor":
    sizes = [x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape)]
    return x.reshape(sizes)


def _slice(x: "Tensor", starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> "Tensor":
    parts = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        parts[axes[i] if axes else i] = slice(start, end, steps[i] if steps else 1)
    return x[tuple(parts)]


def _gather(x: "Tensor", indices: "Tensor", *, axis: int = 0) -> "Tensor":
    axis %= x.ndim
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, indices.reshape(-1)).reshape(shape)


def _unsqueeze(x: "Tensor", axes: Ints) -> "Tensor":
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: "Tensor", axes: Ints | None = None) -> "Tensor":
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _reduce_sum(x: "Tensor", axes: Ints | None = None, *, keepdims: int = 1) -> "Tensor":
    return x.sum(axes, keepdim=bool(keepdims))


def _concat(*parts: "Tensor", axis: int) -> "Tensor":
    import torch

    return torch.cat(parts, axis)


def _where(condition: "Tensor", x: "Tensor", y: "Tensor") -> "Tensor":
    return x.where(condition, y)


OPERATORS: dict[str, Operator] = {
    "Abs": Operator(lambda x: x.abs()),
    "Add": Operator(lambda x, y: x + y),
    "ArgMax": Operator(lambda x, axis=0, keepdims=1: x.argmax(axis, keepdim=bool(keepdims))),
    "Cast": Operator(_cast),
    "Concat": Operator(_concat),
    "Cos": Operator(lambda x: x.cos()),
    "Gather": Operator(_gather),
    "Gemm": Operator(_gemm),
    "Less": Operator(lambda x, y: x < y),
    "Mul": Operator(lambda x, y: x * y),
    "Neg": Operator(lambda x: -x),
    "RMSNormalization": Operator(_rms_norm),
    "ReduceSum": Operator(_reduce_sum, ints=(1,)),
    "Reshape": Operator(_reshape, ints=(1,)),
    "Sigmoid": Operator(lambda x: x.sigmoid()),
    "Sin": Operator(lambda x: x.sin()),
    "Slice": Operator(_slice, ints=(1, 2, 3, 4)),
    "Squeeze": Operator(_squeeze, ints=(1,)),
    "Transpose": Operator(lambda x, perm: x.permute(perm)),
    "Unsqueeze": Operator(_unsqueeze, ints=(1,)),
    "Where": Operator(_where),
}
"""By ONNX's name."""

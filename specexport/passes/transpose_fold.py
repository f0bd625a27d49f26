"""Store linear weights the way they are multiplied."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import lazy_weight, part_of
from specexport.passes.base import CountingPass, find_constant, fold_readers_into, read_sizes

FOLDED = ".transposed"
"""What is added to the name of a weight that was transposed."""


class TransposeFoldPass(CountingPass):
    """Fold Transpose nodes on weights into the weights, lazily; counts the Transposes folded.

    A weight that is also read untransposed (a tied embedding) would be stored twice, and stays; not so with ``shared``
    where products alone read the Transpose.
    """

    name = "transpose-fold"
    reason = "weights are transposed once at build time, not on every step or every load"

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared

    def rewrite(self, model: ir.Model) -> int:
        """Fold every Transpose whose weight has no other kind of reader, or may have one."""
        folded = 0
        for weight in list(model.graph.initializers.values()):
            turned = [use.node for use in weight.uses() if _has_perm(use.node)]
            same = {tuple(node.attributes["perm"].as_ints()) for node in turned}
            tensor, whole = find_constant(weight), len(turned) == len(weight.uses())
            if len(same) != 1 or tensor is None or weight in model.graph.outputs:
                continue
            if whole or (self._shared and len(tensor.shape) == 2 and all(map(_is_multiplied, turned))):
                self._fold(model, weight, tensor, turned, same.pop())
                folded += len(turned)
        return folded

    @staticmethod
    def _fold(
        model: ir.Model, weight: ir.Value, tensor: ir.TensorProtocol, readers: list[ir.Node], perm: tuple[int, ...]
    ) -> None:
        sizes = read_sizes(tensor)
        shape = [sizes[axis] for axis in perm]
        part = partial(_part, tensor, perm)
        value = lazy_weight(model.graph, f"{weight.name}{FOLDED}", tensor.dtype, shape, part=part)
        fold_readers_into(model, weight, readers, value)


def _has_perm(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes


def _is_multiplied(transpose: ir.Node) -> bool:
    """Whether only products ``x @ Transpose(W)`` read it."""
    return all(use.node.op_type == "MatMul" and use.idx == 1 for use in transpose.outputs[0].uses())


def _part(tensor: ir.TensorProtocol, perm: tuple[int, ...], axis: int, start: int, stop: int) -> np.ndarray:
    return part_of(tensor, perm[axis], start, stop).transpose(perm)

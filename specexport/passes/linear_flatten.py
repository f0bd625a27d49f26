"""Linear layers as products of matrices, with the weights as torch stores them."""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, constant, lazy_weight
from specexport.passes.base import CountingPass, find_constant, read_sizes


class LinearFlattenPass(CountingPass):
    """Rewrite ``MatMul(x [1, T, K], W [K, N])`` as ``Gemm(x [T, K], W [N, K], transB=1)``. For TensorRT.

    TensorRT keeps a second copy of every weight that a tensor with a batch axis is multiplied by, and of weights [K, N]
    for steps of one token, whose kernels read [N, K]. A weight is turned lazily; one with other readers is multiplied
    as it is. Counts the products rewritten.
    """

    name = "linear-flatten"
    reason = "TensorRT stores each weight once where it can"

    def rewrite(self, model: ir.Model) -> int:
        """Rewrite every linear layer that has the batch axis."""
        nodes = [node for node in model.graph if _is_linear(node)]
        for number, node in enumerate(nodes):
            _rewrite(model.graph, node, f"linear_flatten.{number}")
        return len(nodes)


def _is_linear(node: ir.Node) -> bool:
    if node.op_type != "MatMul" or node.domain != "":
        return False
    x, weight = node.inputs
    if x is None or weight is None or x.shape is None or len(x.shape) != 3 or x.shape[0] != 1:
        return False
    tensor = find_constant(weight)
    return tensor is not None and len(tensor.shape) == 2


def _rewrite(graph: ir.Graph, node: ir.Node, name: str) -> None:
    x, weight = node.inputs
    tensor = find_constant(weight)
    if x is None or x.shape is None or weight is None or tensor is None:
        raise TypeError(f"{node.name} is no linear layer")
    depth, width = read_sizes(tensor)
    is_own = len(list(weight.uses())) == 1
    if is_own:
        del graph.initializers[str(weight.name)]
        weight = lazy_weight(graph, name, tensor.dtype, [width, depth], partial(_transpose, tensor))
    emit, old, tokens = Emitter(graph), node.outputs[0], x.shape[1]
    depths = constant(graph, f"{name}.flat", np.array([-1, depth], np.int64))
    flat = emit.op("Reshape", x, depths, dtype=tensor.dtype, shape=[tokens, depth], name=f"{name}.flatten")
    turned: dict[str, Any] = {"transB": 1} if is_own else {}
    product = emit.op("Gemm", flat, weight, shape=[tokens, width], name=f"{name}.product", **turned)
    widths = constant(graph, f"{name}.batch", np.array([1, -1, width], np.int64))
    result = emit.op("Reshape", product, widths, shape=old.shape, name=f"{name}.unflatten")
    emit.place(before=node)
    ir.convenience.replace_all_uses_with(old, result)
    graph.remove(node, safe=True)
    result.name = old.name


def _transpose(tensor: ir.TensorProtocol) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy().T)

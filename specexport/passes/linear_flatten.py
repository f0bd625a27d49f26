"""Linear layers as products of matrices, with the weights as torch stores them."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.passes.base import CountingPass, constant_of


class LinearFlattenPass(CountingPass):
    """Rewrite ``MatMul(x [1, T, K], W [K, N])`` as ``Gemm(x [T, K], W [N, K], transB=1)``. For TensorRT.

    The trace carries a batch axis of 1, and TensorRT keeps a second copy of every weight that such a tensor is
    multiplied by. It also keeps a second copy of weights [K, N] for steps of one token, whose kernels read [N, K]; the
    kernels of longer steps take that form too. (Weights that TensorRT joins by itself, of query, key and value and of
    gate and up, it still keeps twice: joining them here changes nothing, it takes them apart first.)

    1. x is flattened, and the result gets its batch axis back, for whoever reads it;
    2. the weight is turned lazily, when the engine is written; one with other readers is multiplied as it is.

    Counts the products rewritten.
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
    tensor = constant_of(weight)
    return tensor is not None and len(tensor.shape) == 2


def _rewrite(graph: ir.Graph, node: ir.Node, name: str) -> None:
    x, weight = node.inputs
    tensor = constant_of(weight)
    if x is None or x.shape is None or weight is None or tensor is None:
        raise TypeError(f"{node.name} is no linear layer")
    depth, width = (int(size) for size in tensor.numpy().shape)
    is_own = len(list(weight.uses())) == 1
    if is_own:
        turned = ir.LazyTensor(partial(_turned, tensor), dtype=tensor.dtype, shape=ir.Shape([width, depth]), name=name)
        del graph.initializers[str(weight.name)]
        weight = _register(graph, turned)
    flat = ir.node("Reshape", [x, _register(graph, _ints(f"{name}.flat", [-1, depth]))], name=f"{name}.flatten")
    product = ir.node("Gemm", [flat.outputs[0], weight], {"transB": 1} if is_own else {}, name=f"{name}.product")
    batch = _register(graph, _ints(f"{name}.batch", [1, -1, width]))
    result = ir.node("Reshape", [product.outputs[0], batch], name=f"{name}.unflatten")
    old = node.outputs[0]
    for made, shape in ((flat, [x.shape[1], depth]), (product, [x.shape[1], width]), (result, list(old.shape or ()))):
        made.outputs[0].shape = ir.Shape(shape)
        made.outputs[0].type = ir.TensorType(tensor.dtype)
    graph.insert_before(node, [flat, product, result])
    ir.convenience.replace_all_uses_with(old, result.outputs[0])
    graph.remove(node, safe=True)
    result.outputs[0].name = old.name


def _ints(name: str, values: list[int]) -> ir.TensorProtocol:
    return ir.tensor(np.array(values, np.int64), name=name)


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), const_value=tensor)
    value.shape = (
        ir.Shape(tensor.numpy().shape) if tensor.size < 16 else ir.Shape([int(str(size)) for size in tensor.shape])
    )
    graph.register_initializer(value)
    return value


def _turned(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(np.ascontiguousarray(tensor.numpy().T), dtype=tensor.dtype)

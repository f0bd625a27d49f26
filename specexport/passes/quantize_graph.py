"""Nodes and weights that quantizing passes make."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.passes.quantize_sites import LinearSite

CONTRIB = "com.microsoft"


class Emitter:
    """Makes nodes in front of one node of a graph.

    Args:
        graph: the graph.
        anchor: new nodes come before it.
    """

    def __init__(self, graph: ir.Graph, anchor: ir.Node) -> None:
        self._graph, self._anchor = graph, anchor

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType,
        shape: Sequence[Any] | None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """The only output of a new node."""
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain)
        output = node.outputs[0]
        output.type = ir.TensorType(dtype)
        output.shape = None if shape is None else ir.Shape(shape)
        self._graph.insert_before(self._anchor, [node])
        return output


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """The initializer ``name`` with ``array``, made if there is none yet."""
    if name not in graph.initializers:
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    value = graph.initializers[name]
    value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
    return value


def lazy_weight(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], np.ndarray]
) -> ir.Value:
    """The initializer ``name`` whose data is made when the engine is written, and made again if asked again."""
    if name not in graph.initializers:
        lazy = ir.LazyTensor(lambda: ir.Tensor(make(), dtype=dtype), dtype=dtype, shape=ir.Shape(shape), name=name)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=lazy)
        )
    return graph.initializers[name]


def put_in_place(graph: ir.Graph, site: LinearSite, result: ir.Value) -> None:
    """Add the layer's bias to ``result``, hand it to whoever read the layer, and drop the layer."""
    old = site.node.outputs[0]
    shape = None if old.shape is None else list(old.shape)
    if site.bias is not None:
        result = Emitter(graph, site.node).emit("Add", [result, site.bias], ir.DataType.FLOAT, shape)
    name, result.shape = old.name, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(site.node, safe=True)
    old.name = None
    result.name = name

"""A small writer of ONNX nodes: operators by name, constants shared by value, names that tell the layer."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_READABLE = 8  # a constant with up to this many elements is named by them
_SAME_AS_LAST = {"Where"}  # the operators whose dtype is not that of their first input


class Emitter:
    """Collects nodes for one place of a graph; ``place`` puts them there.

    Args:
        ir_model: the model whose graph gets the nodes and the constants.
        prefix: beginning of every node's and value's name.
    """

    def __init__(self, ir_model: "ir.Model", prefix: str) -> None:
        self.graph = ir_model.graph
        self.nodes: list[ir.Node] = []
        self._prefix = prefix

    def op(
        self, op_type: str, *inputs: "ir.Value | None", dtype: "ir.DataType | None" = None, **attributes: Any
    ) -> "ir.Value":
        """One node; returns its output, of the first input's dtype unless ``dtype`` says otherwise."""
        import onnx_ir as ir

        node = ir.node(op_type, list(inputs), attributes=attributes)
        name = f"{self._prefix}.{len(self.nodes)}.{op_type}"
        node.name, output = name, node.outputs[0]
        output.name = name
        source = inputs[-1] if op_type in _SAME_AS_LAST else next(value for value in inputs if value is not None)
        given = dtype if dtype is not None else None if source is None else source.dtype
        output.type = None if given is None else ir.TensorType(given)
        self.nodes.append(node)
        return output

    def cast(self, value: "ir.Value", dtype: "ir.DataType") -> "ir.Value":
        """``value`` in ``dtype``; no node where it is that already."""
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype), dtype=dtype)

    def const(self, data: Any, dtype: str = "int64") -> "ir.Value":
        """An initializer, the same one for the same content."""
        import onnx_ir as ir

        array = np.asarray(data, dtype)
        short = array.size <= _READABLE
        content = "_".join(map(str, array.reshape(-1))) if short else hashlib.sha256(array.tobytes()).hexdigest()[:16]
        name = ".".join(("const", dtype, "x".join(map(str, array.shape)) or "scalar", content))
        known = self.graph.initializers.get(name)
        if known is None:
            tensor = ir.tensor(array, name=name)
            shape = ir.Shape(array.shape)
            known = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
            self.graph.initializers[name] = known
        return known

    def reshape(self, value: "ir.Value", shape: Sequence[int]) -> "ir.Value":
        """``value`` in ``shape``: 0 keeps a dimension, -1 is inferred."""
        return self.op("Reshape", value, self.const(shape))

    def place(self, before: "ir.Node | None" = None) -> None:
        """Insert the nodes before ``before``, or at the graph's end."""
        if before is None:
            self.graph.extend(self.nodes)
        else:
            self.graph.insert_before(before, self.nodes)
        self.nodes = []

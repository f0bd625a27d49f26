"""The one way in which passes and lowerings write ONNX: nodes, constants, weights and inputs.

Nodes that go into a graph come from :class:`Emitter` and from nowhere else; a test holds the sources to that. Bodies of
model-local functions are the exception: they are ONNX text, in ``specexport.lowering.recurrence``, which says why.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_READABLE = 8  # a constant with up to this many elements is named by them
_SAME_AS_LAST = {"Where"}  # the operators whose dtype is that of their last input, not of their first
_OWN_DTYPE = {"ArgMax": "INT64", "Greater": "BOOL", "IsNaN": "BOOL", "Less": "BOOL", "LessOrEqual": "BOOL"}
_OWN_DTYPE |= {"Equal": "BOOL", "NonZero": "INT64", "Shape": "INT64"}  # these have one dtype, whatever they read


class Emitter:
    """Collects nodes for one place of a graph; ``place`` puts them there.

    Args:
        graph: the graph that gets the nodes and the constants.
        prefix: beginning of every node's and value's name; None leaves names to the graph, which numbers them.

    Attributes:
        graph: as given.
        nodes: what has been emitted and not been placed; those of a branch of an ``If`` go into a graph of their own.
    """

    def __init__(self, graph: "ir.Graph", prefix: str | None = None) -> None:
        self.graph = graph
        self.nodes: list[ir.Node] = []
        self._prefix = prefix

    def op(
        self,
        op_type: str,
        *inputs: "ir.Value | None",
        dtype: "ir.DataType | None" = None,
        shape: "Sequence[Any] | ir.Shape | None" = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> "ir.Value":
        """One node with one output.

        Args:
            op_type: the operator.
            inputs: what it reads; None for an optional input that is absent.
            dtype: of the output; None for that of the first input, or what the operator always gives.
            shape: of the output, numbers and names; None if it is not needed.
            domain: of the operator.
            name: of the node, instead of one with the prefix; the output's is then left to the graph.
            attributes: of the node.

        Returns:
            the output.
        """
        import onnx_ir as ir

        output = self.node(op_type, inputs, attributes, domain=domain, name=name).outputs[0]
        if dtype is None and op_type in _OWN_DTYPE:
            dtype = ir.DataType[_OWN_DTYPE[op_type]]
        if dtype is None:
            source = inputs[-1] if op_type in _SAME_AS_LAST else next(value for value in inputs if value is not None)
            dtype = None if source is None else source.dtype
        output.type = None if dtype is None else ir.TensorType(dtype)
        output.shape = None if shape is None else ir.Shape(shape)
        return output

    def node(
        self,
        op_type: str,
        inputs: "Sequence[ir.Value | None]",
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: "int | Sequence[ir.Value]" = 1,
        domain: str = "",
        name: str | None = None,
    ) -> "ir.Node":
        """One node with any outputs, whose dtypes and shapes are left to the caller.

        Args:
            op_type: the operator, or the name of a model-local function.
            inputs: what it reads; None for an optional input that is absent.
            attributes: Python values, subgraphs, or attributes of another node.
            outputs: how many there are, or the values themselves.
            domain: of the operator.
            name: of the node, instead of one with the prefix; the outputs' are then left to the graph.
        """
        import onnx_ir as ir

        made = {"num_outputs": outputs} if isinstance(outputs, int) else {"outputs": outputs}
        node = ir.node(op_type, inputs, attributes, domain=domain, name=name, **made)
        if name is None and self._prefix is not None:
            node.name = f"{self._prefix}.{len(self.nodes)}.{op_type}"
            for at, value in enumerate(node.outputs if isinstance(outputs, int) else ()):
                value.name = node.name if outputs == 1 else f"{node.name}.{at}"
        self.nodes.append(node)
        return node

    def cast(self, value: "ir.Value", dtype: "ir.DataType") -> "ir.Value":
        """``value`` in ``dtype``; no node where it is that already."""
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype), dtype=dtype)

    def const(self, data: Any, dtype: str = "int64") -> "ir.Value":
        """An initializer, the same one for the same content."""
        array = np.asarray(data, dtype)
        short = array.size <= _READABLE
        content = "_".join(map(str, array.reshape(-1))) if short else hashlib.sha256(array.tobytes()).hexdigest()[:16]
        dims = "x".join(map(str, array.shape)) or "scalar"
        return constant(self.graph, ".".join(("const", dtype, dims, content)), array)

    def reshape(self, value: "ir.Value", shape: Sequence[int]) -> "ir.Value":
        """``value`` in ``shape``: 0 keeps a dimension, -1 is inferred."""
        return self.op("Reshape", value, self.const(shape))

    def place(self, *, before: "ir.Node | None" = None, after: "ir.Node | None" = None) -> None:
        """Insert the nodes before or after a node, or at the graph's end."""
        if before is not None:
            self.graph.insert_before(before, self.nodes)
        elif after is not None:
            self.graph.insert_after(after, self.nodes)
        else:
            self.graph.extend(self.nodes)
        self.nodes = []

    def replace(self, node: "ir.Node", outputs: "Sequence[ir.Value]") -> None:
        """Put the nodes in the place of ``node``: ``outputs`` get the readers, names, dtypes and shapes of its own."""
        import onnx_ir as ir

        ir.convenience.replace_nodes_and_values(self.graph, node, [node], self.nodes, node.outputs, outputs)
        self.nodes = []


def constant(graph: "ir.Graph", name: str, array: np.ndarray) -> "ir.Value":
    """The initializer ``name`` with ``array``, made if there is none yet.

    Raises:
        ValueError: there is one with another content.
    """
    import onnx_ir as ir

    known = graph.initializers.get(name)
    if known is None:
        tensor = ir.tensor(array, name=name)
        shape = ir.Shape(array.shape)
        known = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
        graph.register_initializer(known)
    elif known.const_value is None or not np.array_equal(known.const_value.numpy(), array):
        raise ValueError(f"the graph has another constant {name}.")
    return known


PartOf = Callable[[int, int, int], np.ndarray]
"""Of an axis, a start and a stop: the same slice of a weight, without making all of it."""
_PART = "specexport.part"


def lazy_tensor(
    name: str,
    dtype: "ir.DataType | str",
    shape: Sequence[int],
    make: Callable[[], np.ndarray] | None = None,
    part: PartOf | None = None,
) -> "ir.LazyTensor":
    """A tensor whose data is made when it is asked for, and again if it is asked for again.

    Args:
        name: of the tensor.
        dtype: of it, or its name.
        shape: of it.
        make: gives the data; None where ``part`` does.
        part: gives a part of the data; None cuts it from all of it.
    """
    import onnx_ir as ir

    kind = ir.DataType[dtype] if isinstance(dtype, str) else dtype

    def whole() -> Any:
        if make is not None:
            return ir.Tensor(make(), dtype=kind)
        assert part is not None  # noqa: S101 - one of them is given
        return ir.Tensor(np.ascontiguousarray(part(0, 0, shape[0])), dtype=kind)

    lazy = ir.LazyTensor(whole, dtype=kind, shape=ir.Shape(shape), name=name)
    if part is not None:
        lazy.meta[_PART] = part
    return lazy


def part_of(tensor: "ir.TensorProtocol", axis: int, start: int, stop: int) -> np.ndarray:
    """A slice of a tensor along an axis; of a lazy one, only that is made where it can be.

    A weight of a model may be the largest thing in memory, and what is made of it as large again: whoever can work on
    some rows after the others takes them from here.
    """
    part: PartOf | None = getattr(tensor, "meta", {}).get(_PART)
    if part is not None:
        return part(axis, start, stop)
    where = tuple(slice(start, stop) if at == axis else slice(None) for at in range(len(tensor.shape)))
    array: np.ndarray = tensor.numpy()[where]
    return array


def can_slice_lazily(tensor: "ir.TensorProtocol") -> bool:
    """Whether :func:`part_of` makes no more than the part; of a lazy tensor without, all is made each time."""
    import onnx_ir as ir

    return not isinstance(tensor, ir.LazyTensor) or _PART in tensor.meta


class SharedResults:
    """Several tensors that one reading of a weight gives, for several lazy ones.

    They are asked for one after the other, as they are written. So what was not asked for yet is kept till then: scales
    and zero points beside codes, of one weight at a time. Who asks for one again has all made again.

    Args:
        make: gives all of them.
    """

    def __init__(self, make: Callable[[], Iterable[np.ndarray]]) -> None:
        self._make = make
        self._waiting: dict[int, np.ndarray] = {}

    def part(self, index: int) -> np.ndarray:
        """One of them."""
        if index not in self._waiting:
            self._waiting = dict(enumerate(self._make()))
        return self._waiting.pop(index)


def lazy_weight(
    graph: "ir.Graph",
    name: str,
    dtype: "ir.DataType",
    shape: Sequence[int],
    make: Callable[[], np.ndarray] | None = None,
    part: PartOf | None = None,
) -> "ir.Value":
    """The initializer ``name``, made if there is none yet, whose data is made when the engine is written.

    Args:
        graph: the graph.
        name: of the weight.
        dtype: of the weight.
        shape: of the weight.
        make: gives the data; called again if it is asked for again, so that no second copy of a model is held.
        part: gives a part of the data, see :func:`lazy_tensor`.

    Raises:
        ValueError: there is one with another dtype or shape.
    """
    import onnx_ir as ir

    known = graph.initializers.get(name)
    if known is None:
        lazy = lazy_tensor(name, dtype, shape, make, part)
        known = ir.Value(name=name, const_value=lazy, type=ir.TensorType(dtype), shape=lazy.shape)
        graph.register_initializer(known)
    elif known.dtype != dtype or known.shape != ir.Shape(shape):
        raise ValueError(f"the graph has another weight {name}.")
    return known


def set_inputs(node: "ir.Node", first: int, values: "Sequence[ir.Value]") -> None:
    """Give a node inputs from ``first`` on; those between its own and them stay empty."""
    inputs = [*node.inputs, *[None] * (first - len(node.inputs)), *values]
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def add_input(
    graph: "ir.Graph", name: str, dtype: "ir.DataType", shape: Sequence[int | str], at: int | None = None
) -> "ir.Value":
    """A new input of the graph, in front of input ``at``, or the last one."""
    import onnx_ir as ir

    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.insert(len(graph.inputs) if at is None else at, value)
    return value

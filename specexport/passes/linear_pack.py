"""Linear layers that read the same tensor, as one."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, constant, lazy_weight, part_of
from specexport.passes.base import CountingPass, attention_nodes, find_constant, read_sizes
from specexport.passes.input_note import copy_input_note

PARTS, WIDTHS = "specexport.parts", "specexport.widths"
"""Where a joined weight keeps the names and the widths of what it was joined from."""

_MAX_STEPS = 64  # values looked at between a linear layer and the attention or the product that it feeds


FormOf = Callable[[str], object]
"""Of a weight's name: what layers must agree in to be joined, besides dtype and inputs."""


class Linear(NamedTuple):
    """A linear layer: ``out = source @ weight (+ bias)``."""

    matmul: ir.Node
    weight: ir.Value  # constant [K, N], without other readers
    add: ir.Node | None  # the Add after it, if there is a bias
    bias: ir.Value | None  # constant [N]

    @property
    def source(self) -> ir.Value:
        """What the layer reads."""
        return self.matmul.inputs[0]  # type: ignore[return-value]

    @property
    def out(self) -> ir.Value:
        """What the layer gives."""
        return (self.add or self.matmul).outputs[0]

    @property
    def width(self) -> int:
        """N."""
        return _dims(self.weight)[1]


class LinearPackPass(CountingPass):
    """Join the query, key and value layers of an attention, and the two layers of a gated MLP.

    Their weights [K, N1], [K, N2], … become one [K, N1 + N2 + …] and their results are Split apart. The packed weight
    is lazy: it is put together when the engine is written, one weight at a time. Each output is the same sum of the
    same products as before. Layers whose weight has other readers, routers and experts are left alone. Counts the
    layers that were joined.
    """

    name = "linear-pack"
    reason = "one product over the tensor that they share: fewer calls, and one quantization of it"

    def __init__(self, form_of: FormOf | None = None) -> None:
        self._form_of = form_of  # only layers of one form are joined; None: all weights are stored alike

    def rewrite(self, model: ir.Model) -> int:
        """Join every group that is found."""
        joined = 0
        found = [*_attention_groups(model), *_gated_groups(model)]
        for group in [alike for layers in found for alike in self._group_alike(layers)]:
            if all(layer.matmul.graph is not None for layer in group):  # none was joined before
                _join(model.graph, group)
                joined += len(group)
        return joined

    def _group_alike(self, layers: Iterable[Linear]) -> Iterator[list[Linear]]:
        """Two and more layers that read one value and are stored in one form."""
        groups: dict[object, list[Linear]] = {}
        for layer in layers:
            name = str(layer.weight.name)
            form = None if self._form_of is None else self._form_of(name)
            groups.setdefault((layer.source, layer.weight.dtype, form), []).append(layer)
        yield from (group for group in groups.values() if len(group) > 1)


def _dims(weight: ir.Value) -> tuple[int, ...]:
    tensor = find_constant(weight)
    assert tensor is not None  # noqa: S101 - a Linear is made of constants
    return tuple(read_sizes(tensor))


def match_linear(matmul: ir.Node) -> Linear | None:
    """The linear layer around a MatMul; None if its weight is no constant matrix, or has other readers."""
    if matmul.op_type != "MatMul" or matmul.domain != "":
        return None
    weight = matmul.inputs[1]
    tensor = find_constant(weight)
    if weight is None or tensor is None or len(tensor.shape) != 2 or len(weight.uses()) != 1:
        return None
    add, bias = _find_bias(matmul, _dims(weight)[1])
    return Linear(matmul, weight, add, bias)


def _find_bias(matmul: ir.Node, width: int) -> tuple[ir.Node | None, ir.Value | None]:
    uses = list(matmul.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or matmul.outputs[0].is_graph_output():
        return None, None
    bias = uses[0].node.inputs[1 - uses[0].idx]
    tensor = find_constant(bias)
    return (uses[0].node, bias) if tensor is not None and tuple(tensor.shape) == (width,) else (None, None)


def find_source_products(value: ir.Value | None) -> list[ir.Node]:
    """The matrix products that ``value`` is computed from, with anything but a product in between."""
    found: list[ir.Node] = []
    todo, seen = [value], 0
    while todo and seen < _MAX_STEPS:
        producer = None if (item := todo.pop()) is None else item.producer()
        if producer is None or producer in found:
            continue
        seen += 1
        if producer.op_type in ("MatMul", "Gemm"):
            found.append(producer)
        else:
            todo += [x for x in producer.inputs if find_constant(x) is None]
    return found


def _attention_groups(model: ir.Model) -> Iterator[list[Linear]]:
    """For each attention, the layers of q, k and v, in this order."""
    for node in list(attention_nodes(model)):
        layers: dict[ir.Node, Linear] = {}
        for value in node.inputs[:3]:
            layers |= {m: layer for m in find_source_products(value) if (layer := match_linear(m)) is not None}
        yield list(layers.values())


def _gated_groups(model: ir.Model) -> Iterator[list[Linear]]:
    """Two layers of one width whose results meet in a product, as a gated MLP's do."""
    for node in [n for n in model.graph if n.op_type == "Mul" and n.domain == ""]:
        sides = [find_source_products(value) for value in node.inputs]
        if [len(side) for side in sides] != [1, 1] or sides[0][0] is sides[1][0]:
            continue
        layers = [layer for side in sides if (layer := match_linear(side[0])) is not None]
        if len(layers) == 2 and layers[0].width == layers[1].width:
            yield layers


def _join(graph: ir.Graph, group: list[Linear]) -> None:
    first = next(node for node in graph if node in {layer.matmul for layer in group})
    widths = [layer.width for layer in group]
    stem = f"{group[0].weight.name}.packed"
    emit = Emitter(graph)
    out = _emit_packed(emit, group, stem)
    sizes = constant(graph, f"{stem}.sizes", np.array(widths, np.int64))
    split = emit.node("Split", [out, sizes], {"axis": -1}, outputs=len(group), name=f"{stem}.split")
    emit.place(before=first)
    for layer, value in zip(group, split.outputs, strict=True):
        value.type, value.shape = layer.out.type, layer.out.shape
        value.name = f"{layer.weight.name}.part"
        ir.convenience.replace_all_uses_with(layer.out, value)
        graph.remove([layer.add, layer.matmul] if layer.add is not None else [layer.matmul], safe=True)
        del graph.initializers[str(layer.weight.name)]


def _emit_packed(emit: Emitter, group: list[Linear], stem: str) -> ir.Value:
    """The product with all weights, and the sum with all biases (nothing where a layer has none)."""
    tensors = [tensor for layer in group if (tensor := find_constant(layer.weight)) is not None]
    width, depth, dtype = sum(layer.width for layer in group), _dims(group[0].weight)[0], tensors[0].dtype
    part = partial(_part, tensors, [layer.width for layer in group])
    weight = lazy_weight(emit.graph, stem, dtype, [depth, width], part=part)
    copy_input_note(group[0].weight, weight)  # all of them read the same
    weight.meta[PARTS] = [str(layer.weight.name) for layer in group]
    weight.meta[WIDTHS] = [layer.width for layer in group]
    dims, kind = group[0].out.shape, group[0].out.dtype
    shape = None if dims is None else [*dims[:-1], width]
    out = emit.op("MatMul", group[0].source, weight, dtype=kind, shape=shape, name=f"{stem}.matmul")
    out.name = f"{stem}.matmul.out"
    if any(layer.bias is not None for layer in group):
        parts = [
            np.zeros(layer.width, dtype.numpy()) if layer.bias is None else layer.bias.const_value.numpy()  # type: ignore[union-attr]
            for layer in group
        ]
        bias = constant(emit.graph, f"{stem}.bias", np.concatenate(parts))
        out = emit.op("Add", out, bias, shape=shape, name=f"{stem}.add")
        out.name = f"{stem}.add.out"
    return out


def _part(tensors: list[ir.TensorProtocol], widths: list[int], axis: int, start: int, stop: int) -> np.ndarray:
    if axis == 0:
        return np.concatenate([part_of(tensor, 0, start, stop) for tensor in tensors], axis=1)
    ends = np.cumsum(widths).tolist()
    parts = [
        part_of(tensor, 1, max(start - begin, 0), min(stop, end) - begin)
        for tensor, begin, end in zip(tensors, [0, *ends], ends, strict=False)
        if start < end and stop > begin
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

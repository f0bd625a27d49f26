"""Where two graphs of a model can be compared: tensors that mean the same in both.

Graphs of one checkpoint differ by what passes and lowerings make of it: a product of floats may be one of integers with
scales after it, three linear layers may be one, attention may be another function. So a tensor is known by

- the table that tokens are looked up in;
- the weight of the linear layer, or of the experts, that give it;
- the cache of the attention that gives it;
- its place in the residual stream, where layers have gates;
- its own name, if the same operator gives a tensor of that name in the other graph. Names come from tracing; a graph
  that was traced with other tools has others, so this counts only if both were built with the same ones.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import onnx_ir as ir

from specexport.debug.graph import EngineGraph, values_by_name
from specexport.passes.experts_graph import BLOCK_EXPERTS
from specexport.passes.residual_blocks import cache_writers
from specexport_runtime.abi import LOGITS

_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "BlockLinear")
_FORMS = re.compile(r"(\.(int\d|blocks\.\w+|transposed|weight))+$")
_PART = ".part"
_PACKED = ".packed"
_STEM = re.compile(r"^(model\.)+")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_VIEWS = {"Cast", "Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"}
_NUMBERED = re.compile(r"^(val|node)_")  # numbered anew by whatever makes them

Key = tuple[str, ...]


class NamedTensor(NamedTuple):
    """One tensor of a graph."""

    key: Key  # what it is, the same in every graph of the model
    label: str  # what to call it
    op: str  # the operator or the kind of layer that gives it
    name: str  # in this graph
    layer: int | None  # number of the transformer layer; None outside of them
    whole: Key | None = None  # key of the packed layer that it is a part of; None for what is whole


class TensorPair(NamedTuple):
    """A tensor of the reference graph, and the same of the graph that is looked at."""

    reference: NamedTensor
    name: str

    @property
    def label(self) -> str:
        """What to call it."""
        return self.reference.label


def match_tensors(reference: EngineGraph, other: EngineGraph, *, same_names: bool) -> list[TensorPair]:
    """The tensors that two graphs of a model have in common, in the order of the reference graph; logits come last."""
    if same_names:  # only one of the graphs may have gates to tell its stream by
        streams = reference.streams | other.streams
        reference, other = reference._replace(streams=streams), other._replace(streams=streams)
    first, second = find_points(reference), find_points(other)
    if same_names:
        first, second = _add_named_tensors(reference, other, first, second)
    common = first.keys() & second.keys()
    # Parts of a packed layer say nothing that the whole does not.
    common = {key for key in common if first[key].whole not in common}
    places = {str(value.name): at for at, node in enumerate(reference.model.graph) for value in node.outputs}
    points = sorted((first[key] for key in common), key=lambda point: places[point.name])
    # Where q, k and v stay one tensor, the parts of a packed layer have no names.
    labels = {key: max(first[key].label, second[key].label, key=len) for key in common}
    once = {point.name: point for point in points}
    return [TensorPair(point, second[point.key].name) for point in _label_points(list(once.values()), labels)]


def find_points(source: EngineGraph) -> dict[Key, NamedTensor]:
    """Linear layers, experts, attention and the residual stream of a graph."""
    graph = source.model.graph
    packs = _find_joined_layers(graph)
    found = [*_embeddings(graph), *_linears(graph, packs), *_experts(graph)]
    names = values_by_name(source.model)
    for layer, node in enumerate(cache_writers(graph)):
        label = f"layers.{layer}.attention"
        found.append(NamedTensor(("attention", str(layer)), label, "attention", str(node.outputs[0].name), layer))
    for (layer, part), name in source.streams.items():
        label = f"layers.{layer}.residual.{part}"
        if name in names:
            found.append(NamedTensor(("residual", str(layer), part), label, "residual", name, layer))
    return {point.key: point for point in found if point.name}


def _embeddings(graph: ir.Graph) -> Iterator[NamedTensor]:
    """What is looked up by token id, as floats."""
    count = 0
    for node in graph:
        at = {"Gather": 0, "BlockEmbedding": 1}.get(node.op_type)
        table = None if at is None or len(node.inputs) <= at else node.inputs[at]
        if table is None or not table.is_initializer() or table.shape is None or len(table.shape) != 2:
            continue
        value = node.outputs[0]
        name = "embedding" if not count else f"embedding.{count}"
        yield NamedTensor(("embedding", str(count)), name, "embedding", str(value.name), None)
        count += 1


def _linears(graph: ir.Graph, packs: dict[str, list[str]]) -> Iterator[NamedTensor]:
    initializers = graph.initializers
    for node in graph:
        if node.op_type not in _PRODUCTS:
            continue
        weight = node.inputs[1]
        if weight is None or weight.name not in initializers or weight.shape is None or len(weight.shape) < 2:
            continue
        base, packed = _parse_weight_name(str(weight.name))
        end, has_bias = _find_linear_output(node)
        kind = "packed" if packed else "linear"
        parts = packs.get(base, ()) if packed else ()
        label = _label([base, *(packs.get(base, [base, "others"])[1:] if packed else [])])
        bias = ("bias",) if has_bias else ()
        key = (kind, base, *bias)
        yield NamedTensor(key, label, "linear", str(end.name), _layer_number(base))
        for name in parts:
            part = next(
                (str(use.name) for use in _split_outputs(end) if _parse_weight_name(str(use.name))[0] == name), None
            )
            if part is not None:
                yield NamedTensor(("linear", name, *bias), name, "linear", part, _layer_number(name), key)


def _experts(graph: ir.Graph) -> Iterator[NamedTensor]:
    """What all experts of a layer give together; products within are no tensors."""
    for node in graph:
        down = node.inputs[5] if node.op_type == BLOCK_EXPERTS else None
        if down is not None:
            name = _parse_weight_name(str(down.name))[0].rpartition(".")[0]
            yield NamedTensor(("experts", name), name, "experts", str(node.outputs[0].name), _layer_number(name))


def _parse_weight_name(weight: str) -> tuple[str, bool]:
    """A weight's name without the forms that passes have put it in; whether it holds several layers."""
    name = _FORMS.sub("", weight.removesuffix(_PART))
    packed = name.endswith(_PACKED)
    return _STEM.sub("", _FORMS.sub("", name.removesuffix(_PACKED))), packed


def _find_joined_layers(graph: ir.Graph) -> dict[str, list[str]]:
    """Layers that were joined, by the first of them."""
    found = {}
    for node in graph:
        names = [str(value.name) for value in node.outputs]
        if node.op_type == "Split" and names and all(name.endswith(_PART) for name in names):
            parts = [_parse_weight_name(name)[0] for name in names]
            found[parts[0]] = parts
    return found


def _split_outputs(packed: ir.Value) -> Iterable[ir.Value]:
    return next((use.node.outputs for use in packed.uses() if use.node.op_type == "Split"), ())


def _find_linear_output(node: ir.Node) -> tuple[ir.Value, bool]:
    """The tensor that a linear layer gives, after its bias, and whether a bias was added."""
    value, has_bias = node.outputs[0], node.op_type in ("Gemm", "BlockLinear") and len(node.inputs) > 2
    while len(uses := list(value.uses())) == 1 and not value.is_graph_output():
        after, other = uses[0].node, _find_other_input(uses[0].node, value)
        if after.op_type == "Add" and not has_bias and _is_vector(other):
            value, has_bias = after.outputs[0], True
        else:
            break
    return value, has_bias


def _find_other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return next((item for item in node.inputs if item is not value), None)


def _is_vector(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) == 1


def _label(names: list[str]) -> str:
    """One name for layers that were joined: ``layers.0.self_attn.q_proj+k_proj+v_proj``."""
    return "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def _layer_number(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _add_named_tensors(
    reference: EngineGraph, other: EngineGraph, first: dict[Key, NamedTensor], second: dict[Key, NamedTensor]
) -> tuple[dict[Key, NamedTensor], dict[Key, NamedTensor]]:
    """The points of both graphs with the tensors that have one name and one operator in both."""
    nodes = [_find_float_nodes(graph.model.graph) for graph in (reference, other)]
    taken = [{point.name for point in points.values()} for points in (first, second)]
    added: dict[Key, NamedTensor] = {}
    for name, node in nodes[0].items():
        twin = nodes[1].get(name)
        if twin is None or twin.op_type != node.op_type or any(name in names for names in taken):
            continue
        added["name", name] = NamedTensor(("name", name), name, node.op_type, name, None)
    return first | added, second | added


def _find_float_nodes(graph: ir.Graph) -> dict[str, ir.Node]:
    """The node of each float tensor that may be compared by its name."""
    found = {}
    for node in graph:
        for value in node.outputs if node.op_type not in _VIEWS else ():
            name = str(value.name or "")
            is_float = value.dtype in (None, ir.DataType.FLOAT) and (value.dtype or name == LOGITS.name)
            if name and is_float and not _NUMBERED.match(name) and "_cache_out." not in name:
                found[name] = node
    return found


def _label_points(points: list[NamedTensor], labels: dict[Key, str]) -> list[NamedTensor]:
    """The points with their labels; one that is known by its name alone belongs to the layer of the next known one."""
    placed: list[NamedTensor] = []
    layer: Any = None
    for point in reversed(points):
        if point.key[0] != "name":
            layer = point.layer
            placed.append(point._replace(label=labels[point.key]))
        else:
            where = f"layers.{layer}." if layer is not None else ""
            placed.append(point._replace(label=f"{where}{point.op}({point.name})", layer=layer))
    return placed[::-1]

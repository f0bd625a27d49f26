"""A whole model's graph from the trace of a few of its layers.

The layers that are not traced hand their input on. Of each kind the first and the last layer are traced
(``layer_kinds``); their nodes are found by the exporter's note of the module that a node belongs to, and must be the
same up to weights' names, caches and the layer's number. Those of the first are then written once more for each layer
of the kind.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from torch import Tensor

from specexport.checkpoint.stored import WEIGHT_PREFIX
from specexport.onnx_emit import Emitter
from specexport.trace.geometry import ModelCalls
from specexport.trace.layer_kinds import ATTENTION, RECURRENCE, LayerKinds, LayersDiffer
from specexport_runtime.abi import CACHE_INPUTS, K_CACHE_OUT, STATE_INPUTS, STATE_OUTPUTS, V_CACHE_OUT, TensorSpec

_SCOPES = "pkg.torch.onnx.name_scopes"
_INPUTS = {ATTENTION: CACHE_INPUTS, RECURRENCE: STATE_INPUTS}
_OUTPUTS = {ATTENTION: (K_CACHE_OUT, V_CACHE_OUT), RECURRENCE: STATE_OUTPUTS}
_Place = tuple[int, int]
"""A node of a layer, and one of its inputs."""
_SAME, _HIDDEN, _NUMBER = "same", "hidden state", "number"
"""What a layer reads in a place: what others of its kind read, or its own hidden state, or its number."""


@contextmanager
def skip_other_layers(kinds: LayerKinds, traced: Sequence[int]) -> Iterator[None]:
    """Within the block, all layers but ``traced`` have no weights, and hand their input on."""
    before = {index: dict(vars(kinds.layers[index])) for index in range(len(kinds.layers)) if index not in traced}
    for index in before:
        vars(kinds.layers[index]).update(
            _parameters={}, _buffers={}, _modules={}, forward=_make_pass_through(kinds.rest[index])
        )
    try:
        yield
    finally:
        for index, values in before.items():
            vars(kinds.layers[index]).clear()
            vars(kinds.layers[index]).update(values)


def _make_pass_through(rest: tuple[Any, ...] | None) -> Any:
    def forward(*given: Any, **named: Any) -> Any:
        hidden = given[0] if given else named["hidden_states"]
        return hidden if rest is None else (hidden, *rest)

    return forward


def select_calls(calls: ModelCalls, kinds: LayerKinds, traced: Sequence[int]) -> ModelCalls:
    """The calls of some layers, numbered anew."""

    def some(all_calls: Sequence[Any], word: str) -> tuple[Any, ...]:
        numbers = [number for layer in traced for number in kinds.numbers(word, layer)]
        return tuple(replace(all_calls[number], index=index) for index, number in enumerate(numbers))

    return ModelCalls(some(calls.attention, ATTENTION), some(calls.recurrences, RECURRENCE))


class _Kept(NamedTuple):
    """An input or output of what a step keeps."""

    word: str  # attention or recurrence
    at: int  # which of the inputs, or outputs, of a call
    call: int  # of the layer
    layer: int


class _Layer(NamedTuple):
    """The nodes of a traced layer."""

    number: int
    nodes: list[ir.Node]  # in order, those of the layer alone
    result: ir.Value  # the hidden state that it gives


class _Pattern(NamedTuple):
    """How the nodes of a kind's first layer differ from those of another one."""

    hidden: frozenset[_Place]  # reads the hidden state
    numbers: frozenset[_Place]  # reads the layer's number


def unroll(
    ir_model: ir.Model, kinds: LayerKinds, traced: Sequence[int], weights: Mapping[str, Tensor], taps: Sequence[int]
) -> None:
    """Turn the graph of some layers, in place, into that of all; raises Unlike, and the graph is of no more use.

    ``weights`` are all parameters and buffers of the model by name. Heads read the hidden states in front of the layers
    ``taps``.
    """
    _Unrolling(ir_model.graph, kinds, list(traced), weights).run(taps)


class _Unrolling:
    """See :func:`unroll`."""

    def __init__(self, graph: ir.Graph, kinds: LayerKinds, traced: list[int], weights: Mapping[str, Tensor]) -> None:
        self._graph, self._kinds, self._traced, self._weights = graph, kinds, traced, weights
        self._prefix = f"{WEIGHT_PREFIX}{kinds.path}."
        self._kept: dict[ir.Value, _Kept] = {}

    def run(self, taps: Sequence[int]) -> None:
        """Do it."""
        self._number_kept()
        nodes = self._nodes()
        layers = {number: self._layer(number, nodes[number]) for number in self._traced}
        self._check_readers(layers, taps)
        patterns = {
            kind: self._compare(layers, layers[kind], layers[last])
            for kind, last in {kind: number for number, kind in enumerate(self._kinds.kinds)}.items()
            if kind != last
        }
        hidden = layers[0].result
        for number, kind in enumerate(self._kinds.kinds[1:], start=1):
            if number in layers:
                if number - 1 not in layers:
                    before = layers[max(other for other in self._traced if other < number)].result
                    for node in layers[number].nodes:
                        for at, value in enumerate(node.inputs):
                            if value is before:
                                node.replace_input_with(at, hidden)
                hidden = layers[number].result
            else:
                follows = layers[min(other for other in self._traced if other > number)].nodes[0]
                hidden = self._copy(layers[kind], number, patterns[kind], hidden, follows)
        self._order_kept()
        self._order_weights()

    def _number_kept(self) -> None:
        """Name caches and states of the traced layers as those of the whole model."""
        inputs = {value.name: value for value in self._graph.inputs}
        outputs = {value.name: value for value in self._graph.outputs}
        renamed = []
        for word, sides in ((ATTENTION, _INPUTS), (RECURRENCE, _INPUTS), (ATTENTION, _OUTPUTS), (RECURRENCE, _OUTPUTS)):
            numbers = [(number, call) for number in self._traced for call in range(self._kinds.calls[number][word])]
            for index, (number, call) in enumerate(numbers):
                for at, spec in enumerate(sides[word]):
                    found = (inputs if sides is _INPUTS else outputs)[spec.name.format(i=index)]
                    renamed.append((found, spec.name.format(i=self._kinds.numbers(word, number)[call])))
                    self._kept[found] = _Kept(word, at, call, number)
        for value, _ in renamed:
            value.name = None
        for value, name in renamed:
            value.name = name

    def _nodes(self) -> dict[int, list[ir.Node]]:
        """The nodes of each traced layer."""
        found: dict[int, list[ir.Node]] = {number: [] for number in self._traced}
        for node in self._graph:
            scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
            numbers = {
                scope.removeprefix(self._prefix).split(".")[0] for scope in scopes if scope.startswith(self._prefix)
            }
            if numbers and node.op_type != "Constant":
                if len(numbers) > 1 or int(min(numbers)) not in found:
                    raise LayersDiffer(f"a node of its trace belongs to layers {', '.join(sorted(numbers))}")
                found[int(min(numbers))].append(node)
        return found

    def _layer(self, number: int, nodes: list[ir.Node]) -> _Layer:
        own = set(nodes)
        results = [
            value
            for node in nodes
            for value in node.outputs
            if value not in self._kept and (value.is_graph_output() or any(use.node not in own for use in value.uses()))
        ]
        if len(results) != 1:
            raise LayersDiffer(f"{len(results)} values of layer {number}'s trace are read after it")
        return _Layer(number, nodes, results[0])

    def _check_readers(self, layers: Mapping[int, _Layer], taps: Sequence[int]) -> None:
        """Only the next layer may read what a layer gives, and whatever is after the last one, or in a head."""
        owners = {node: number for number, layer in layers.items() for node in layer.nodes}
        for number, following in zip(self._traced, self._traced[1:], strict=False):
            readers = {owners.get(use.node) for use in layers[number].result.uses()}
            if number + 1 in taps:
                readers.discard(None)
            if readers - {number, following}:
                raise LayersDiffer(f"what layer {number} gives is read by more than the next one")

    def _compare(self, layers: Mapping[int, _Layer], one: _Layer, other: _Layer) -> _Pattern:
        """Find that two layers are the same, and in which places they read other values."""
        places: dict[str, set[_Place]] = {_HIDDEN: set(), _NUMBER: set(), _SAME: set()}
        same, entries = dict[ir.Value, ir.Value](), set[tuple[Any, Any]]()
        if len(one.nodes) != len(other.nodes):
            raise self._make_difference_error(one, other, "have not as many nodes")
        for index, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=True)):
            if not _same_node(a, b):
                raise self._make_difference_error(one, other, f"differ in {a.op_type}")
            for at, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=True)):
                role = self._find_role(x, y, one.number, other.number, same)
                if role is None:
                    raise self._make_difference_error(one, other, f"differ in what {a.op_type} reads")
                places[role].add((index, at))
                if role == _HIDDEN:
                    entries.add((x, y))
            same |= dict(zip(a.outputs, b.outputs, strict=True))
        wanted = [self._find_input_hidden(layers, layer.number) for layer in (one, other)]
        if len(entries) != 1 or any(value not in (None, found) for value, found in zip(wanted, *entries, strict=True)):
            raise self._make_difference_error(one, other, "read other values than a hidden state")
        return _Pattern(frozenset(places[_HIDDEN]), frozenset(places[_NUMBER]))

    def _find_role(
        self, x: ir.Value | None, y: ir.Value | None, one: int, other: int, same: Mapping[ir.Value, ir.Value]
    ) -> str | None:
        """What ``x`` is in layer ``one`` if ``y`` is that in layer ``other``; None if nothing of the kind."""
        if x is None or y is None or x in same:
            fits = x is y if x is None or y is None else same[x] is y
        elif x in self._kept and y in self._kept:
            mine, theirs = self._kept[x], self._kept[y]
            fits = mine[:3] == theirs[:3] and (mine.layer, theirs.layer) == (one, other)
        elif self._is_constant(x) and self._is_constant(y):
            held = _content(x), _content(y)
            if _is_number(held[0], one) and _is_number(held[1], other):
                return _NUMBER
            fits = _equal(*held)
        elif x.is_initializer() or y.is_initializer():
            fits = str(y.name) == self._weight_name(x, one, other)
        else:
            return _SAME if x is y else _HIDDEN
        return _SAME if fits else None

    def _make_difference_error(self, one: _Layer, other: _Layer, what: str) -> LayersDiffer:
        return LayersDiffer(f"the traces of layers {one.number} and {other.number} {what}")

    def _find_input_hidden(self, layers: Mapping[int, _Layer], number: int) -> ir.Value | None:
        """The hidden state that a traced layer reads; None for the first."""
        earlier = [other for other in self._traced if other < number]
        return layers[max(earlier)].result if earlier else None

    def _is_constant(self, value: ir.Value) -> bool:
        if value.is_initializer():  # a tensor that the model's code makes
            return str(value.name).removeprefix(WEIGHT_PREFIX) not in self._weights
        node = value.producer()
        return node is not None and (node.op_type, node.domain) == ("Constant", "")

    def _weight_name(self, value: ir.Value, layer: int, other: int) -> str:
        """What is in another layer the weight that ``value`` is in ``layer``; its own name if it is not a layer's."""
        name, mine = str(value.name), f"{self._prefix}{layer}."
        return f"{self._prefix}{other}.{name.removeprefix(mine)}" if name.startswith(mine) else name

    def _copy(self, layer: _Layer, number: int, pattern: _Pattern, hidden: ir.Value, before: ir.Node) -> ir.Value:
        """Write a layer's nodes once more, for layer ``number``; gives its hidden state."""
        emit, copies = Emitter(self._graph), dict[ir.Value, ir.Value]()

        def read(value: ir.Value | None, place: _Place) -> ir.Value | None:
            """What the new layer reads where the other one reads ``value``."""
            if value is None or value in copies:
                return value if value is None else copies[value]
            if place in pattern.hidden:
                return hidden
            if place in pattern.numbers:
                made = emit.node("Constant", [], {"value": ir.tensor(np.full_like(_content(value), number))}).outputs[0]
                made.type, made.shape = value.type, _copy_shape(value.shape)
                return made
            if value in self._kept:
                return self._input(value, number)
            if value.is_initializer() and not self._is_constant(value):
                return self._find_or_add_weight(value, self._weight_name(value, layer.number, number))
            return value

        for index, node in enumerate(layer.nodes):
            inputs = [read(value, (index, at)) for at, value in enumerate(node.inputs)]
            made = emit.node(
                node.op_type, inputs, node.attributes, outputs=len(node.outputs), domain=node.domain,
                name=f"{node.name}.{number}",
            )  # fmt: skip
            for old, new in zip(node.outputs, made.outputs, strict=True):
                new.name, new.type, new.shape = f"{old.name}.{number}", old.type, _copy_shape(old.shape)
                copies[old] = new
                if old in self._kept:
                    new.name = self._name(_OUTPUTS, self._kept[old], number)
                    self._graph.outputs.append(new)
        emit.place(before=before)
        return copies[layer.result]

    def _name(self, sides: Mapping[str, Sequence[TensorSpec]], kept: _Kept, number: int) -> str:
        return sides[kept.word][kept.at].name.format(i=self._kinds.numbers(kept.word, number)[kept.call])

    def _input(self, value: ir.Value, number: int) -> ir.Value:
        name = self._name(_INPUTS, self._kept[value], number)
        found = next((each for each in self._graph.inputs if each.name == name), None)
        if found is None:
            found = ir.Value(name=name, type=value.type, shape=_copy_shape(value.shape))
            self._graph.inputs.append(found)
        return found

    def _find_or_add_weight(self, value: ir.Value, name: str) -> ir.Value:
        found = self._graph.initializers.get(name)
        if found is None:
            tensor = type(value.const_value)(self._weights[name.removeprefix(WEIGHT_PREFIX)].detach(), name=name)  # type: ignore[call-arg, misc]
            found = ir.Value(name=name, const_value=tensor, type=value.type, shape=_copy_shape(value.shape))
            self._graph.register_initializer(found)
        return found

    def _order_kept(self) -> None:
        """Put caches and states of all layers in their order, after all else, as the contract has them."""
        for values, sides in ((self._graph.inputs, _INPUTS), (self._graph.outputs, _OUTPUTS)):
            by_name = {str(value.name): value for value in values}
            names = [
                spec.name.format(i=index)
                for word, specs in sides.items()
                for index in range(sum(calls[word] for calls in self._kinds.calls))
                for spec in specs
            ]
            ordered = [value for name, value in by_name.items() if name not in names] + [
                by_name[name] for name in names
            ]
            values.clear()
            values.extend(ordered)

    def _order_weights(self) -> None:
        """Put the weights in the model's order; whatever else there is stays after them."""
        values = self._graph.initializers
        names = [name for name in map(WEIGHT_PREFIX.__add__, self._weights) if name in values]
        for name in [*names, *(name for name in list(values) if name not in set(names))]:
            values[name] = values.pop(name)


def _same_node(a: ir.Node, b: ir.Node) -> bool:
    kinds = [(x.op_type, x.domain, x.overload, len(x.inputs), len(x.outputs), x.attributes.keys()) for x in (a, b)]
    if kinds[0] != kinds[1]:
        return False
    return all(_same_attribute(a.attributes[name], b.attributes[name]) for name in a.attributes) and all(
        x.dtype == y.dtype and x.shape == y.shape for x, y in zip(a.outputs, b.outputs, strict=True)
    )


def _same_attribute(a: ir.Attr, b: ir.Attr) -> bool:
    if a.type != b.type or a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return False
    if a.type == ir.AttributeType.TENSOR:
        return _equal(a.value.numpy(), b.value.numpy())
    return bool(a.value == b.value)


def _content(value: ir.Value) -> np.ndarray:
    """What a constant holds."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise LayersDiffer("a constant of its trace holds no numbers")
    return tensor.numpy()


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def _is_number(value: np.ndarray, number: int) -> bool:
    return value.size == 1 and value.dtype.kind == "i" and int(value.item()) == number


def _copy_shape(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape(list(shape))

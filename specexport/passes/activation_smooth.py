"""Outlying channels of activations, moved into the weights before quantization."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from specexport.onnx_emit import Emitter, constant, lazy_weight, part_of
from specexport.passes.base import CountingPass, constant_of, sizes_of
from specexport.passes.input_note import carry_inputs, carry_outputs
from specexport.passes.quantize_sites import LinearSite, linear_site
from specexport.passes.transpose_fold import FOLDED

ALPHA = 0.6
"""How much of an activation's range goes into the weights: 0 is nothing, 1 all of it. Of 0.3 to 0.9 it loses least on
Gemma-3-270M, int8 and int4 alike; a choice for each layer, by what that loses on the texts, was no better."""
SMOOTH, DIVIDED, INVERSE = ".smooth", ".divided", ".inverse"
"""What is added to the name of a weight whose inputs were multiplied, of one (or a tensor) that was divided, and of
what takes the factors back behind a lookup."""
NORMS = {"RMSNormalization", "LayerNormalization"}
_ROW_STEPS = {"Gather", "Reshape", "Squeeze"}
"""Between a norm and a layer: they choose rows or lay them out anew, and touch no channel."""
_LEAST_SEEN = 0.5  # of the median channel: what a few texts did not excite, others will
_LEAST = 1e-5  # of a range: a channel of zeros is not made infinite

FloatVector = npt.NDArray[np.float32]


class _Group(NamedTuple):
    """Layers that read one value, and what gives it.

    Attributes:
        sites: all readers.
        lookups: of a weight that is an embedding as well, the nodes that look tokens up in it.
        norm: the norm whose result it is; None if it is gated.
        gate: the layer whose result, times another, it is; None if it is a norm's.
    """

    sites: list[LinearSite]
    lookups: list[ir.Node]
    norm: ir.Node | None
    gate: LinearSite | None


class ActivationSmoothPass(CountingPass):
    """Divide what linear layers read by a factor a channel, and multiply their weights by it (SmoothQuant).

    Xiao et al. 2023, equation 4: ``s = max|x|^alpha / max|w|^(1 - alpha)`` for each input channel, ``x`` as measured on
    texts. With one scale a token, a channel a hundred times as large as the others leaves these a hundredth of the 8
    bits. The division costs nothing: it goes into the weight of the norm before the layers, or, for a gated MLP, into
    the rows of the layer whose result is multiplied by the gate; each of those has a scale of its own. Where an LM head
    is tied, what is looked up in its weight is divided again, which is one product a step. What the model computes is
    the same up to rounding. Layers whose input comes from elsewhere stay. Counts the layers.

    Args:
        ranges: largest magnitude of each input channel, float32 [K], by name of the weight.
        alpha: see ``ALPHA``.
    """

    name = "activation-smooth"
    reason = "int8 activations: outlying channels take the bits of all others"

    def __init__(self, ranges: Mapping[str, FloatVector], alpha: float = ALPHA) -> None:
        self._ranges = ranges
        self._alpha = alpha

    def rewrite(self, model: ir.Model) -> int:
        """Smooth every group of layers that can be."""
        common_passes.RemoveUnusedNodesPass()(model)  # what earlier passes left would count as readers
        groups = list(self._groups(model))
        for group in groups:
            self._smooth(model.graph, group)
        return sum(len(group.sites) for group in groups)

    def _groups(self, model: ir.Model) -> Iterator[_Group]:
        readers: dict[ir.Value, list[LinearSite]] = {}
        for node in model.graph:
            site = linear_site(node)
            if site is not None and _name(site) in self._ranges:
                readers.setdefault(site.source, []).append(site)
        for source, sites in readers.items():
            if len(source.uses()) != len(sites):
                continue
            others = [use.node for site in sites for use in site.weight.uses() if use.node is not site.node]
            producer = _producer(source)
            if producer is None or producer.domain != "" or (others and not _are_lookups(sites, others)):
                continue
            if producer.op_type in NORMS and _is_own(producer.inputs[1:], sites[0].depth):
                yield _Group(sites, others, producer, None)
            elif producer.op_type == "Mul" and (gate := _gated_layer(producer)) is not None:
                yield _Group(sites, others, None, gate)

    def _smooth(self, graph: ir.Graph, group: _Group) -> None:
        seen = np.maximum.reduce([self._ranges[_name(site)] for site in group.sites])
        seen = np.maximum(seen, _LEAST_SEEN * np.median(seen))
        weights = np.maximum.reduce(
            [np.abs(part).max(axis=0) for site in group.sites for part in _now(site).channels()]
        )
        factors = np.maximum(seen, _LEAST) ** self._alpha / np.maximum(weights, _LEAST) ** (1 - self._alpha)
        factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
        _rename(group)
        for site in group.sites:
            weight = _scale_weight(graph, site, factors, inputs=True)
            for lookup in group.lookups:
                _divide_lookup(graph, lookup, weight, factors)
        if group.norm is not None:
            for index, value in enumerate(group.norm.inputs[1:], start=1):
                tensor = constant_of(value)
                if tensor is not None:
                    divided = constant(graph, f"{tensor.name}.smooth.{group.norm.name}", tensor.numpy() / factors)
                    group.norm.replace_input_with(index, divided)
        if group.gate is not None:
            _scale_weight(graph, group.gate, 1 / factors, inputs=False)


def _rename(group: _Group) -> None:
    """Mark what is divided from now on: a tensor of the same name in another graph is not the same."""
    value, first = group.sites[0].source, group.norm
    if group.gate is not None:
        group.gate.node.outputs[0].name = f"{group.gate.node.outputs[0].name}{DIVIDED}"
        first = next(iter(group.gate.node.outputs[0].uses())).node
    while True:
        value.name = f"{value.name}{DIVIDED}"
        node = value.producer()
        if node is None or node is first or node.inputs[0] is None:
            return
        value = node.inputs[0]


def _name(site: LinearSite) -> str:
    return str(site.weight.name).removesuffix(FOLDED)


def _producer(source: ir.Value) -> ir.Node | None:
    """What gives a value, with a choice of rows in between; None if somebody else reads it on the way."""
    while (node := source.producer()) is not None and not source.is_graph_output():
        value = node.inputs[0] if node.inputs else None
        on_rows = node.op_type in _ROW_STEPS and node.domain == "" and node.attributes.get_int("axis", 0) == 0
        whole = value is not None and _width(value) is not None and _width(value) == _width(source)
        if not on_rows or value is None or not whole or len(value.uses()) != 1:
            return node
        source = value
    return None


def _width(value: ir.Value) -> int | None:
    """Channels of a value; None if they are not known."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) > 1 else None
    return last if isinstance(last, int) else None


def _are_lookups(sites: "list[LinearSite]", others: "list[ir.Node]") -> bool:
    """Whether one layer's weight is an embedding besides, and nothing more."""
    turned = len(sites) == 1 and sites[0].turned
    return turned and all(node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0 for node in others)


def _divide_lookup(graph: ir.Graph, lookup: ir.Node, weight: ir.Value, factors: FloatVector) -> None:
    """Look up in the scaled weight, and take the factors back."""
    old, emit = lookup.outputs[0], Emitter(graph)
    lookup.replace_input_with(0, weight)
    inverse = constant(graph, f"{weight.name}{INVERSE}", 1 / factors)
    result = emit.op("Mul", old, inverse, shape=old.shape)
    emit.place(after=lookup)
    ir.convenience.replace_all_uses_with([old], [result], replace_graph_outputs=False)
    result.producer().replace_input_with(0, old)  # type: ignore[union-attr]


def _is_own(weights: "Seq[ir.Value | None]", width: int) -> bool:
    """Whether a norm's weight (and bias) are constants of one value a channel."""
    tensors = [constant_of(value) for value in weights if value is not None]
    return bool(tensors) and all(tensor is not None and list(tensor.shape) == [width] for tensor in tensors)


def _gated_layer(product: ir.Node) -> LinearSite | None:
    """Of the two factors, the one that is a layer's result as it is, read by nobody else; None if none or both are."""
    found = []
    for value in product.inputs:
        node = None if value is None else value.producer()
        site = None if node is None or value is None or len(value.uses()) != 1 else linear_site(node)
        if site is not None and len(site.weight.uses()) == 1 and site.bias is None:
            found.append(site)
    return found[0] if len(found) == 1 else None


def _scale_weight(graph: ir.Graph, site: LinearSite, factors: FloatVector, *, inputs: bool) -> ir.Value:
    """Multiply a layer's weight by a factor for each of its inputs, or of its outputs; returns the new one."""
    site = _now(site)
    down = inputs != site.turned  # the factors go along the first axis of the weight as it is stored
    weight = lazy_weight(
        graph,
        f"{site.weight.name}{SMOOTH if inputs else DIVIDED}",
        site.tensor.dtype,
        sizes_of(site.tensor),
        partial(_scaled, site.tensor, factors, down),
        partial(_part, site.tensor, factors, down),
    )
    carry_inputs(site.weight, weight, factors if inputs else None)
    carry_outputs(site.weight, weight, None if inputs else factors)
    site.node.replace_input_with(1, weight)
    return weight


def _now(site: LinearSite) -> LinearSite:
    """The layer with the weight that it has by now: a layer may be the gate of one group and a reader in another."""
    found = linear_site(site.node)
    assert found is not None  # noqa: S101 - only its weight has changed
    return found


def _scaled(tensor: ir.TensorProtocol, factors: FloatVector, down: bool) -> np.ndarray:
    array: np.ndarray = tensor.numpy() * (factors[:, None] if down else factors[None, :])
    return array


def _part(tensor: ir.TensorProtocol, factors: FloatVector, down: bool, axis: int, start: int, stop: int) -> np.ndarray:
    own = factors[start:stop] if down == (axis == 0) else factors
    array: np.ndarray = part_of(tensor, axis, start, stop) * (own[:, None] if down else own[None, :])
    return array

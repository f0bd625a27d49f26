"""A layer's experts with packed weights, as our own operator for CPUs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, can_slice_lazily, part_of
from specexport.passes.base import find_constant, read_sizes
from specexport.passes.block_format import choose_format, pack, pack_float, packed_shape
from specexport.passes.block_linear import Packing, add_packed_weight, find_narrowest_format
from specexport.passes.block_make import IN_SINGLE, INT4, INT8, fits_half, int4_weight, int8_weight
from specexport.passes.block_weight import BlockWeight
from specexport.passes.experts_graph import BLOCK_EXPERTS, SIZES, ExpertsSite, experts_sites
from specexport_runtime.abi import OP_DOMAIN


def replace_experts(graph: ir.Graph, site: ExpertsSite, gate_up: Packing, down: Packing) -> None:
    """Replace a layer's experts by one ``BlockExperts``, which reads each chosen expert once a step."""
    emit, given, node = Emitter(graph), site.given, site.node
    packed = {"gate_up": gate_up, "down": down}
    told: dict[str, Any] = {f"{name}_format": packing.format for name, packing in packed.items()}
    told |= {name: node.attributes[name].value for name in ("interleaved", "alpha", "beta", "limit")}
    weights = {name: add_packed_weight(graph, str(given[name].name), packing) for name, packing in packed.items()}
    result = emit.op(
        BLOCK_EXPERTS,
        *(given[name] for name in ("x", "expert_ids", "expert_weights")),
        *(weights["gate_up"], given.get("gate_up_bias"), weights["down"], given.get("down_bias")),
        domain=OP_DOMAIN,
        E=site.num_experts,
        H=site.depth,
        I=site.width,
        **told,
    )
    result.producer().meta[SIZES] = site.sizes  # type: ignore[union-attr]
    emit.replace(node, [result])
    for name in packed:  # a weight without readers would be written all the same
        if not given[name].uses():
            graph.initializers.pop(str(given[name].name), None)


def replace_float_experts(model: ir.Model) -> int:
    """Replace the remaining layers of experts by ``BlockExperts`` with float weights; gives how many."""
    sites = experts_sites(model)
    for site in sites:
        replace_experts(
            model.graph, site, *(pack_float_experts(get_expert_weight(site, name)) for name in ("gate_up", "down"))
        )
    return len(sites)


def get_expert_weight(site: ExpertsSite, name: str) -> ir.TensorProtocol:
    """The weights of all experts [E, N, K]: ``"gate_up"`` or ``"down"``."""
    return find_constant(site.given[name])  # type: ignore[return-value]


def pack_float_experts(tensor: ir.TensorProtocol) -> Packing:
    """Float weights [E, N, K], in the narrowest type that holds each value exactly."""
    kind, (_, width, depth) = find_narrowest_format(_iterate_experts(tensor)), read_sizes(tensor)
    return _packing(tensor, kind, lambda part: pack_float(kind, part, width, depth))


def pack_rounded_experts(tensor: ir.TensorProtocol, bits: int) -> Packing:
    """Float weights [E, N, K] rounded to 8 or 4 bits in blocks; inputs of experts are not measured."""
    kind, make = (INT8, int8_weight) if bits == 8 else (INT4, partial(int4_weight, importance=None))
    half = fits_half(_iterate_experts(tensor), kind)
    kind = kind if half else IN_SINGLE[kind]
    return _packing(tensor, kind, lambda part: pack(kind, make(ir.tensor(part), turned=True, half=half)))


def pack_kept_experts(weight: BlockWeight, count: int) -> Packing:
    """Integers of so many experts, one below the other, as they are."""
    kind, (rows, depth) = choose_format(weight), weight.shape
    width = rows // count
    shape = packed_shape(kind, width, depth)

    def make() -> np.ndarray:
        starts = range(0, rows, width)
        return _stack_experts(count, shape, (pack(kind, weight.take(np.arange(at, at + width))) for at in starts))

    return Packing(kind, (width, depth), make, count)


def _packing(tensor: ir.TensorProtocol, kind: str, one: Callable[[np.ndarray], np.ndarray]) -> Packing:
    count, width, depth = read_sizes(tensor)
    shape = packed_shape(kind, width, depth)
    return Packing(
        kind, (width, depth), lambda: _stack_experts(count, shape, map(one, _iterate_experts(tensor))), count
    )


def _iterate_experts(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """The weight [N, K] of one expert after the other, so that no float copy of all is held."""
    source = tensor if can_slice_lazily(tensor) else ir.tensor(tensor.numpy())
    return (part_of(source, 0, expert, expert + 1)[0] for expert in range(read_sizes(tensor)[0]))


def _stack_experts(count: int, shape: tuple[int, int], parts: Iterable[np.ndarray]) -> np.ndarray:
    """Packed experts, one below the other: no tile has outputs of two."""
    result = np.empty((count, *shape), np.uint8)
    for expert, part in enumerate(parts):
        result[expert] = part
    return result.reshape(count * shape[0], shape[1])

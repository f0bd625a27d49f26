"""Experts with the integers of a quantized checkpoint."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Together, lazy_weight
from specexport.passes.base import CountingPass, constant_of, sizes_of
from specexport.passes.block_weight import BlockWeight
from specexport.passes.experts_graph import CONTRIB, ExpertsSite, experts_sites, in_turn
from specexport.passes.quantize_experts import put_quantized, quantize_router
from specexport.passes.quantize_graph import pack_pairs
from specexport_runtime.errors import UnsupportedModelError

_HINT = "say how to quantize it anew: --quantize int8 or int4, or none for float weights."


class KeptExpertsPass(CountingPass):
    """Multiply by the integers that a quantized checkpoint has for its experts, as they are.

    ``com.microsoft.QMoE`` with the checkpoint's own codes, scales and, of 4 bits, zero points. Their router gets 8 bits
    in blocks, as for ``ExpertsQuantizePass`` and for its reasons. Counts the layers.

    Args:
        weights: by the name of a traced graph's weight: the experts' matrices one below the other.
    """

    name = "experts-keep"
    reason = "memory and quality: experts are not quantized a second time"

    def __init__(self, weights: Mapping[str, BlockWeight]) -> None:
        self._weights = weights

    def rewrite(self, model: ir.Model) -> int:
        """Replace every layer whose experts are kept.

        Raises:
            UnsupportedModelError: the kernel does not take them as they are.
        """
        graph = model.graph
        found = [site for site in experts_sites(model) if self._of(site)]
        for site in found:
            quantize_router(graph, site, self._weights)
            first, last = (self._kept(site, name) for name in ("gate_up", "down"))
            if first.form[:2] != last.form[:2]:
                raise UnsupportedModelError(f"{site.node.name} has experts of {first.form} and {last.form}.", _HINT)
            put_quantized(
                graph,
                site,
                _parts_of(graph, site, "gate_up", first),
                _parts_of(graph, site, "down", last),
                bits=first.form.bits,
                block=first.form.block,
            )
        if found:
            model.opset_imports.setdefault(CONTRIB, 1)
        for name, value in graph.initializers.items():
            tensor = constant_of(value)
            if name in self._weights and value.uses() and tensor is not None and len(sizes_of(tensor)) == 3:
                raise UnsupportedModelError(f"{name} cannot be kept as it is stored: no kernel takes it.", _HINT)
        return len(found)

    def _of(self, site: ExpertsSite) -> bool:
        return any(site.given[name].name in self._weights for name in ("gate_up", "down"))

    def _kept(self, site: ExpertsSite, name: str) -> BlockWeight:
        weight = self._weights.get(str(site.given[name].name))
        if weight is None or (weight.form.bits == 8 and weight.form.has_offsets) or weight.spread is not None:
            raise UnsupportedModelError(
                f"{site.given[name].name} cannot be kept: the kernel takes 4 bits, or 8 without offsets.",
                _HINT,
            )
        return weight


def _parts_of(graph: ir.Graph, site: ExpertsSite, name: str, weight: BlockWeight) -> list[ir.Value]:
    """See ``put_quantized``."""
    bits, block, has_offsets = weight.form
    experts, (rows, depth) = site.num_experts, weight.shape
    width, blocks = rows // experts, depth // block
    turn = name == "gate_up" and not site.node.attributes["interleaved"].as_int()
    made, start = Together(partial(_parts, weight, experts, turn)), f"{site.given[name].name}.kept"
    shapes = [
        (start, ir.DataType.UINT8, [experts, width, depth * bits // 8]),
        (f"{start}_scale", ir.DataType.FLOAT, [experts, width, blocks]),
        *([(f"{start}_zero", ir.DataType.UINT8, [experts, width, -(-blocks // 2)])] if has_offsets else []),
    ]
    return [
        lazy_weight(graph, part, dtype, shape, partial(made.part, index))
        for index, (part, dtype, shape) in enumerate(shapes)
    ]


def _parts(weight: BlockWeight, experts: int, turn: bool) -> list[np.ndarray]:
    """Codes, scales and zero points of all experts, rows in turn on request."""
    codes, scales, *offsets = weight.parts()
    found = [codes.reshape(len(codes), -1), scales]
    if offsets:  # offset = (middle - zero) * scale
        steps = np.divide(offsets[0], scales, out=np.zeros_like(scales), where=scales != 0)
        zeros = np.clip(weight.form.zero - np.rint(steps), 0, 15).astype(np.uint8)
        found.append(pack_pairs(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))))
    shaped = [part.reshape(experts, len(codes) // experts, -1) for part in found]
    return [in_turn(part) if turn else part for part in shaped]

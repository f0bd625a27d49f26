"""Experts with the integers of a quantized checkpoint."""

from collections.abc import Mapping

import onnx_ir as ir

from specexport.passes.base import CountingPass, constant_of, sizes_of
from specexport.passes.block_experts import of_floats, of_kept, put_experts, weight_of
from specexport.passes.block_linear import Packing
from specexport.passes.block_weight import BlockWeight
from specexport.passes.experts_graph import ExpertsSite, experts_sites
from specexport.passes.quantize_experts import quantize_router
from specexport.passes.transpose_fold import FOLDED
from specexport_runtime.errors import UnsupportedModelError


class KeptExpertsPass(CountingPass):
    """Multiply by the integers that a quantized checkpoint has for its experts, as they are.

    ``BlockExperts`` takes every format that ``BlockLinear`` takes; what a layer has in float stays float. Their router
    gets 8 bits in blocks, as for ``ExpertsQuantizePass`` and for its reasons. Counts the layers.
    """

    name = "experts-keep"
    reason = "memory and quality: experts are not quantized a second time"

    def __init__(self, weights: Mapping[str, BlockWeight]) -> None:
        self._weights = weights  # by name in the traced graph: the experts' matrices one below the other

    def rewrite(self, model: ir.Model) -> int:
        """Replace every layer whose experts are kept; UnsupportedModelError where such experts are no operator."""
        graph = model.graph
        found = [site for site in experts_sites(model) if self._of(site, "gate_up") or self._of(site, "down")]
        for site in found:
            quantize_router(graph, site, self._weights)
            put_experts(graph, site, self._packing(site, "gate_up"), self._packing(site, "down"))
        for name, value in graph.initializers.items():
            tensor = constant_of(value)
            if (
                name.removesuffix(FOLDED) in self._weights
                and value.uses()
                and tensor is not None
                and len(sizes_of(tensor)) == 3
            ):
                raise UnsupportedModelError(
                    f"{name} cannot be kept as it is stored: no kernel takes it.",
                    "say how to quantize it anew: --quantize int8 or int4, or none for float weights.",
                )
        return len(found)

    def _of(self, site: ExpertsSite, name: str) -> BlockWeight | None:
        return self._weights.get(str(site.given[name].name).removesuffix(FOLDED))

    def _packing(self, site: ExpertsSite, name: str) -> Packing:
        weight = self._of(site, name)
        return of_floats(weight_of(site, name)) if weight is None else of_kept(weight, site.num_experts)

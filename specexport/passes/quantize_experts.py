"""Experts with weights of 8 or 4 bits, and their routers with 8."""

from collections.abc import Collection

import onnx_ir as ir

from specexport.passes.base import CountingPass
from specexport.passes.block_experts import of_rounded, put_experts, weight_of
from specexport.passes.block_linear import of_blocks, put_linear
from specexport.passes.block_make import int8_weight
from specexport.passes.experts_graph import ExpertsSite, experts_sites
from specexport.passes.linear_pack import sources_of
from specexport.passes.quantize_sites import linear_site


class ExpertsQuantizePass(CountingPass):
    """Multiply by experts' weights in blocks of 32 inputs: ``BlockExperts``, whose rows are ``BlockLinear``'s.

    A router's own product gets 8 bits in blocks, however many the others have: it is small, and an error of it chooses
    another expert. Counts the layers.
    """

    name = "experts-quantize"
    reason = "experts are most of such a model's weights, and a step reads those that its tokens chose"

    def __init__(self, bits: int) -> None:
        self._bits = bits  # 8 or 4

    def rewrite(self, model: ir.Model) -> int:
        """Quantize every layer's experts."""
        sites = experts_sites(model)
        for site in sites:
            quantize_router(model.graph, site)
            packed = (of_rounded(weight_of(site, name), self._bits) for name in ("gate_up", "down"))
            put_experts(model.graph, site, *packed)
        return len(sites)


def quantize_router(graph: ir.Graph, site: ExpertsSite, kept: Collection[str] = ()) -> None:
    """Give the product that chooses a layer's experts 8 bits in blocks, unless ``kept`` names its weight."""
    for product in sources_of(site.given["expert_ids"]):
        router = linear_site(product)
        if router is None or router.weight.name in kept:
            continue
        put_linear(graph, router, of_blocks(int8_weight(router.tensor, turned=router.turned)))

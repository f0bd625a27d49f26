"""Linear layers, embeddings and experts with the integers of a quantized checkpoint."""

from collections.abc import Mapping

import onnx_ir as ir

from specexport.passes.base import CountingPass, Quantizing, find_constant, read_sizes
from specexport.passes.block_experts import get_expert_weight, pack_float_experts, pack_kept_experts, replace_experts
from specexport.passes.block_linear import Packing, pack_blocks, replace_linear, replace_lookup
from specexport.passes.block_weight import BlockWeight, join
from specexport.passes.experts_graph import ExpertsSite, experts_sites
from specexport.passes.linear_pack import PARTS
from specexport.passes.lm_head_cut import CUT
from specexport.passes.quantize_ort_cpu import is_lookup, quantize_router
from specexport.passes.quantize_sites import LinearSite, head_node, match_linear_site
from specexport.passes.transpose_fold import FOLDED
from specexport_runtime.bundle.quant_kinds import either
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Int32Array


def passes(given: Quantizing) -> list[CountingPass]:
    """The passes of a quantized checkpoint's weights."""
    kept = given.kept or {}
    return [KeptExpertsPass(kept), KeptWeightPass(kept, given.head_ids, lm_head=given.lm_head)]


class KeptWeightPass(CountingPass):
    """Multiply by the integers of a quantized checkpoint, as they are.

    ``BlockLinear`` with the checkpoint's own codes, scales and minima, as wide as they are stored. Embeddings are
    looked up in the same weight, of which a tied LM head has no copy. What the checkpoint holds in float stays float.
    Counts layers and lookups. Weights are by name in the traced graph. ``head_ids`` int32 [N] are the tokens that the
    LM head was cut to, None if it was not. Without ``lm_head`` the LM head and the embedding stay float.
    """

    name = "weight-keep"
    reason = "memory and quality: a quantized checkpoint is not quantized a second time"

    def __init__(
        self, weights: Mapping[str, BlockWeight], head_ids: Int32Array | None = None, *, lm_head: bool = True
    ) -> None:
        self._weights, self._head_ids, self._lm_head = weights, head_ids, lm_head

    def rewrite(self, model: ir.Model) -> int:
        """Replace every product and lookup of a kept weight."""
        graph, changes = model.graph, 0
        sites = {node: site for node in graph if (site := match_linear_site(node)) is not None}
        head = None if self._lm_head else head_node(model, set(sites))
        for node in list(graph):
            site = sites.get(node)
            if not self._lm_head and (node is head or is_lookup(node)):
                continue
            if site is not None and (weight := self._find_weight(site.weight, site)) is not None:
                replace_linear(graph, site, pack_blocks(weight))
                changes += 1
            elif is_lookup(node) and node.inputs[0] is not None and (table := self._find_weight(node.inputs[0], None)):
                replace_lookup(graph, node, pack_blocks(table))
                changes += 1
        return changes

    def _find_weight(self, value: ir.Value, site: LinearSite | None) -> BlockWeight | None:
        parts = [self._find_by_name(name) for name in value.meta.get(PARTS, [str(value.name)])]
        if not all(part is not None for part in parts):
            return None
        whole = join([part for part in parts if part is not None])
        wanted = None if site is None else (site.width, site.depth)
        return whole if wanted in (None, whole.shape) else None

    def _find_by_name(self, name: str) -> BlockWeight | None:
        cut = name.endswith(CUT)
        weight = self._weights.get(name.removesuffix(CUT).removesuffix(FOLDED))
        if weight is None or not cut:
            return weight
        return None if self._head_ids is None else weight.take(self._head_ids)


def kept_form(weights: Mapping[str, BlockWeight], name: str) -> object:
    """What layers must agree in to be joined; None for a float weight."""
    weight = weights.get(name.removesuffix(FOLDED))
    return None if weight is None else (weight.kind, weight.form)


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
        found = [
            site
            for site in experts_sites(model)
            if self._find_experts(site, "gate_up") or self._find_experts(site, "down")
        ]
        for site in found:
            quantize_router(graph, site, self._weights)
            replace_experts(graph, site, self._make_packing(site, "gate_up"), self._make_packing(site, "down"))
        for name, value in graph.initializers.items():
            tensor = find_constant(value)
            if (
                name.removesuffix(FOLDED) in self._weights
                and value.uses()
                and tensor is not None
                and len(read_sizes(tensor)) == 3
            ):
                raise UnsupportedModelError(
                    f"{name} cannot be kept as it is stored: no kernel takes it.",
                    f"say how to quantize it anew: --quantize {either()}, or none for float weights.",
                )
        return len(found)

    def _find_experts(self, site: ExpertsSite, name: str) -> BlockWeight | None:
        return self._weights.get(str(site.given[name].name).removesuffix(FOLDED))

    def _make_packing(self, site: ExpertsSite, name: str) -> Packing:
        weight = self._find_experts(site, name)
        return (
            pack_float_experts(get_expert_weight(site, name))
            if weight is None
            else pack_kept_experts(weight, site.num_experts)
        )

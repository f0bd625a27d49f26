"""Linear layers, routers, experts and embeddings rounded to blocks of integers, for our own operators for CPUs."""

from collections.abc import Collection

import onnx_ir as ir

from specexport.passes.base import CountingPass, Quantizing, find_constant
from specexport.passes.block_experts import get_expert_weight, pack_rounded_experts, replace_experts
from specexport.passes.block_linear import pack_blocks, replace_linear, replace_lookup
from specexport.passes.block_make import int4_weight, int8_weight
from specexport.passes.experts_graph import ExpertsSite, experts_sites
from specexport.passes.input_note import find_input_ranges
from specexport.passes.linear_pack import find_source_products
from specexport.passes.quantize_sites import LinearSite, find_sites, head_sites, linear_share, match_linear_site
from specexport_runtime.abi import INPUT_IDS

HEAD_SHARE = 0.3
"""Of the weights that a step reads: beside 4 bits, a larger LM head gets 4 too. 8 make a step read up to 1.17 times as
much."""
# Between the graph's token ids and the lookup; a draft head that fills blocks has entries without a token.
_ID_STEPS = {"Cast", "Clip", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


def passes(given: Quantizing) -> list[CountingPass]:
    """The passes of int8 and int4."""
    bits = given.kind.bits
    assert bits is not None  # noqa: S101 - the kinds that round
    return [ExpertsQuantizePass(bits), BlockQuantizePass(bits, lm_head=given.lm_head)]


class BlockQuantizePass(CountingPass):
    """Multiply by weights of 8 or 4 bits, in blocks of 32 inputs.

    ``BlockLinear`` rounds what a layer reads to 8 bits, block by block of each token, so that no token's result depends
    on the others of the step. 4 bits have a zero point a block, which loses less than a symmetric code; where inputs
    were measured, scales and zero points are searched for (``block_make.py``).

    Beside 4 bits two kinds of layers get 8. An LM head that is a small part of the model: four cost most of all there.
    And layers that read massive activations: in a few layers a channel of the first token is hundreds of times as large
    as any other (Sun et al. 2024, "Massive Activations in Large Language Models"), and all later tokens look at what
    becomes of it.

    With the LM head the embedding is taken too, in 8 bits: of one scale in both, one table serves both. Tables that are
    not read by the step's token ids (learned positions) stay float. Counts layers and lookups.
    """

    reason = "decoding reads every weight for every token: a quarter or an eighth of the bytes"

    def __init__(self, bits: int, *, lm_head: bool) -> None:
        self.name = f"int{bits}-quantize"
        self._bits, self._lm_head = bits, lm_head

    def rewrite(self, model: ir.Model) -> int:
        """Quantize the linear layers and the embedding; UnsupportedModelError as in ``find_sites``."""
        sites = find_sites(model, f"int{self._bits}", lm_head=self._lm_head)
        heads = [site.node for site in head_sites(model)]
        small_head = sum(linear_share(model, site) for site in head_sites(model)) <= HEAD_SHARE
        lookups = [node for node in model.graph if self._lm_head and is_lookup(node)]
        for site in sites:
            in_eight = self._bits == 8 or _is_massive(site) or (site.node in heads and small_head)
            inputs = find_input_ranges(site)
            importance = None if inputs is None else inputs.squares
            weight = (
                int8_weight(site.tensor, turned=site.turned)
                if in_eight
                else int4_weight(site.tensor, turned=site.turned, importance=importance)
            )
            replace_linear(model.graph, site, pack_blocks(weight))
        for node in lookups:
            tensor = find_constant(node.inputs[0])
            assert tensor is not None  # noqa: S101 - a lookup
            replace_lookup(model.graph, node, pack_blocks(int8_weight(tensor, turned=True)))
        return len(sites) + len(lookups)


def _is_massive(site: LinearSite) -> bool:
    inputs = find_input_ranges(site)
    return inputs is not None and inputs.massive


def is_lookup(node: ir.Node) -> bool:
    """Whether a node looks the step's tokens up in a float table."""
    if node.domain != "" or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    table, ids = find_constant(node.inputs[0]), node.inputs[1]
    if table is None or len(table.shape) != 2 or table.dtype != ir.DataType.FLOAT:
        return False
    while ids is not None and (producer := ids.producer()) is not None and producer.op_type in _ID_STEPS:
        ids = producer.inputs[0]
    return ids is not None and ids.is_graph_input() and ids.name == INPUT_IDS.name


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
            packed = (pack_rounded_experts(get_expert_weight(site, name), self._bits) for name in ("gate_up", "down"))
            replace_experts(model.graph, site, *packed)
        return len(sites)


def quantize_router(graph: ir.Graph, site: ExpertsSite, kept: Collection[str] = ()) -> None:
    """Give the product that chooses a layer's experts 8 bits in blocks, unless ``kept`` names its weight."""
    for product in find_source_products(site.given["expert_ids"]):
        router = match_linear_site(product)
        if router is None or router.weight.name in kept:
            continue
        replace_linear(graph, router, pack_blocks(int8_weight(router.tensor, turned=router.turned)))

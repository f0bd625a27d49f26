"""The experts of a graph's layers: where they are, how large, and what a token reads of them."""

from typing import NamedTuple

import onnx_ir as ir

from specexport.ops.spec import EACH, EXPERTS
from specexport.passes.base import find_constant, read_sizes
from specexport_runtime.bundle.entry import ExpertSizes
from specexport_runtime.errors import CheckFailedError

BLOCK_EXPERTS = "BlockExperts"
"""The operator for experts with packed weights; see ``block_experts.py``."""
SIZES = "specexport.experts"
"""Key of a node's ``meta`` that holds how large its experts are."""


class ExpertsSite(NamedTuple):
    """One ``specexport::Experts`` with constant weights."""

    node: ir.Node
    given: dict[str, ir.Value]  # inputs by name
    num_experts: int  # E
    per_token: int  # K, the experts of a token
    depth: int  # H, the size of a token
    width: int  # I, the inner width of an expert

    @property
    def sizes(self) -> ExpertSizes:
        """How much of a model they are."""
        matrices = 2 if self.node.attributes["interleaved"].as_int() == EACH else 3
        parameters = self.num_experts * matrices * self.depth * self.width
        return ExpertSizes(parameters, self.per_token, self.num_experts)


def experts_sites(model: ir.Model) -> list[ExpertsSite]:
    """All layers of experts, in graph order; CheckFailedError if weights are not constant or a size is not static."""
    nodes = (node for node in model.graph if node.domain == EXPERTS.domain and node.op_type == EXPERTS.name)
    return [_read_site(node) for node in nodes]


def expert_sizes(model: ir.Model) -> ExpertSizes | None:
    """How much of a model its experts are, by the layer that reads the largest share; None without experts."""
    sizes = [*(site.sizes for site in experts_sites(model)), *_list_kernel_sizes(model)]
    if not sizes:
        return None
    busiest = max(sizes, key=lambda each: each.per_token / each.per_layer)
    return busiest._replace(parameters=sum(each.parameters for each in sizes))


def _list_kernel_sizes(model: ir.Model) -> list[ExpertSizes]:
    """Of the layers whose experts were put in a kernel."""
    return [node.meta[SIZES] for node in model.graph if SIZES in node.meta]


def _read_site(node: ir.Node) -> ExpertsSite:
    names = [item.name for item in EXPERTS.inputs]
    given = {name: value for name, value in zip(names, node.inputs, strict=False) if value is not None}
    down, ids = find_constant(given["down"]), given["expert_ids"]
    per_token = None if ids.shape is None else ids.shape[1]
    if down is None or find_constant(given["gate_up"]) is None or not isinstance(per_token, int):
        raise CheckFailedError(f"{node.name}: the weights of experts, or how many a token has, are not constant.")
    num_experts, depth, width = read_sizes(down)
    return ExpertsSite(node, given, num_experts, per_token, depth, width)


def count_expert_weights_read(model: ir.Model) -> int:
    """Weights of experts, of all layers whose experts were put in a kernel, that a token reads."""
    return sum(each.parameters * each.per_token // each.per_layer for each in _list_kernel_sizes(model))

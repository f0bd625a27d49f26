"""Lowering of ``specexport::Experts`` for ONNX Runtime on the CPU: ``com.microsoft.MoE`` reads each expert once."""

from typing import TYPE_CHECKING

from specexport.passes.experts_graph import CONTRIB, experts_sites, gates_in_turn, put_experts

if TYPE_CHECKING:
    import onnx_ir as ir


def lower_experts(ir_model: "ir.Model") -> int:
    """Put the kernel in the place of each layer's experts, in place; those that are quantized have theirs.

    Returns:
        how many there were.

    Raises:
        CheckFailedError: the weights are not constant, or a size is not static.
    """
    graph, sites = ir_model.graph, experts_sites(ir_model)
    for site in sites:
        first = [gates_in_turn(graph, site, name) for name in ("gate_up", "gate_up_bias")]
        put_experts(graph, site, "MoE", [*first, site.given["down"], site.given.get("down_bias")])
        for name in ("gate_up", "gate_up_bias"):
            _drop(graph, site.given.get(name))
    if sites:
        ir_model.opset_imports.setdefault(CONTRIB, 1)
    return len(sites)


def _drop(graph: "ir.Graph", weight: "ir.Value | None") -> None:
    """A weight that nobody reads any more would be written all the same."""
    if weight is not None and not weight.uses() and weight.name in graph.initializers:
        del graph.initializers[str(weight.name)]

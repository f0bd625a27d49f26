"""What quantizing passes do to a graph in the same way."""

import onnx_ir as ir

from specexport.onnx_emit import Emitter
from specexport.passes.quantize_sites import LinearSite


def put_in_place(emit: Emitter, site: LinearSite, result: ir.Value) -> None:
    """Put a layer's product ``result``, which ``emit`` has emitted, and its bias in the place of the layer."""
    old = site.node.outputs[0]
    if site.bias is not None:
        result = emit.op("Add", result, site.bias)
    emit.place(before=site.node)
    name, result.shape = old.name, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    emit.graph.remove(site.node, safe=True)
    old.name = None
    result.name = name

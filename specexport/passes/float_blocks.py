"""Float linear layers and embeddings as our own operators for CPUs."""

import onnx_ir as ir

from specexport.onnx_emit import Emitter, part_of
from specexport.passes.base import CountingPass, find_constant, read_sizes
from specexport.passes.block_experts import replace_float_experts
from specexport.passes.block_linear import emit_block_linear, pack_floats, replace_linear, replace_lookup
from specexport.passes.quantize_ort_cpu import is_lookup
from specexport.passes.quantize_sites import match_linear_site


class FloatBlocksPass(CountingPass):
    """Multiply by float weights in the narrowest type that holds them exactly, and look tokens up in such.

    Most checkpoints are bfloat16: a step then reads half of what float32 is, and computes the same. Activations and
    sums are float32. Counts layers, lookups, and layers of experts.
    """

    name = "float-blocks"
    reason = "decoding reads every weight for every token, and no token's sum may depend on the others of its step"

    def rewrite(self, model: ir.Model) -> int:
        """Replace every product with constant matrices, every lookup of the step's tokens, and experts."""
        graph, changes = model.graph, replace_float_experts(model)
        for node in list(graph):
            site = match_linear_site(node)
            if site is not None:
                replace_linear(graph, site, pack_floats(site.tensor, turned=site.turned))
                changes += 1
            elif is_lookup(node):
                replace_lookup(graph, node, pack_floats(find_constant(node.inputs[0]), turned=True))  # type: ignore[arg-type]
                changes += 1
            elif node.op_type == "MatMul" and any(put(graph, node) for put in _OTHER_FORMS):
                changes += 1
        return changes


def _replace_transposed_product(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``W [N, K] @ x [..., K, T]``, as the steps of a state space are written."""
    weight, x = node.inputs
    tensor = find_constant(weight)
    if weight is None or tensor is None or len(tensor.shape) != 2 or x is None or x.shape is None or len(x.shape) < 2:
        return False
    emit, axes = Emitter(graph), list(range(len(x.shape)))
    perm = [*axes[:-2], axes[-1], axes[-2]]
    result = emit_block_linear(
        emit, emit.op("Transpose", x, perm=perm), str(weight.name), pack_floats(tensor, turned=True)
    )
    emit.replace(node, [emit.op("Transpose", result, perm=perm)])
    return True


def _replace_block_diagonal(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``x [B, T, K] @ W [B, K, N]``, a block-diagonal matrix, by a layer for each block."""
    x, weight = node.inputs
    tensor = find_constant(weight)
    if x is None or x.shape is None or weight is None or tensor is None or len(tensor.shape) != 3:
        return False
    count = read_sizes(tensor)[0]
    if len(x.shape) != 3 or x.shape[0] != count:
        return False
    emit = Emitter(graph)
    parts = emit.node("Split", [x], {"axis": 0, "num_outputs": count}, outputs=count).outputs
    each = [
        emit_block_linear(
            emit, part, f"{weight.name}.{at}", pack_floats(ir.tensor(part_of(tensor, 0, at, at + 1)[0]), turned=False)
        )
        for at, part in enumerate(parts)
    ]
    emit.replace(node, [emit.op("Concat", *each, axis=0)])
    return True


_OTHER_FORMS = (_replace_transposed_product, _replace_block_diagonal)
"""Products that are none of a linear layer's usual form."""

"""Passes that tidy a graph: constants fold, norms come together, equal things are there once, unread ones go."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import lazy_weight, part_of
from specexport.passes.base import CountingPass, find_constant, fold_readers_into, read_sizes

_LARGE = 1024  # elements
_MAX_ROUNDS = 6  # a simplified reshape can make another shape constant

# Rules of onnxscript, by name. Those with several outputs are left out: matching them is quadratic in the graph.
_RULES = (
    "add_0_rule",
    "sub_0_rule",
    "mul_by_1_rule",
    "div_by_1_rule",
    "cast_cast_rule",
    "no_op_cast_rule",
    "no_op_expand_rule",
    "no_op_transpose_rule",
    "transpose_transpose_rule",
    "unsqueeze_unsqueeze_rule",
    "squeeze_reshape_1d_rule",
    "reshape_reshape_rule",
    "materialize_reshape_shape_rule",
    "collapse_slice_rule",
    "collapse_slice2_rule",
    "cast_constant_of_shape_rule",
    "no_op_dynamic_scatter_nd_rule",
    "no_op_static_scatter_nd_rule",
)


class ConstantFoldPass(CountingPass):
    """Replace small constant subgraphs, never weights, inline helpers, drop no-ops; counts nodes that went."""

    name = "constant-fold"
    reason = "the shape arithmetic of the trace is known by now and need not run on every step"

    def rewrite(self, model: ir.Model) -> int:
        """Inline, fold and simplify, then keep every constant as an initializer."""
        import onnx_ir.passes.common as common_passes
        from onnxscript import optimizer
        from onnxscript.rewriter import RewritePass
        from onnxscript.rewriter.rules import common as rules

        common_passes.InlinePass()(model)
        before = len(model.graph)
        simplify = RewritePass([getattr(rules, name) for name in _RULES])
        for _ in range(_MAX_ROUNDS):
            nodes = len(model.graph)
            optimizer.fold_constants(
                model, onnx_shape_inference=True, input_size_limit=_LARGE, should_fold=_should_fold
            )
            simplify(model)
            common_passes.RemoveUnusedNodesPass()(model)
            if len(model.graph) == nodes:
                break
        tidy: list[ir.passes.PassBase] = [
            common_passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common_passes.RemoveUnusedOpsetsPass(),
            common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common_passes.CommonSubexpressionEliminationPass(),
            common_passes.NameFixPass(),
        ]
        for step in tidy:
            step(model)
        return max(0, before - len(model.graph))


def _should_fold(node: ir.Node) -> bool | None:
    """False for a node that reads a large constant or casts a matrix, None to leave the decision to the folder.

    A matrix that a model multiplies in float32 on purpose (a router's) stays stored in the model's dtype, of any size.
    """
    tensors = [tensor for tensor in map(find_constant, node.inputs) if tensor is not None]
    matrix_cast = node.op_type == "Cast" and any(len(tensor.shape) > 1 for tensor in tensors)
    return False if matrix_cast or any(tensor.size > _LARGE for tensor in tensors) else None


class OperatorFusePass(CountingPass):
    """Replace the pieces of a norm or a rotary embedding by opset 23's RMSNormalization and RotaryEmbedding."""

    name = "operator-fuse"
    reason = "one kernel where the trace has ten: fewer launches and no intermediate tensors"

    def rewrite(self, model: ir.Model) -> int:
        """Fuse wherever the pattern fits exactly."""
        from onnxscript.rewriter import onnx_fusions

        counts: dict[str, int] = onnx_fusions.fuse(model)
        return sum(counts.values())


_SAMPLES = 512
_ROWS = 4  # beside the last one
_CHUNK = 1 << 22  # elements hashed at a time
_Key = Callable[[ir.TensorProtocol], object]


class WeightDeduplicatePass(CountingPass):
    """Make readers of equal weights share one, hashed where a sparse sample agrees; counts those gone."""

    name = "weight-deduplicate"
    reason = "tied embeddings and repeated buffers are stored and mapped once"

    def rewrite(self, model: ir.Model) -> int:
        """Redirect the readers of each copy to the first of its equals."""
        initializers = model.graph.initializers
        outputs = set(model.graph.outputs)
        values = [v for v in initializers.values() if v.const_value is not None and v not in outputs]
        removed = 0
        for alike in _group(values, _sample_key):
            for kept, *copies in _group(alike, _content_key):
                for copy in copies:
                    ir.convenience.replace_all_uses_with(copy, kept)
                    del initializers[str(copy.name)]
                    removed += 1
        return removed


def _group(values: Iterable[ir.Value], key: _Key) -> list[list[ir.Value]]:
    """Groups of at least two values with equal keys, in order."""
    groups: dict[object, list[ir.Value]] = defaultdict(list)
    for value in values:
        tensor = value.const_value
        assert tensor is not None  # noqa: S101 - filtered by the caller
        groups[key(tensor)].append(value)
    return [group for group in groups.values() if len(group) > 1]


def _sample_key(tensor: ir.TensorProtocol) -> object:
    sizes = read_sizes(tensor)
    count = sizes[0] if sizes else 0
    rows = sorted({*range(0, count, max(1, count // _ROWS)), count - 1}) if count else []
    return (
        tensor.dtype,
        tuple(sizes),
        b"".join(_bytes(part_of(tensor, 0, row, row + 1)[..., :_SAMPLES]) for row in rows),
    )


def _content_key(tensor: ir.TensorProtocol) -> object:
    sizes = read_sizes(tensor)
    if not sizes:
        return _bytes(tensor.numpy())
    digest, step = hashlib.sha256(), max(1, _CHUNK // max(1, math.prod(sizes[1:])))
    for start in range(0, sizes[0], step):
        digest.update(_bytes(part_of(tensor, 0, start, min(start + step, sizes[0]))))
    return digest.digest()


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


class SelectFoldPass(CountingPass):
    """Fold Gather nodes that take one fixed entry of a stack of weights, as experts in a loop do; counts them."""

    name = "select-fold"
    reason = "a layer taken out of a stack of weights is packed and multiplied like any other"

    def rewrite(self, model: ir.Model) -> int:
        """Fold the readers of every such stack."""
        folded = 0
        for weight in list(model.graph.initializers.values()):
            tensor = find_constant(weight)
            readers = [use.node for use in weight.uses()]
            chosen = [_find_taken_entry(node, weight) for node in readers]
            if not readers or tensor is None or len(tensor.shape) != 3 or None in chosen:
                continue
            count, *shape = read_sizes(tensor)
            for node, entry in zip(readers, chosen, strict=True):
                number = int(entry or 0) % count
                part, name = partial(_part, tensor, number), f"{tensor.name}.{number}"
                fold_readers_into(model, weight, [node], lazy_weight(model.graph, name, tensor.dtype, shape, part=part))
            folded += len(readers)
        return folded


def _find_taken_entry(node: ir.Node, weight: ir.Value) -> int | None:
    """Which entry along the first axis a node takes; None if it does something else."""
    if node.op_type != "Gather" or node.domain != "" or node.inputs[0] is not weight:
        return None
    index = find_constant(node.inputs[1])
    if index is None or index.shape.rank() or node.attributes.get_int("axis", 0) or node.outputs[0].is_graph_output():
        return None
    return int(index.numpy())


def _part(tensor: ir.TensorProtocol, entry: int, axis: int, start: int, stop: int) -> np.ndarray:
    where = slice(start, stop)
    found: np.ndarray = part_of(tensor, 0, entry, entry + 1)[0][where if axis == 0 else (slice(None), where)]
    return found


class NodeDeduplicatePass(CountingPass):
    """Merge nodes with equal operator, inputs and attributes. Counts the nodes that went away."""

    name = "node-deduplicate"
    reason = "the trace computes the rotary tables (cosine, sine) again in every layer"

    def rewrite(self, model: ir.Model) -> int:
        """Merge equal nodes."""
        import onnx_ir.passes.common as common_passes

        before = len(model.graph)
        common_passes.CommonSubexpressionEliminationPass()(model)
        return before - len(model.graph)


class WeightRemovePass(CountingPass):
    """Remove nodes whose results are not read, then the weights that only they read. Counts weights."""

    name = "weight-remove"
    reason = "a weight without readers would be written, mapped and hashed for nothing"

    def rewrite(self, model: ir.Model) -> int:
        """Remove unused nodes and initializers; graph inputs and outputs stay."""
        from onnxscript import optimizer

        before = len(model.graph.initializers)
        inputs = list(model.graph.inputs)
        optimizer.remove_unused_nodes(model)
        unused = [name for name, value in model.graph.initializers.items() if not value.uses() and value not in inputs]
        for name in unused:
            del model.graph.initializers[name]
        return before - len(model.graph.initializers)

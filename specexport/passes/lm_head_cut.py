"""A draft's LM head with the rows of some tokens only."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import lazy_weight, part_of
from specexport.passes.base import CountingPass, find_constant, read_sizes
from specexport.passes.quantize_sites import LinearSite, match_linear_site
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Int32Array

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Clip", "Identity", "Neg"}
CUT = ".cut"
"""What is added to the name of a weight that was cut."""

_CUTS_BATCH = {"Squeeze", "Gather"}


class LmHeadCutPass(CountingPass):
    """Keep the LM head's rows of ``ids``, in their order; a tied embedding stays whole. Counts the weights cut."""

    name = "lm-head-cut"
    reason = "a draft need not be able to say everything, and its LM head is the largest product of a step"

    def __init__(self, ids: Int32Array) -> None:
        self._ids = ids  # int32 [N], ascending

    def rewrite(self, model: ir.Model) -> int:
        """Cut the head; UnsupportedModelError if more than elementwise nodes lie between it and the logits."""
        behind, head = _find_head(model)
        width = head.width
        changes = 1
        _replace_with_cut(model, head.node, 1, self._ids, axis=0 if head.turned else 1)
        if len(head.node.inputs) > 2 and head.node.inputs[2] is not None:
            changes += self._cut_row(model, head.node, 2, width)
        for node in behind:
            changes += sum(self._cut_row(model, node, index, width) for index in range(len(node.inputs)))
        for node in (head.node, *behind):
            (value,) = node.outputs
            if value.shape is not None:
                value.shape = ir.Shape([*list(value.shape)[:-1], len(self._ids)])
        return changes

    def _cut_row(self, model: ir.Model, node: ir.Node, index: int, width: int) -> int:
        """Cut an input that has a value for each token id; 1 if it has."""
        tensor = find_constant(node.inputs[index])
        if tensor is None or not len(tensor.shape) or tensor.shape[-1] != width:
            return 0
        _replace_with_cut(model, node, index, self._ids, axis=len(tensor.shape) - 1)
        return 1


def _replace_with_cut(model: ir.Model, node: ir.Node, index: int, ids: Int32Array, *, axis: int) -> None:
    """Give ``node`` a cut copy of a weight in the place of the whole one, which others may read."""
    value = node.inputs[index]
    tensor = find_constant(value)
    assert value is not None and tensor is not None  # noqa: PT018, S101 - the caller has looked
    shape = read_sizes(tensor)
    shape[axis] = len(ids)
    cut = lazy_weight(model.graph, f"{value.name}{CUT}", tensor.dtype, shape, part=partial(_part, tensor, ids, axis))
    node.replace_input_with(index, cut)


def _part(tensor: ir.TensorProtocol, ids: Int32Array, cut: int, axis: int, start: int, stop: int) -> np.ndarray:
    if axis != cut:
        return np.take(part_of(tensor, axis, start, stop), ids, axis=cut)
    first, last = int(ids[start]), int(ids[stop - 1]) + 1
    return np.take(part_of(tensor, axis, first, last), ids[start:stop] - first, axis=axis)


def _find_head(model: ir.Model) -> tuple[list[ir.Node], LinearSite]:
    """The LM head, and the nodes between it and the logits."""
    behind: list[ir.Node] = []
    value: ir.Value | None = next(value for value in model.graph.outputs if value.name == LOGITS.name)
    while value is not None and (node := value.producer()) is not None:
        site = match_linear_site(node)
        if site is not None:
            return behind, site
        computed = [x for x in node.inputs if x is not None and find_constant(x) is None]
        first = node.op_type in _CUTS_BATCH and node.inputs[0] in computed and node.attributes.get_int("axis", 0) == 0
        if not (node.op_type in _ELEMENTWISE or first) or len(computed) != 1:
            break
        behind.append(node)
        value = computed[0]
    raise UnsupportedModelError(
        "draft_vocab_size was given, and this draft's LM head cannot be cut: its logits are no linear layer with "
        "elementwise operations after it.",
        "leave out --draft-vocab-size, or take another draft.",
    )

"""The base of all passes: an in-place ``onnx_ir`` pass that counts what it changed."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from specexport.ops.spec import RECURRENCES
from specexport.passes.block_weight import BlockWeight
from specexport_runtime.abi import OP_DOMAIN, OP_NAME
from specexport_runtime.bundle.quant_kinds import BackendPasses, QuantKind
from specexport_runtime.executors.base import Int32Array

AS_STORED = "specexport.round_scales"
"""Marks a weight that is as its checkpoint has it, whatever the model's dtype is."""


class CountingPass(ir.passes.InPlacePass):
    """A pass with a name, a reason and a count.

    Attributes:
        name: short name for reports and dumps.
        reason: why the pass is in the list.
        changes: things changed by the last call.
    """

    name: str
    reason: str
    changes: int = 0

    @abstractmethod
    def rewrite(self, model: ir.Model) -> int:
        """Change ``model`` in place; returns how many things were changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run ``rewrite`` and keep its count (called by the pass infrastructure)."""
        self.changes = self.rewrite(model)
        return ir.passes.PassResult(model, modified=self.changes > 0)


class Rewrite(CountingPass):
    """A pass of one function, which changes a model in place and returns how many things it changed."""

    def __init__(self, name: str, reason: str, function: Callable[[ir.Model], int]) -> None:
        self.name, self.reason, self._function = name, reason, function

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        return self._function(model)


class Quantizing(NamedTuple):
    """What the passes of a kind of quantization are made from; ``passes`` of ``form.module`` makes them."""

    kind: QuantKind
    form: BackendPasses  # the kind on the backend that is built for
    lm_head: bool = True  # take the LM head too, and on ort-cpu the embedding
    kept: Mapping[str, BlockWeight] | None = None  # a quantized checkpoint's weights by name in the traced graph
    head_ids: Int32Array | None = None  # token ids that the LM head was cut to, int32 [N]; None if it was not


def attention_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The ``UnpaddedAttention`` nodes of a traced model, in graph order."""
    return (node for node in model.graph if node.op_type == OP_NAME and node.domain == OP_DOMAIN)


def find_constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor after an initializer; None for anything else."""
    if value is None or not value.is_initializer():
        return None
    return value.const_value


def fold_readers_into(model: ir.Model, weight: ir.Value, readers: Sequence[ir.Node], made: ir.Value) -> None:
    """Let ``made`` stand for what ``readers`` make of a weight, which goes where nobody else reads it."""
    for node in readers:
        ir.convenience.replace_all_uses_with(node.outputs[0], made)
        model.graph.remove(node, safe=True)
    if not weight.uses():
        del model.graph.initializers[str(weight.name)]


def read_sizes(tensor: ir.TensorProtocol) -> list[int]:
    """The sizes of a weight, as numbers; a lazy one is not made for that."""
    return [int(str(size)) for size in tensor.shape]


def recurrence_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The recurrences of a traced model, in their order."""
    kinds = {spec.name for spec in RECURRENCES}
    return (node for node in model.graph if node.domain == OP_DOMAIN and node.op_type in kinds)

"""Layers of a TensorRT graph that can compute no token at all: drafts leave them out, over the same weights and caches.

TensorRT builds no ``If`` beside fused attention. But an engine may be built for sizes of zero, and then no kernel of a
layer is left. So these layers compute the first tokens of the residual stream, as many as the input ``skip_tokens`` has
values: all or none, as a profile fixes. In a prefill profile, whose sizes are open, the cuts are copies.

Fused attention has no kernel for sizes that may be zero: which layers are left out is decided in the build.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from specexport.lowering.trt_step import AlignedStep, add_step_input, emit_masks
from specexport.onnx_emit import Emitter
from specexport.ops.spec import DIM_NAMES
from specexport_runtime.abi import SKIP_SLOTS, SKIP_TOKENS
from specexport_runtime.errors import CheckFailedError, UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

    from specexport.passes.residual_blocks import ResidualBlock

_FIX = "build it without --self-draft."
_KEEP_SHAPE = {"Cast", "Cos", "Identity", "Sin"}


class Extent(NamedTuple):
    """What the layers compute that drafts leave out; see the module."""

    tokens: "ir.Value"  # int64 [1]: T, or 0
    step: AlignedStep  # what these layers need of the step, cut to ``tokens``


def add_extent(ir_model: "ir.Model", step: AlignedStep, kv_capacity: int, before: "ir.Node") -> Extent:
    """Add the inputs ``skip_tokens`` and ``skip_slots``, and in front of a node what follows from their sizes."""
    import onnx_ir as ir

    emit = Emitter(ir_model.graph, "extent")
    tokens, slots = (emit.op("Shape", add_step_input(ir_model, spec)) for spec in (SKIP_TOKENS, SKIP_SLOTS))
    tile = _first(emit, step.tile, slots, 1)
    by_name = {value.name: value for value in ir_model.graph.inputs}
    cut = step._replace(
        cu=emit.op("Min", step.cu, emit.cast(tokens, ir.DataType.INT32)),  # an update has no more tokens than that
        tile=tile,
        untile=_first(emit, step.untile, tokens, 0),
        # Not cut from the others: TensorRT-RTX 1.7 fails where several layers read a mask that was cut.
        masks=emit_masks(emit, by_name, tile, sorted(step.masks), kv_capacity, step.fold),
    )
    emit.place(before=before)
    return Extent(tokens, cut)


def shorten_blocks(ir_model: "ir.Model", blocks: "Sequence[ResidualBlock]", extent: Extent) -> None:
    """Let blocks compute the first tokens only, in place; CheckFailedError if one was joined with its outside."""
    from specexport.passes.residual_blocks import Dataflow, Obstacle

    for block in reversed(blocks):  # a block's residual is the value before it until that block is shortened too
        try:
            flow = Dataflow(ir_model.graph)
            branch, region = flow.branch_of(block)
        except Obstacle as obstacle:
            raise CheckFailedError(f"the lowered graph has no clean layers: {obstacle}.") from obstacle
        _shorten(ir_model, block, branch, region, extent)


def _shorten(
    ir_model: "ir.Model", block: "ResidualBlock", branch: "ir.Value", region: "Sequence[ir.Node]", extent: Extent
) -> None:
    import onnx_ir as ir

    add = block.total.producer()
    assert add is not None  # noqa: S101 - branch_of has seen it
    where = f"layer {block.layer}'s {block.kind}"
    made = {value for node in region for value in node.outputs}
    done = {*extent.step.masks.values(), *(value for value in extent.step if isinstance(value, ir.Value))}
    emit = Emitter(ir_model.graph, f"extent.{block.layer}.{block.kind}")
    cut: dict[ir.Value, ir.Value] = {}
    for node in region:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            raise UnsupportedModelError(f"{where} has subgraphs, which cannot be left out of a draft.", _FIX)
        for at, value in enumerate(node.inputs):
            if value is None or value in made or value in done or value.const_value is not None:
                continue
            if value not in cut:
                axis = _token_axis(value, where)
                cut[value] = value if axis is None else _first(emit, value, extent.tokens, axis)
            node.replace_input_with(at, cut[value])
    axis = _token_axis(block.residual, where)
    if axis is None:
        raise CheckFailedError(f"{where} adds to a stream without tokens.", _FIX)
    first = cut[block.residual]
    end, rest = emit.const([2**31 - 1]), emit.const([axis])
    passed = emit.op("Slice", block.residual, extent.tokens, end, rest)
    emit.place(before=region[0])
    total = emit.op("Concat", emit.op("Add", first, branch), passed, axis=axis)
    total.type, total.shape = block.total.type, block.total.shape
    emit.place(after=add)
    ir.convenience.replace_all_uses_with(block.total, total)
    ir_model.graph.remove(add, safe=True)


def _first(emit: Emitter, value: "ir.Value", count: "ir.Value", axis: int) -> "ir.Value":
    """The first ``count`` (int64 [1]) entries of ``value`` along an axis."""
    return emit.op("Slice", value, emit.const([0]), count, emit.const([axis]))


def _token_axis(value: "ir.Value", where: str) -> int | None:
    """Which dimension of a value are the tokens of the step; None if none is."""
    known = value
    while known.shape is None:  # passes leave the shapes of some rotary angles open
        producer = known.producer()
        source = None if producer is None or producer.op_type not in _KEEP_SHAPE else producer.inputs[0]
        if source is None:
            raise CheckFailedError(f"{where} reads {value.name}, whose shape is not known.", _FIX)
        known = source
    axes = [axis for axis, size in enumerate(known.shape) if str(size) == DIM_NAMES["T"]]
    return axes[0] if axes else None

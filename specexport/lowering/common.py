"""What several lowerings ask of a graph or do to it: causality, ALiBi, types of norms, token ids, step inputs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specexport.onnx_emit import Emitter
from specexport.ops.spec import UNPADDED_ATTENTION
from specexport.passes.base import CountingPass, Rewrite
from specexport_runtime.abi import (
    ADAPTER_IDS,
    ALIGNED_STEP_INPUTS,
    FEATURE_INPUTS,
    GATE_INPUTS,
    LOGITS,
    PADDED_STEP_INPUTS,
    PARENTS,
    STATE_STEPS,
    TOKEN_IDS,
)
from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

CAUSAL_ATTRIBUTE = "causal"

_SLOPES = [item.name for item in UNPADDED_ATTENTION.inputs].index("slopes")

_LARGE = 3.0e38  # below the largest float32; no sum of logits comes near it


def is_causal(node: "ir.Node") -> bool:
    """Whether each token of an ``UnpaddedAttention`` node sees nothing after itself."""
    return bool(node.attributes.get_int(CAUSAL_ATTRIBUTE, 1))


def require_causal(node: "ir.Node", backend: str) -> None:
    """Refuse a node whose tokens see later ones, where a backend has causal attention only: UnsupportedModelError."""
    if not is_causal(node):
        raise UnsupportedModelError(
            f"{node.name}: tokens of this attention see later ones, and {backend} has causal attention only.",
            "build it for `ort-cpu`, or for TensorRT without `--lowering plugin`.",
        )


def get_slopes(node: "ir.Node") -> "ir.Value | None":
    """The slopes of an ``UnpaddedAttention`` node, float32 [num_heads]; None where it has no position bias."""
    return node.inputs[_SLOPES] if len(node.inputs) > _SLOPES else None


def refuse_slopes(node: "ir.Node", backend: str) -> None:
    """Refuse a node with slopes, whose position bias a backend would leave out: UnsupportedModelError."""
    if get_slopes(node) is not None:
        raise UnsupportedModelError(
            f"{node.name}: this attention has ALiBi slopes, which {backend} does not compute.",
            "build for `ort-cpu`.",
        )


def replace_value(ir_model: "ir.Model", old: "ir.Value", new: "ir.Value") -> None:
    """Readers of ``old``, and the graph output that it is, now get ``new``, under its name if it is an output."""
    import onnx_ir as ir

    outputs = ir_model.graph.outputs
    if old in outputs:
        outputs[outputs.index(old)] = new
        new.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new)


def value_like(value: "ir.Value", name: str) -> "ir.Value":
    """A value of the same type and shape."""
    import onnx_ir as ir

    return ir.Value(name=name, shape=value.shape, type=value.type)


def unify_norm_types(ir_model: "ir.Model") -> int:
    """Cast the input of every RMSNormalization to the dtype of its scale, in place; returns how many there were.

    Gemma and OLMo 2 multiply by a float32 weight before they go back to half precision, for which ONNX Runtime 1.31 has
    no kernel: it makes an invalid graph of it. The cast is exact.
    """
    mixed = [
        node
        for node in ir_model.graph
        if node.op_type == "RMSNormalization" and len({value.dtype for value in node.inputs if value is not None}) > 1
    ]
    for node in mixed:
        given, scale = node.inputs[0], node.inputs[1]
        if given is None or scale is None or scale.dtype is None:
            continue
        emit = Emitter(ir_model.graph)
        exact = emit.cast(given, scale.dtype)
        exact.shape = given.shape
        emit.place(before=node)
        node.replace_input_with(0, exact)
    return len(mixed)


def norm_type_pass() -> CountingPass:
    """:func:`unify_norm_types` as a pass of a lowering."""
    return Rewrite(
        "norm-types", "a norm's float32 weight must not be rounded to the dtype of its input", unify_norm_types
    )


def widen_top_k(ir_model: "ir.Model") -> int:
    """Let ``TopK`` of bfloat16 (none before opset 24) choose among float32 values, exactly; how many there were."""
    import onnx_ir as ir

    top_k = [node for node in ir_model.graph if node.op_type == "TopK"]
    narrow = [(node, given) for node in top_k if (given := node.inputs[0]) and given.dtype == ir.DataType.BFLOAT16]
    for node, given in narrow:
        emit = Emitter(ir_model.graph)
        inputs = [emit.cast(given, ir.DataType.FLOAT), *node.inputs[1:]]
        wide = emit.node("TopK", inputs, node.attributes, outputs=2, name=node.name)
        emit.replace(node, [emit.cast(wide.outputs[0], ir.DataType.BFLOAT16), wide.outputs[1]])
    return len(narrow)


def add_token_ids(ir_model: "ir.Model") -> None:
    """Add the output ``token_ids`` int64 [R]: argmax of each row of ``logits``, -1 where its sum is NaN or inf."""
    import onnx_ir as ir

    logits = next(value for value in ir_model.graph.outputs if value.name == LOGITS.name)
    emit = Emitter(ir_model.graph, "greedy")
    best = emit.op("ArgMax", logits, axis=1, keepdims=0)
    total = emit.op("Abs", emit.op("ReduceSum", logits, emit.const([1]), keepdims=0))
    finite = emit.op("Less", total, emit.const(_LARGE, "float32"))
    chosen = emit.op("Where", finite, best, emit.const(-1))
    chosen.name = TOKEN_IDS.name
    chosen.shape = ir.Shape([None if logits.shape is None else logits.shape[0]])
    emit.place()
    ir_model.graph.outputs.append(chosen)


def step_inputs(ir_model: "ir.Model") -> tuple[str, ...]:
    """Names of the step inputs that a lowered graph takes, in the contract's order."""
    present = {value.name for value in ir_model.graph.inputs}
    gates = (*GATE_INPUTS, *FEATURE_INPUTS, ADAPTER_IDS, PARENTS, STATE_STEPS)
    specs = (*PADDED_STEP_INPUTS, *ALIGNED_STEP_INPUTS, *gates)
    names = dict.fromkeys(spec.name for spec in specs)
    return tuple(name for name in names if name in present)


def select_fusions(done: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Of what the passes of a lowering did, what they fused."""
    return tuple((name, changes) for name, changes in done.items() if name.endswith("-fuse"))


def drop_unused_step_inputs(ir_model: "ir.Model") -> tuple[str, ...]:
    """Remove step inputs without readers from the graph's inputs; returns their names."""
    step_names = {spec.name for spec in (*PADDED_STEP_INPUTS, *ALIGNED_STEP_INPUTS)}
    graph = ir_model.graph
    unused = [x for x in graph.inputs if x.name in step_names and not x.uses()]
    for value in unused:
        graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)

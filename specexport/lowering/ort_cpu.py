"""Lowering for ONNX Runtime on the CPU: model-local functions, inlined when a session loads the model.

A ``Scan`` over cache rows runs one batch-1 attention a row, because the fused kernel refuses several new tokens with a
past for more than one row. The caches enter and leave the Scan in the graph's own shape: any reshape around it would
copy them. Each row reads, writes and attends to exactly its own tokens; where every row fills the attention tile, the
packed tokens are the tile already and nothing is cut. What depends on the step alone is computed once, at the top.

Two bodies: the fused ``com.microsoft.GroupQueryAttention``, and a portable one from standard operators for what that
kernel cannot do (values of another size than keys, head sizes that are no multiple of 8, tokens that see later ones).
Either comes in a second form for padded-KV graphs, with a mask made from ``kv_positions``.
"""

from typing import TYPE_CHECKING, NamedTuple

from specexport.lowering.causal import CAUSAL_ATTRIBUTE, is_causal
from specexport.lowering.experts import lower_experts
from specexport.lowering.functions import (
    PAIR_OUTPUTS,
    PLAN_OUTPUTS,
    attention_text,
    fused_row,
    fused_takes,
    mask_text,
    parse_function,
    plan_outputs,
    plan_text,
)
from specexport.lowering.fuse import ROTARY_ATTRIBUTE, packed_qkv, remove_dead_nodes, rotary_kind
from specexport.lowering.int8_kv import has_int8_caches
from specexport.lowering.portable import portable_row
from specexport.lowering.recurrence import lower_recurrences
from specexport.lowering.shared_kv import appends, lower_shared_kv
from specexport.lowering.slopes import slopes_of
from specexport.lowering.step_inputs import drop_unused_step_inputs
from specexport.lowering.value_by_value import make_value_by_value
from specexport.onnx_emit import Emitter, add_input
from specexport.ops.spec import DIM_NAMES, UNPADDED_ATTENTION
from specexport_runtime.abi import (
    KV_POSITIONS,
    LONGEST_WHOLE,
    OP_DOMAIN,
    OP_NAME,
    LayerGeometry,
)
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
_ROUNDING = {"BlockLinear", "QMoE"}
_PLAN_NAME = "RowPlan"
_MASK_NAME = "KvMask"
_STEP = ("row_starts", "row_ends", "row_totals", "pad_index", "unpad_index", *PLAN_OUTPUTS)
_SHARED = ("k_cache", "v_cache", *_STEP)


class Body(NamedTuple):
    """Which function a node needs: nodes with the same body share one function.

    Attributes:
        sinks: the node has attention sinks.
        window: the body compares entries with a window (the fused kernel and the mask do it themselves).
        softcap: the body caps its scores (the same).
        masked: which entries count is told by a mask, not by order.
        rotary: ``"half"`` or ``"interleaved"``: the kernel rotates q and k; empty if it does not.
        packed: q, k and v come as one tensor.
        paired: a row with one token runs it twice.
        int8_kv: the caches hold int8.
        causal: a token sees nothing behind it.
        slopes: scores are biased by distance.
        num_heads: query heads (0 for the fused kernel, which has them as an attribute).
        geometry: cache sizes that the portable body has as constants.
    """

    sinks: bool
    window: bool
    softcap: bool
    masked: bool = False
    rotary: str = ""
    packed: bool = False
    paired: bool = False
    int8_kv: bool = False
    causal: bool = True
    slopes: bool = False
    num_heads: int = 0
    geometry: LayerGeometry | None = None

    @property
    def function_name(self) -> str:
        """Name of the function, in the op's domain."""
        parts = (
            ("Sinks", self.sinks),
            ("Window", self.window),
            ("Softcap", self.softcap),
            ("Masked", self.masked),
            ("Rotary" + self.rotary.capitalize(), bool(self.rotary)),
            ("Packed", self.packed),
            ("Paired", self.paired),
            ("Int8Kv", self.int8_kv),
            ("WholeRow", not self.causal),
            ("Slopes", self.slopes),
        )
        kind = "Fused" if self.geometry is None else "Portable" + "x".join(map(str, (self.num_heads, *self.geometry)))
        return OP_NAME + kind + "".join(name for name, given in parts if given)

    @property
    def fused(self) -> bool:
        """The fused kernel, or the portable body."""
        return self.geometry is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the function, in order."""
        given = {
            ("qkv",): self.packed,
            ("q", "k", "v"): not self.packed,
            _SHARED: True,
            PAIR_OUTPUTS: self.paired,
            ("row_sizes", "kv_mask"): self.masked,
            ("sinks",): self.sinks,
            ("slopes",): self.slopes and not self.masked,
            ("cos_table", "sin_table"): bool(self.rotary),
            ("k_scale", "v_scale"): self.int8_kv,
        }
        return tuple(name for names, wanted in given.items() if wanted for name in names)


def choose_body(node: "ir.Node", *, masked: bool = False) -> Body:
    """The body for one ``UnpaddedAttention`` node.

    Args:
        node: the node.
        masked: for a padded-KV graph.

    Raises:
        CheckFailedError: the caches have no static head sizes, or it is for a mask and not causal.
    """
    causal = is_causal(node)
    if masked and not causal:
        raise CheckFailedError(f"{node.name}: a padded-KV graph has causal attention only.")
    given = named_inputs(node)
    k_dim, v_dim = head_dim(node, given["k_cache"]), head_dim(node, given["v_cache"])
    sinks, slopes = given.get("sinks") is not None, slopes_of(node) is not None
    if causal and fused_takes(k_dim, v_dim):
        rotary = rotary_kind(node)
        packed = not masked and packed_qkv(node) is not None
        body = Body(sinks=sinks, window=False, softcap=False, masked=masked, rotary=rotary, packed=packed)
        return body._replace(int8_kv=has_int8_caches(node), slopes=slopes)
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    return Body(
        sinks=sinks,
        window=_window(node) > 0 and not masked,
        softcap=node.attributes["softcap"].as_float() > 0,
        masked=masked,
        causal=causal,
        slopes=slopes,
        num_heads=heads,
        geometry=LayerGeometry(kv_heads, k_dim, v_dim),
    )


def named_inputs(node: "ir.Node") -> dict[str, "ir.Value | None"]:
    """Inputs of an ``UnpaddedAttention`` node by name, those of fusions with them; absent ones may be missing."""
    names = [*(item.name for item in UNPADDED_ATTENTION.inputs), "cos_table", "sin_table", "k_scale", "v_scale"]
    return dict(zip(names, node.inputs, strict=False))


def head_dim(node: "ir.Node", cache: "ir.Value | None") -> int:
    """Size of a head (D) of a cache.

    Raises:
        CheckFailedError: it is not static.
    """
    size = None if cache is None or cache.shape is None else cache.shape[4]
    if not isinstance(size, int):
        raise CheckFailedError(f"{node.name}: the caches have no static head size.")
    return size


def _window(node: "ir.Node") -> int:
    return node.attributes["window"].as_int()


def build_function(body: Body, opset: int) -> "ir.Function":
    """The model-local function of ``body``."""
    if body.geometry is None:
        added = {"sinks": body.sinks, "masked": body.masked, "slopes": body.slopes}
        row = fused_row(**added, rotary=body.rotary, int8_kv=body.int8_kv)
    else:
        kinds = {"sinks": body.sinks, "window": body.window, "softcap": body.softcap}
        kinds |= {"masked": body.masked, "causal": body.causal, "slopes": body.slopes}
        row = portable_row(body.num_heads, body.geometry, **kinds)
    parts = ("qkv",) if body.fused else ("q", "k", "v")
    inputs = ", ".join(body.inputs)
    kinds = {"masked": body.masked, "packed": body.packed, "paired": body.paired, "int8_kv": body.int8_kv}
    text = attention_text(body.function_name, inputs, parts=parts, row=row, **kinds)
    return parse_function(text, opset)


def lower_ort_cpu(ir_model: "ir.Model", *, padded_kv: bool = False) -> None:
    """Attach the bodies and drop the step inputs that no body reads, in place.

    Args:
        ir_model: the traced model.
        padded_kv: make the padded-KV graph, with the step input ``kv_positions``.
    """
    lower_recurrences(ir_model)
    lower_experts(ir_model)
    make_value_by_value(ir_model)
    nodes = [n for n in ir_model.graph if n.op_type == OP_NAME and n.domain == OP_DOMAIN]
    if not nodes:  # heads without attention, and models of recurrences alone
        drop_unused_step_inputs(ir_model)
        return
    if not all(map(appends, nodes)):
        lower_shared_kv(ir_model, nodes)
        return
    # Quantized activations turn a difference of rounding into one of a whole step: there, results must not depend on
    # how many tokens a row has. (In padded-KV graphs, which are for comparison, they do.)
    # Over int8 caches they never do.
    # Nor do they where a token sees those behind it: it would see itself twice.
    rounded = any(node.op_type in _ROUNDING for node in ir_model.graph)
    paired = rounded and not padded_kv and not all(map(has_int8_caches, nodes)) and all(map(is_causal, nodes))
    masks = {_mask_name(node): (_window(node), slopes_of(node)) for node in nodes} if padded_kv else {}
    longest = max(head_dim(node, named_inputs(node)["k_cache"]) for node in nodes)
    shared = _prologue(ir_model, masks, paired=paired, tiled=paired and longest <= LONGEST_WHOLE)
    for node in nodes:
        body = choose_body(node, masked=padded_kv)._replace(paired=paired)
        given = named_inputs(node) | shared | {"qkv": packed_qkv(node)}
        if padded_kv:
            given["kv_mask"] = shared[_mask_name(node)]
        function = build_function(body, ir_model.opset_imports[""])
        ir_model.functions.setdefault(function.identifier(), function)
        _replace_node(ir_model, node, function.name, [given[name] for name in body.inputs])
    ir_model.opset_imports.setdefault(_CONTRIB, 1)
    remove_dead_nodes(ir_model)  # what a packed tensor was split by
    drop_unused_step_inputs(ir_model)


def _mask_name(node: "ir.Node") -> str:
    slopes = slopes_of(node)
    return f"kv_mask.{_window(node)}" + ("" if slopes is None else f".{slopes.name}")


def _prologue(
    ir_model: "ir.Model", masks: "dict[str, tuple[int, ir.Value | None]]", *, paired: bool, tiled: bool
) -> dict[str, "ir.Value | None"]:
    """Insert what is computed once a step at the top; returns it by name. ``masks``: window and slopes of each."""
    import onnx_ir as ir

    graph, opset = ir_model.graph, ir_model.opset_imports[""]
    if masks:
        shape = [DIM_NAMES.get(word, word) if isinstance(word, str) else word for word in KV_POSITIONS.shape]
        add_input(graph, KV_POSITIONS.name, ir.DataType.INT64, shape)
    by_name: dict[str, ir.Value | None] = {str(value.name): value for value in graph.inputs}
    masked = bool(masks)
    plan = plan_text(_PLAN_NAME, masked=masked, paired=paired, tiled=tiled)
    calls: list[tuple[str, dict[str, int], tuple[str, ...]]] = [(plan, {}, plan_outputs(masked=masked, paired=paired))]
    for mask, (window, slopes) in sorted(masks.items()):
        name = _MASK_NAME + ("Window" if window > 0 else "") + ("" if slopes is None else "Slopes")
        attributes = {"window": window} if window > 0 else {}
        calls.append((mask_text(name, window=window > 0, slopes=slopes is not None), attributes, (mask,)))
    emit = Emitter(graph)
    made: dict[str, ir.Value | None] = {}
    for text, attributes, names in calls:
        function = parse_function(text, opset)
        ir_model.functions.setdefault(function.identifier(), function)
        known = by_name | made | ({"slopes": masks[names[0]][1]} if names[0] in masks else {})
        inputs = [known.get(str(value.name)) for value in function.inputs]
        node = emit.node(function.name, inputs, attributes, outputs=len(names), domain=OP_DOMAIN)
        for value, name in zip(node.outputs, names, strict=True):
            value.name = name
            made[name] = value
    emit.place(before=graph[0])
    return made


def _replace_node(ir_model: "ir.Model", node: "ir.Node", op_type: str, inputs: list["ir.Value | None"]) -> None:
    width = node.attributes["num_heads"].as_int() * head_dim(node, named_inputs(node)["v_cache"])
    told = (ROTARY_ATTRIBUTE, CAUSAL_ATTRIBUTE)  # by the function's name
    kept = {name: attribute for name, attribute in node.attributes.items() if name not in told}
    emit = Emitter(ir_model.graph)
    attributes = {**kept, "out_shape": [-1, width]}
    emit.replace(node, emit.node(op_type, inputs, attributes, outputs=3, domain=OP_DOMAIN, name=node.name).outputs)

"""Lowering of the recurrences for ONNX Runtime on the CPU: model-local functions over its own kernels.

A ``Scan`` over cache rows runs each row by itself. ``com.microsoft.LinearAttention`` works through
its tokens one after another, so that a token has the same bits in a step of any width; once up to the last token that
is for good, which leaves the state in place, and once more after it for drafts, whose state is not kept.

Inputs and outputs of a row share memory. So what is written to it is made of copies: of ``x`` and ``seen`` below.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specexport.onnx_emit import Emitter
from specexport.ops.spec import LINEAR_ATTENTION, RECURRENCES, OpSpec
from specexport_runtime.abi import OP_DOMAIN
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
_HEADER = '<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>\n'

# One row: `all` is what waits and what is new; the first `border` of it are for good.
_FUNCTION = """{name}{attributes}({inputs}) => (output, state_out, pending_out) {{
{pack}
  rows, state_out, pending_out = Scan<num_scan_inputs = 4, body = one_row (
      int64[4] row_steps, int64[1] row_start, float[1, {state}] row_state, float[1, S, {width}] row_pending
  ) => (float[1, Q, {out_width}] row_out, float[1, {state}] row_state_out, float[1, S, {width}] row_pending_out) {{
    zero = Constant<value_ints = [0]>()
    token_axis = Constant<value_ints = [1]>()
    settled, drafts, certain, drafted = Split<axis = 0, num_outputs = 4>(row_steps)
    waiting = Add(settled, drafts)
    new = Add(certain, drafted)
    row_end = Add(row_start, new)
    own = Slice(x, row_start, row_end, zero)
    own3 = Unsqueeze(own, zero)
    kept = Slice(row_pending, zero, waiting, token_axis)
    all = Concat<axis = 1>(kept, own3)
    size = Add(waiting, new)
    border = Add(settled, certain)
{row}
    mine = Slice(results, first_own, last_own, token_axis)
    width = Shape<start = 2, end = 3>(pad_index)
    short = Sub(width, new)
    pads = Concat<axis = 0>(zero, zero, zero, zero, short, zero)
    row_out = Pad(mine, pads)
    left = Add(drafts, drafted)
    slots = Shape<start = 1, end = 2>(row_pending)
    unused = Slice(row_pending, left, slots, token_axis)
    row_pending_out = Concat<axis = 1>(rest, unused)
  }}>(state_steps, row_starts, state, pending)
  tile = Constant<value_ints: ints = @out_shape>()
  slots_of_all = Reshape(rows, tile)
  output = Gather<axis = 0>(slots_of_all, unpad_index)
}}"""

_KERNEL = """com.microsoft.LinearAttention<q_num_heads: int = @num_heads, kv_num_heads: int = @kv_num_heads,
      scale: float = @scale, update_rule = "{rule}">"""

_ATTEND = """    first = Slice(all, zero, border, token_axis)
    rest = Slice(all, border, size, token_axis)
    sizes = Constant<value_ints: ints = @sizes>()
    {first_parts} = Split<axis = 2>(first, sizes)
    settled_out, row_state_out = {kernel}(first_q, first_k, first_v, row_state{first_gates})
    any_draft = Greater(size, border)
    has_drafts = Squeeze(any_draft)
    draft_out = If<then_branch = drafts_follow () => (float[1, D, {out_width}] followed) {{
      {rest_parts} = Split<axis = 2>(rest, sizes)
      followed, dropped = {kernel}(rest_q, rest_k, rest_v, row_state_out{rest_gates})
    }}, else_branch = no_drafts () => (float[1, D, {out_width}] nothing) {{
      nothing = Slice(settled_out, zero, zero, token_axis)
    }}>(has_drafts)
    results = Concat<axis = 1>(settled_out, draft_out)
    first_own = Identity(waiting)
    last_own = Identity(size)"""

_CONVOLVE = """    seen = Concat<axis = 1>(row_state, all)
    results, unread = com.microsoft.CausalConvWithState<ndim = 1, channels_last = 1, activation = "{activation}"
    >(seen, weight{bias})
    before = Shape<start = 1, end = 2>(row_state)
    state_end = Add(border, before)
    row_state_out = Slice(seen, border, state_end, token_axis)
    last_own = Add(before, size)
    rest = Slice(seen, state_end, last_own, token_axis)
    first_own = Add(before, waiting)"""


def lower_recurrences(ir_model: "ir.Model") -> int:
    """Put functions over ONNX Runtime's kernels in the place of the recurrences, in place; returns how many."""
    specs = {spec.name: spec for spec in RECURRENCES}
    nodes = [node for node in ir_model.graph if node.domain == OP_DOMAIN and node.op_type in specs]
    for node in nodes:
        spec = specs[node.op_type]
        given = dict(zip((item.name for item in spec.inputs), node.inputs, strict=False))
        present = [item.name for item in spec.inputs if given.get(item.name) is not None]
        names = [name for name in present if name != "cu_new_tokens"]
        text, attributes = _format_function(spec, node, given, names)
        function = _parse_function(text, ir_model.opset_imports[""])
        ir_model.functions.setdefault(function.identifier(), function)
        emit = Emitter(ir_model.graph)
        inputs = [given[name] for name in names]
        made = emit.node(function.name, inputs, attributes, outputs=3, domain=OP_DOMAIN, name=node.name)
        emit.replace(node, made.outputs)
    if nodes:
        ir_model.opset_imports.setdefault(_CONTRIB, 1)
    return len(nodes)


def _parse_function(text: str, opset: int) -> "ir.Function":
    """A function of the op's domain: a program that nests and reads values around it by name reads best as text."""
    import onnx_ir as ir
    from onnx import parser

    function: ir.Function = ir.from_proto(parser.parse_function(_HEADER.format(domain=OP_DOMAIN, opset=opset) + text))
    return function


def _format_function(
    spec: OpSpec, node: "ir.Node", given: "dict[str, ir.Value | None]", names: list[str]
) -> "tuple[str, dict[str, Any]]":
    """The function of one node, and its attributes. Sizes are numbers in it: symbols would mean the same everywhere."""
    parts = [name for name in ("x", "q", "k", "v", "decay", "beta") if name in names]
    sizes = [_size(node, given[name], 1) for name in parts]
    out_width = _size(node, given["v" if spec is LINEAR_ATTENTION else "x"], 1)
    whole = given["state"]
    rank = 0 if whole is None or whole.shape is None else len(whole.shape)
    state = [_size(node, whole, axis) for axis in range(2, rank)]
    numbers = {"state": ", ".join(map(str, state)), "width": sum(sizes), "out_width": out_width}
    attributes: dict[str, Any] = {"out_shape": [-1, out_width]}
    pack = ""
    if spec is LINEAR_ATTENTION:
        row, kind = _format_attention_row(parts, out_width)
        heads = {name: node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")}
        attributes |= {**heads, "scale": node.attributes["scale"].as_float(), "sizes": sizes}
        pack, kind = f"  x = Concat<axis = 1>({', '.join(parts)})", kind + f"{heads['num_heads']}x"
    else:
        silu, bias = bool(node.attributes["silu"].as_int()), "bias" in names
        row = _CONVOLVE.format(activation="silu" if silu else "none", bias=", bias" if bias else "")
        kind = "Silu" * silu + "Bias" * bias
    text = _FUNCTION.format(
        name=f"{spec.name}{kind}{'x'.join(map(str, state))}Of{sum(sizes)}",
        attributes=f"<{', '.join(attributes)}>",
        inputs=", ".join(names),
        pack=pack,
        row=row,
        **numbers,
    )
    return text, attributes


def _format_attention_row(parts: Sequence[str], out_width: int) -> tuple[str, str]:
    """One row of linear attention, and the kernel's name for what it does."""
    rule = {(): "linear", ("decay",): "gated", ("beta",): "delta"}.get(tuple(parts[3:]), "gated_delta")
    named = {
        f"{when}_{what}": ", ".join(f"{when}_{name}" if name in parts else "" for name in group).rstrip(", ")
        for when in ("first", "rest")
        for what, group in (("parts", parts), ("gates", ("decay", "beta")))
    }
    gates = {name: f", {value}" if value else "" for name, value in named.items() if name.endswith("gates")}
    kernel = _KERNEL.format(rule=rule)
    return _ATTEND.format(kernel=kernel, out_width=out_width, **named | gates), rule.title().replace("_", "")


def _size(node: "ir.Node", value: "ir.Value | None", axis: int) -> int:
    size = None if value is None or value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise CheckFailedError(f"{node.name}: a size of a recurrence is not static.")
    return size

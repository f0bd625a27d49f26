"""Model-local functions that the CPU lowering attaches, as ONNX text.

``RowPlan`` and ``KvMask`` run once a step, at the top of the graph; the attention functions run once a layer.

Everything else is written with ``specexport.onnx_emit.Emitter``. These bodies are text because they are programs, not
nodes among others: they nest (a Scan inside each branch of an If), read values from around them by name, and refer to
attributes of the function itself (``@scale``). As text they read like what they compute, and onnx checks that they
parse. ``parse_function`` is the only reader.
"""

import json
from typing import TYPE_CHECKING

from specexport.lowering.slopes import row_bias
from specexport_runtime.abi import OP_DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

_HEADER = '<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>\n'

_PLAN = """{name}(row_starts, row_ends, row_totals, pad_index, unpad_index)
  => ({outputs}) {{
  one = Constant<value_int = 1>()
  one32 = Cast<to = 6>(one)
{totals}
  row_lasts = Sub(run_totals, one32)
  tile = Shape(pad_index)
  rest = Constant<value_ints = [-1]>()
  tile_shape = Concat<axis = 0>(tile, rest)
  num_slots = Size(pad_index)
  num_tokens = Size(unpad_index)
{full}
}}"""
PLAN_OUTPUTS = ("row_lasts", "run_totals", "tile_shape", "full")
PAIR_OUTPUTS = ("pair_counts", "pair_slots", "own_slots")
_TOTALS = "  run_totals = Identity(row_totals)"
# A kernel for one query adds up in another order than those for several, so a row with one token runs it twice (the
# second entry is never committed): its result is then, bit for bit, that of the same token in a longer step.
_PAIRED_TOTALS = """  two = Constant<value_int = 2>()
  counts = Sub(row_ends, row_starts)
{pair_counts}
  added = Sub(pair_counts, counts)
  added32 = Cast<to = 6>(added)
  run_totals = Add(row_totals, added32)
  zero = Constant<value_int = 0>()
  width = Shape<start = 2, end = 3>(pad_index)
  width0 = Squeeze(width)
{pair_width}
  pair_range = Range(zero, pair_width, one)
  last_slot = Sub(width0, one)
  pair_slots = Min(pair_range, last_slot)
  own_slots = Range(zero, width0, one)"""
_PAIR = "  {paired} = Max({count}, two)"
# Flash attention takes as many queries at once as keys and values have elements, at least 16, and the last one may be
# left alone: a row that is longer gets an even number.
_EVEN = """  {count}_paired = Max({count}, two)
  {count}_odd = Mod({count}_paired, two)
  {count}_longer = Greater({count}_paired, sixteen)
  {count}_one_more = Cast<to = 7>({count}_longer)
  {count}_added = Mul({count}_odd, {count}_one_more)
  {paired} = Add({count}_paired, {count}_added)"""
_PAIRED = {"pair_counts": "counts", "pair_width": "width0"}
_SIXTEEN = "  sixteen = Constant<value_int = 16>()\n"
PADDED_PLAN_OUTPUTS = (*PLAN_OUTPUTS, "row_sizes", "mask_width")
_FULL = "  full = Equal(num_slots, num_tokens)"
# The fused kernel wants a mask as wide as the row is long: rows of one length can take it as it is.
_FULL_PADDED = """  every_slot = Equal(num_slots, num_tokens)
  longest = ReduceMax<keepdims = 0>(row_totals)
  shortest = ReduceMin<keepdims = 0>(row_totals)
  one_length = Equal(longest, shortest)
  full = And(every_slot, one_length)
  totals = Cast<to = 7>(row_totals)
  row_counts = Sub(row_ends, row_starts)
  row_sizes = Concat<axis = 1>(row_counts, totals)
  longest64 = Cast<to = 7>(longest)
  whole = Constant<value_ints = [1]>()
  mask_width = Reshape(longest64, whole)"""

# Comparisons over [B, 1, 1, Q, P] are the cost here: padding is told apart on [B, P], before them.
_MASK = """{name}{attributes}(positions, kv_positions, pad_index, mask_width{slopes}) => (kv_mask) {{
  nothing = Constant<value_int = 0>()
  never = Constant<value_int = 4611686018427387904>()
  start = Constant<value_ints = [0]>()
  entry_axis = Constant<value_ints = [2]>()
  used = Slice(kv_positions, start, mask_width, entry_axis)
  is_padding = Less(used, nothing)
  entry_at = Where(is_padding, never, used)
  entry_axes = Constant<value_ints = [1, 2]>()
  entries = Unsqueeze(entry_at, entry_axes)
  query_at = Gather<axis = 0>(positions, pad_index)
  query_axes = Constant<value_ints = [1, 4]>()
  queries = Unsqueeze(query_at, query_axes)
  {seen}
  zero = Constant<value_float = 0.0>()
  hidden = Constant<value_float = -1.0e30>()
{bias}  kv_mask = Where(seen, {shown}, hidden)
}}"""
_MASK_BIAS = """  gaps = Sub(entries, queries)
  distances = Cast<to = 1>(gaps)
  slope_shape = Constant<value_ints = [1, 1, -1, 1, 1]>()
  slope_heads = Reshape(slopes, slope_shape)
  bias = Mul(slope_heads, distances)
"""
_CAUSAL = "seen = LessOrEqual(entries, queries)"
_CAUSAL_WINDOW = """causal = LessOrEqual(entries, queries)
  size = Constant<value_int: int = @window>()
  before = Sub(queries, size)
  inside = Greater(entries, before)
  seen = And(causal, inside)"""

# Gather needs one index a slot: padding slots repeat the last token of the row, and nobody reads them. They are made
# once a layer and not at the top, because steps without ragged rows would pay for them too.
_ATTENTION = """{name}<num_heads, kv_num_heads, scale, window, softcap, out_shape>({inputs})
  => (output, k_cache_out, v_cache_out) {{
{pack}  output, k_cache_out, v_cache_out = If<then_branch = all_rows_full () => (
      float[T, HqDv] full_output, {cache}[B, 1, H, L, D] full_k, {cache}[B, 1, H, L, Dv] full_v) {{
    {tiles}
    full_out, full_k, full_v = Scan<num_scan_inputs = {num_full}, body = full_row (
        {full_inputs}, {cache}[1, H, L, D] row_k_cache, {cache}[1, H, L, Dv] row_v_cache, int32[1] row_last,
        int32[1] row_total{mask_input}
    ) => (float[1, Q, HqDv] attended, {cache}[1, H, L, D] row_k_out, {cache}[1, H, L, Dv] row_v_out) {{
{full_row}
    }}>({full_names}, k_cache, v_cache, row_lasts, run_totals{mask_name})
    full_shape = Constant<value_ints: ints = @out_shape>()
    {full_cut}
    full_output = Reshape(full_own, full_shape)
  }}, else_branch = ragged_rows () => (
      float[T, HqDv] ragged_output, {cache}[B, 1, H, L, D] ragged_k, {cache}[B, 1, H, L, Dv] ragged_v) {{
    front = Constant<value_ints = [0]>()
    token_axis = Constant<value_ints = [1]>()
    {tokens}
    first = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    width = Shape<start = 2, end = 3>(pad_index)
    width0 = Squeeze(width)
    tile_slots = Range(first, width0, one)
    counts = Sub(row_ends, row_starts)
    last_slots = Sub(counts, one)
    row_slots = Min(tile_slots, last_slots)
    ragged_out, ragged_k, ragged_v = Scan<num_scan_inputs = {num_ragged}, body = ragged_row (
        int64[1] row_start, int64[1] row_end, int64[Q] row_slot, {cache}[1, H, L, D] row_k_cache,
        {cache}[1, H, L, Dv] row_v_cache, int32[1] row_last, int32[1] row_total{pair_input}{ragged_mask_input}
    ) => (float[1, Q, HqDv] row_out, {cache}[1, H, L, D] row_k_out, {cache}[1, H, L, Dv] row_v_out) {{
      {slices}
{ragged_row}
      row_out = Gather<axis = 1>(attended, row_slot)
    }}>(row_starts, row_ends, row_slots, k_cache, v_cache, row_lasts, run_totals{pair_name}{ragged_mask_name})
    ragged_shape = Constant<value_ints: ints = @out_shape>()
    ragged_tile = Reshape(ragged_out, ragged_shape)
    ragged_output = Gather<axis = 0>(ragged_tile, unpad_index)
  }}>(full)
}}"""

_MASK_SLICE = """
      mask_start = Constant<value_ints = [0, 0]>()
      mask_axes = Constant<value_ints = [2, 3]>()
      row_mask = Slice(row_mask_tile, mask_start, row_size, mask_axes)"""

INT8_KV_ATTRIBUTES: dict[str, int | float | str] = {
    "k_quant_type": "PER_CHANNEL",
    "v_quant_type": "PER_CHANNEL",
    "kv_cache_bit_width": 8,
}
"""What tells the fused kernel that its caches hold int8."""
_FUSED_HEAD_MULTIPLE = 8
FUSED_ROW = """
      attended, row_k_out, row_v_out = com.microsoft.GroupQueryAttention<
          num_heads: int = @num_heads, kv_num_heads: int = @kv_num_heads, scale: float = @scale,
          local_window_size{window}, softcap: float = @softcap{rotary}{kv}
      >(row_qkv, , , row_k_cache, row_v_cache, row_last, row_total{rest})"""


def parse_function(text: str, opset: int) -> "ir.Function":
    """A function of the op's domain.

    Args:
        text: name, attributes, inputs, outputs and body, as the functions below make it.
        opset: of the standard operators in it.
    """
    import onnx_ir as ir
    from onnx import parser

    head = _HEADER.format(domain=OP_DOMAIN, opset=opset)
    function: ir.Function = ir.from_proto(parser.parse_function(head + text))
    return function


def plan_text(name: str, *, masked: bool, paired: bool = False, tiled: bool = False) -> str:
    """What the attention functions share: last entries, slots, sizes, and whether every row fills the tile.

    Args:
        name: the function's name.
        masked: for a padded-KV graph.
        paired: no token of a row is attended alone.
        tiled: likewise, by a kernel that attends some tokens of a row at a time.
    """
    outputs = plan_outputs(masked=masked, paired=paired)
    pair, before = (_EVEN, _SIXTEEN) if tiled else (_PAIR, "")
    counts = {what: pair.format(paired=what, count=count) for what, count in _PAIRED.items()}
    totals = before + _PAIRED_TOTALS.format(**counts) if paired else _TOTALS
    full = _FULL_PADDED if masked else _FULL
    return _PLAN.format(name=name, outputs=", ".join(outputs), totals=totals, full=full)


def plan_outputs(*, masked: bool, paired: bool) -> tuple[str, ...]:
    """Outputs of :func:`plan_text`, in order."""
    return (*(PADDED_PLAN_OUTPUTS if masked else PLAN_OUTPUTS), *(PAIR_OUTPUTS if paired else ()))


def mask_text(name: str, *, window: bool, slopes: bool = False) -> str:
    """The additive mask [B, 1, 1, Q, longest row] of a padded-KV graph, from positions of tokens and cache entries.

    Hidden entries get a large finite number: a query that sees nothing must not become NaN. With ``slopes``, which it
    reads then, the mask is that of each head, [B, 1, Hq, Q, longest row], and seen entries get their bias.
    """
    attributes, seen = ("<window>", _CAUSAL_WINDOW) if window else ("", _CAUSAL)
    bias = {"slopes": ", slopes", "bias": _MASK_BIAS, "shown": "bias"}
    return _MASK.format(
        name=name, attributes=attributes, seen=seen, **(bias if slopes else {"slopes": "", "bias": "", "shown": "zero"})
    )


def fused_takes(k_dim: int, v_dim: int) -> bool:
    """Whether the fused kernel takes heads of these sizes."""
    return k_dim == v_dim and k_dim % _FUSED_HEAD_MULTIPLE == 0


def fused_row(*, sinks: bool, masked: bool, slopes: bool = False, rotary: str = "", int8_kv: bool = False) -> str:
    """One row by the fused kernel. The mask holds the window where there is one: windows count positions then.

    Args:
        sinks: one more score a head.
        masked: add ``row_mask`` to the scores.
        slopes: bias the scores by distance, where no mask has that in it.
        rotary: ``"half"`` or ``"interleaved"``: rotate q and k by ``cos_table`` and ``sin_table``; empty: they are.
        int8_kv: the caches hold int8, with the scales ``k_scale`` and ``v_scale`` of each channel.
    """
    # The kernel's inputs go on with cos_cache, sin_cache, position_ids, attention_bias, head_sink, k_scale, v_scale.
    rest = ["cos_table", "sin_table"] if rotary else ["", ""]
    rest += ["", "row_mask" if masked or slopes else "", "sinks" if sinks else ""]
    rest += ["k_scale", "v_scale"] if int8_kv else []
    while rest and not rest[-1]:
        rest.pop()
    kind = f", do_rotary = 1, rotary_interleaved = {int(rotary == 'interleaved')}" if rotary else ""
    window = "= -1" if masked else ": int = @window"
    kv = "".join(f", {name} = {json.dumps(value)}" for name, value in INT8_KV_ATTRIBUTES.items()) if int8_kv else ""
    text = FUSED_ROW.format(window=window, rotary=kind, kv=kv, rest="".join(f", {name}" for name in rest))
    return (row_bias("row_qkv") if slopes and not masked else "") + text


def attention_text(
    name: str,
    inputs: str,
    *,
    parts: tuple[str, ...],
    row: str,
    masked: bool,
    packed: bool = False,
    paired: bool = False,
    int8_kv: bool = False,
) -> str:
    """One layer: append and attention of every row.

    A step in which every row fills the attention tile (plain decoding, one sequence alone) runs on the packed tokens as
    they are. In any other, each row is cut out by its first and last token, so that it writes and attends to exactly
    its own tokens; only its output is widened to Q, because a Scan stacks equal shapes.

    Args:
        name: the function's name.
        inputs: its inputs.
        parts: token tensors that a row reads: ``("qkv",)`` or ``("q", "k", "v")``.
        row: text of one row, from ``row_<part>`` to ``attended``, ``row_k_out`` and ``row_v_out``.
        masked: rows read ``row_mask``, from ``kv_mask``.
        packed: the input ``qkv`` [1, T, W] is there already.
        paired: a row with one token runs it twice, so that its result does not depend on the length of the step.
        int8_kv: the caches hold int8.
    """
    tile = "whole_{0} = Reshape({0}, tile_shape)\n    tile_{0} = Gather<axis = 2>(whole_{0}, pair_slots)"
    cut = (
        "own_{0} = Slice(tokens_{0}, row_start, row_end, token_axis)\n      "
        "twice_{0} = Concat<axis = 1>(own_{0}, own_{0})\n      "
        "row_{0} = Slice(twice_{0}, front, pair_count, token_axis)"
    )
    if not paired:
        tile, cut = "tile_{0} = Reshape({0}, tile_shape)", "row_{0} = Slice(tokens_{0}, row_start, row_end, token_axis)"
    return _ATTENTION.format(
        name=name,
        cache="int8" if int8_kv else "float",
        inputs=inputs,
        pack="  qkv = Concat<axis = 1>(q, k, v)\n" if parts == ("qkv",) and not packed else "",
        tiles="\n    ".join(tile.format(part) for part in parts),
        full_cut="full_own = Gather<axis = 2>(full_out, own_slots)" if paired else "full_own = Identity(full_out)",
        pair_input=", int64[1] pair_count" if paired else "",
        pair_name=", pair_counts" if paired else "",
        num_full=len(parts) + 4 + masked,
        full_inputs=", ".join(f"float[1, Q, W_{part}] row_{part}" for part in parts),
        full_names=", ".join(f"tile_{part}" for part in parts),
        full_row=row,
        mask_input=", float[1, G, Q, P] row_mask" if masked else "",
        mask_name=", kv_mask" if masked else "",
        tokens="tokens_qkv = Identity(qkv)"
        if packed
        else "\n    ".join(f"tokens_{part} = Unsqueeze({part}, front)" for part in parts),
        num_ragged=7 + paired + 2 * masked,
        slices="\n      ".join(cut.format(part) for part in parts),
        ragged_row=(_MASK_SLICE if masked else "") + row,
        ragged_mask_input=", int64[2] row_size, float[1, G, Q, P] row_mask_tile" if masked else "",
        ragged_mask_name=", row_sizes, kv_mask" if masked else "",
    )

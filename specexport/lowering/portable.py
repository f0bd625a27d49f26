"""The portable attention of one cache row, from standard ONNX operators.

Written as the body of the Scans in ``functions``: ScatterND appends in place where input and output share memory, and a
Slice to the row's true length keeps the cost independent of the capacity.
"""

from specexport.lowering.slopes import row_bias
from specexport_runtime.abi import LayerGeometry

# Index triples (batch, head, entry) of the new entries: a constant for the heads plus the entries' own numbers.
_APPEND = """
    zero = Constant<value_ints = [0]>()
    unit = Constant<value_ints = [1]>()
    scalar0 = Constant<value_int = 0>()
    scalar1 = Constant<value_int = 1>()
    new = Shape<start = 1, end = 2>(row_q)
    total = Cast<to = 7>(row_total)
    past = Sub(total, new)
    past0 = Squeeze(past)
    total0 = Squeeze(total)
    at = Range(past0, total0, scalar1)
    at_column = Unsqueeze(at, unit)
    k_split = Constant<value_ints = [-1, {heads}, {k_dim}]>()
    v_split = Constant<value_ints = [-1, {heads}, {v_dim}]>()
    k3 = Reshape(row_k, k_split)
    v3 = Reshape(row_v, v_split)
    k_new = Transpose<perm = [1, 0, 2]>(k3)
    v_new = Transpose<perm = [1, 0, 2]>(v3)
    last_of_three = Constant<value = int64[3] {{0, 0, 1}}>()
    head_slots = Constant<value = int64[{heads}, 1, 3] {{{head_slots}}}>()
    at_slots = Mul(at_column, last_of_three)
    slots = Add(head_slots, at_slots)
    row_k_out = ScatterND(row_k_cache, slots, k_new)
    row_v_out = ScatterND(row_v_cache, slots, v_new)
    slot_axis = Constant<value_ints = [2]>()
    seen_k4 = Slice(row_k_out, zero, total, slot_axis)
    seen_v4 = Slice(row_v_out, zero, total, slot_axis)
    seen_k = Squeeze(seen_k4, zero)
    seen_v = Squeeze(seen_v4, zero)
"""

# Query heads of one key/value head are stacked: [H, group*Q, D] against [H, n, D].
_SCORES = """
    q_split = Constant<value_ints = [-1, {heads}, {group}, {k_dim}]>()
    q4 = Reshape(row_q, q_split)
    q_heads = Transpose<perm = [1, 2, 0, 3]>(q4)
    q_stack = Constant<value_ints = [{heads}, -1, {k_dim}]>()
    q3 = Reshape(q_heads, q_stack)
    k_turned = Transpose<perm = [0, 2, 1]>(seen_k)
    raw = MatMul(q3, k_turned)
    scale_by = Constant<value_float: float = @scale>()
    scaled = Mul(raw, scale_by)
"""

_SOFTCAP = """
    cap = Constant<value_float: float = @softcap>()
    relative = Div(scaled, cap)
    bent = Tanh(relative)
    capped = Mul(bent, cap)
"""

_SPLIT = """
    score_heads = Constant<value_ints = [{heads}, {group}, -1]>()
    score_split = Concat<axis = 0>(score_heads, total)
    {split} = Reshape({scores}, score_split)
"""

# Of each head: [1, Hq, n, row_total].
_BIAS = """
    bias4 = Reshape(row_mask, score_split)
    scores4 = Add({split}, bias4)
"""

_CAUSAL = """
    entries = Range(scalar0, total0, scalar1)
    causal = LessOrEqual(entries, at_column)
"""

# The mask is finite: a query that sees nothing stays a number.
_MASK = """
    masked = Add(scores4, row_mask)
"""

_WINDOW = """
    window_size = Constant<value_int: int = @window>()
    before = Sub(at_column, window_size)
    inside = Greater(entries, before)
    seen = And(causal, inside)
"""

# Without causality a window bounds what lies before a token, and nothing else.
_WINDOW_ALONE = """
    window_size = Constant<value_int: int = @window>()
    before = Sub(at_column, window_size)
    entries = Range(scalar0, total0, scalar1)
    seen = Greater(entries, before)
"""

_HIDE = """
    never = Constant<value_float = -inf>()
    masked = Where({seen}, scores4, never)
"""

_SOFTMAX = """
    weights4 = Softmax<axis = -1>({shown})
"""

# A sink is one more score that takes weight and has no value.
_SOFTMAX_SINKS = """
    sink_split = Constant<value_ints = [{heads}, {group}, 1, 1]>()
    sink4 = Reshape(sinks, sink_split)
    sink_heads = Constant<value_ints = [{heads}, {group}]>()
    sink_grid = Concat<axis = 0>(sink_heads, new, unit)
    sink_column = Expand(sink4, sink_grid)
    with_sink = Concat<axis = 3>({shown}, sink_column)
    weights5 = Softmax<axis = -1>(with_sink)
    last_axis = Constant<value_ints = [3]>()
    weights4 = Slice(weights5, zero, total, last_axis)
"""

_OUTPUT = """
    weight_heads = Constant<value_ints = [{heads}, -1]>()
    weight_stack = Concat<axis = 0>(weight_heads, total)
    weights = Reshape(weights4, weight_stack)
    mixed = MatMul(weights, seen_v)
    mixed_split = Constant<value_ints = [{heads}, {group}, -1, {v_dim}]>()
    mixed4 = Reshape(mixed, mixed_split)
    by_token = Transpose<perm = [2, 0, 1, 3]>(mixed4)
    out_dims = Constant<value_ints = [1, -1, {out_width}]>()
    attended = Reshape(by_token, out_dims)
"""


def portable_row(
    num_heads: int,
    geometry: LayerGeometry,
    *,
    sinks: bool,
    window: bool,
    softcap: bool,
    masked: bool = False,
    causal: bool = True,
    slopes: bool = False,
) -> str:
    """ONNX text of one row's append and attention, for one layer geometry: its shapes are constants then.

    Reads row_q [1, n, Hq*D], row_k [1, n, H*D], row_v [1, n, H*Dv], row_k_cache [1, H, L, D], row_v_cache
    [1, H, L, Dv], row_total [1] (int32) and, from outside, sinks and slopes [Hq]; writes attended [1, n, Hq*Dv],
    row_k_out and row_v_out.

    Args:
        num_heads: query heads (Hq).
        geometry: key/value heads and head sizes.
        sinks: one more score a head.
        window: limit what a token sees to the attribute ``window``.
        softcap: bend the scores by the attribute ``softcap``.
        masked: read row_mask [1, 1, n, row_total] and add it to the scores; nothing else then hides an entry.
        causal: hide the entries behind a token; False shows it those of its whole row.
        slopes: bias scores by distance. A row_mask has that in it, and is [1, Hq, n, row_total] then.
    """
    parts = [_APPEND, _SCORES]
    if softcap:
        parts.append(_SOFTCAP)
    parts.append(_SPLIT)
    if slopes:
        parts += [*([] if masked else [row_bias("row_q")]), _BIAS]
    if masked:
        parts += [] if slopes else [_MASK]
    elif causal:
        parts += [_CAUSAL, *([_WINDOW] if window else []), _HIDE]
    elif window:
        parts += [_WINDOW_ALONE, _HIDE]
    parts += [_SOFTMAX_SINKS if sinks else _SOFTMAX, _OUTPUT]
    return "".join(parts).format(
        heads=geometry.kv_heads,
        group=num_heads // geometry.kv_heads,
        k_dim=geometry.k_dim,
        v_dim=geometry.v_dim,
        out_width=num_heads * geometry.v_dim,
        head_slots=", ".join(f"0, {head}, 0" for head in range(geometry.kv_heads)),
        scores="capped" if softcap else "scaled",
        split="unbiased4" if slopes else "scores4",
        seen="seen" if window else "causal",
        shown="scores4" if masked and slopes else "masked" if masked or causal or window else "scores4",
    )

"""Lowering for ONNX Runtime on the CPU: model-local functions, inlined when a session loads the model.

A ``Scan`` over cache rows runs one batch-1 attention a row, because the fused kernel refuses several new tokens with a
past for more than one row. The packed tokens are gathered into a tile [B, 1, Q, heads*D] and scattered back. The caches
enter and leave the Scan in the graph's own shape: any reshape around it would copy them.

Two bodies: the fused ``com.microsoft.GroupQueryAttention``, and a portable one from standard operators for what that
kernel cannot do (values of another size than keys, head sizes that are no multiple of 8).
"""

from typing import TYPE_CHECKING, NamedTuple

from specexport.lowering.portable import portable_row_body
from specexport.ops.spec import UNPADDED_ATTENTION
from specexport_runtime.abi import OP_DOMAIN, OP_NAME, STEP_INPUTS
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTRIB = "com.microsoft"
_FUSED_HEAD_MULTIPLE = 8  # the fused kernel refuses other head sizes
_USED = ("q", "k", "v", "k_cache", "v_cache", "row_totals", "pad_index", "unpad_index")

_FUSED_ROW = """
    row_out, row_k_out, row_v_out = com.microsoft.GroupQueryAttention<
        num_heads: int = @num_heads, kv_num_heads: int = @kv_num_heads, scale: float = @scale,
        local_window_size: int = @window, softcap: float = @softcap
    >(row_q, row_k, row_v, row_k_cache, row_v_cache, row_last, row_total{sinks})
"""

_FUNCTION = """<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
{name}<num_heads, kv_num_heads, scale, window, softcap>({inputs}) => (output, k_cache_out, v_cache_out) {{
  tile_q = Gather<axis = 0>(q, pad_index)
  tile_k = Gather<axis = 0>(k, pad_index)
  tile_v = Gather<axis = 0>(v, pad_index)
  one = Constant<value_int = 1>()
  one32 = Cast<to = 6>(one)
  row_lasts = Sub(row_totals, one32)
  tile_out, k_cache_out, v_cache_out = Scan<num_scan_inputs = 7, body = row_attention (
      float[1, Q, HqD] row_q, float[1, Q, HD] row_k, float[1, Q, HDv] row_v,
      float[1, H, L, D] row_k_cache, float[1, H, L, Dv] row_v_cache, int32[1] row_last, int32[1] row_total
  ) => (float[1, Q, HqDv] row_out, float[1, H, L, D] row_k_out, float[1, H, L, Dv] row_v_out) {{
{row}
  }}>(tile_q, tile_k, tile_v, k_cache, v_cache, row_lasts, row_totals)
  width = Shape<start = 3, end = 4>(tile_out)
  all = Constant<value_ints = [-1]>()
  slots = Concat<axis = 0>(all, width)
  flat_out = Reshape(tile_out, slots)
  output = Gather<axis = 0>(flat_out, unpad_index)
}}"""


class Body(NamedTuple):
    """Which function a node needs: nodes with the same body share one function.

    Attributes:
        fused: the fused kernel, or the portable body.
        sinks: the node has attention sinks.
        window: the node has a window (the portable body leaves the comparison out otherwise).
        softcap: the node caps its scores (the same).
    """

    fused: bool
    sinks: bool
    window: bool
    softcap: bool

    @property
    def function_name(self) -> str:
        """Name of the function, in the op's domain."""
        parts = (("Sinks", self.sinks), ("Window", self.window), ("Softcap", self.softcap))
        return OP_NAME + ("Fused" if self.fused else "Portable") + "".join(name for name, given in parts if given)


def choose_body(node: "ir.Node") -> Body:
    """The body for one ``UnpaddedAttention`` node.

    Raises:
        CheckFailedError: the caches have no static head sizes.
    """
    names = [item.name for item in UNPADDED_ATTENTION.inputs]
    given = dict(zip(names, node.inputs, strict=False))
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    k_dim, v_dim = (None if x is None or x.shape is None else x.shape[4] for x in (k_cache, v_cache))
    if not isinstance(k_dim, int) or not isinstance(v_dim, int):
        raise CheckFailedError(f"{node.name}: the caches have no static head size.")
    sinks = given.get("sinks") is not None
    if k_dim == v_dim and k_dim % _FUSED_HEAD_MULTIPLE == 0:
        return Body(fused=True, sinks=sinks, window=False, softcap=False)
    window, softcap = node.attributes["window"].as_int(), node.attributes["softcap"].as_float()
    return Body(fused=False, sinks=sinks, window=window > 0, softcap=softcap > 0)


def build_function(body: Body, opset: int) -> "ir.Function":
    """The model-local function of ``body``."""
    import onnx_ir as ir
    from onnx import parser

    if body.fused:
        row = _FUSED_ROW.format(sinks=", , , , , sinks" if body.sinks else "")
    else:
        row = portable_row_body(sinks=body.sinks, window=body.window, softcap=body.softcap)
    inputs = ", ".join([*_USED, "sinks"] if body.sinks else _USED)
    text = _FUNCTION.format(domain=OP_DOMAIN, opset=opset, name=body.function_name, inputs=inputs, row=row)
    function: ir.Function = ir.from_proto(parser.parse_function(text))
    return function


def lower_ort_cpu(ir_model: "ir.Model") -> None:
    """Attach the bodies and drop the step inputs that no body reads, in place."""
    opset = ir_model.opset_imports[""]
    names = [item.name for item in UNPADDED_ATTENTION.inputs]
    for node in [n for n in ir_model.graph if n.op_type == OP_NAME and n.domain == OP_DOMAIN]:
        body = choose_body(node)
        given = dict(zip(names, node.inputs, strict=False))
        function = build_function(body, opset)
        ir_model.functions.setdefault(function.identifier(), function)
        _replace_node(ir_model, node, function.name, [given[name] for name in (*_USED, "sinks")[: 8 + body.sinks]])
    ir_model.opset_imports.setdefault(_CONTRIB, 1)
    drop_unused_step_inputs(ir_model)


def _replace_node(ir_model: "ir.Model", node: "ir.Node", op_type: str, inputs: list["ir.Value | None"]) -> None:
    import onnx_ir as ir

    new = ir.Node(OP_DOMAIN, op_type, inputs, node.attributes.values(), outputs=None, num_outputs=3, name=node.name)
    ir.convenience.replace_nodes_and_values(ir_model.graph, node, [node], [new], node.outputs, new.outputs)


def drop_unused_step_inputs(ir_model: "ir.Model") -> tuple[str, ...]:
    """Remove step inputs without readers from the graph's inputs; returns their names."""
    step_names = {spec.name for spec in STEP_INPUTS}
    graph = ir_model.graph
    unused = [x for x in graph.inputs if x.name in step_names and not x.uses()]
    for value in unused:
        graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)

"""ALiBi in the lowerings: which attention nodes have slopes, and the bias of a row, from standard ONNX operators."""

from typing import TYPE_CHECKING

from specexport.ops.spec import UNPADDED_ATTENTION
from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

_SLOPES = [item.name for item in UNPADDED_ATTENTION.inputs].index("slopes")

_ROW_BIAS = """
      bias_new = Shape<start = 1, end = 2>({part})
      bias_total = Cast<to = 7>(row_total)
      bias_past = Sub(bias_total, bias_new)
      bias_first = Squeeze(bias_past)
      bias_end = Squeeze(bias_total)
      bias_zero = Constant<value_int = 0>()
      bias_one = Constant<value_int = 1>()
      bias_entries = Range(bias_zero, bias_end, bias_one)
      bias_tokens = Range(bias_first, bias_end, bias_one)
      bias_axis = Constant<value_ints = [1]>()
      bias_column = Unsqueeze(bias_tokens, bias_axis)
      bias_gaps = Sub(bias_entries, bias_column)
      bias_distances = Cast<to = 1>(bias_gaps)
      bias_shape = Constant<value_ints = [1, -1, 1, 1]>()
      bias_heads = Reshape(slopes, bias_shape)
      row_mask = Mul(bias_heads, bias_distances)"""


def slopes_of(node: "ir.Node") -> "ir.Value | None":
    """The slopes of an ``UnpaddedAttention`` node, float32 [num_heads]; None where it has no position bias."""
    return node.inputs[_SLOPES] if len(node.inputs) > _SLOPES else None


def refuse_slopes(node: "ir.Node", backend: str) -> None:
    """Refuse a node whose position bias a backend would leave out.

    Raises:
        UnsupportedModelError: it has slopes.
    """
    if slopes_of(node) is not None:
        raise UnsupportedModelError(
            f"{node.name}: this attention has ALiBi slopes, which {backend} does not compute.",
            "build for `ort-cpu`, with KV caches in float32.",
        )


def row_bias(part: str) -> str:
    """ONNX text of one row's bias, ``row_mask`` [1, Hq, n, row_total].

    Reads row_total [1] (int32), ``part`` [1, n, W] and, from outside, slopes [Hq]. The cost is that of one more pass
    over the scores.
    """
    return _ROW_BIAS.format(part=part)

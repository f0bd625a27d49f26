"""ALiBi in the lowerings: which attention nodes have slopes."""

from typing import TYPE_CHECKING

from specexport.ops.spec import UNPADDED_ATTENTION
from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

_SLOPES = [item.name for item in UNPADDED_ATTENTION.inputs].index("slopes")


def slopes_of(node: "ir.Node") -> "ir.Value | None":
    """The slopes of an ``UnpaddedAttention`` node, float32 [num_heads]; None where it has no position bias."""
    return node.inputs[_SLOPES] if len(node.inputs) > _SLOPES else None


def refuse_slopes(node: "ir.Node", backend: str) -> None:
    """Refuse a node with slopes, whose position bias a backend would leave out: UnsupportedModelError."""
    if slopes_of(node) is not None:
        raise UnsupportedModelError(
            f"{node.name}: this attention has ALiBi slopes, which {backend} does not compute.",
            "build for `ort-cpu`.",
        )

"""Whether tokens of an attention node see later ones of their row: those of a draft head that fills a block do."""

from typing import TYPE_CHECKING

from specexport_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

CAUSAL_ATTRIBUTE = "causal"


def is_causal(node: "ir.Node") -> bool:
    """Whether each token of an ``UnpaddedAttention`` node sees nothing behind itself."""
    return bool(node.attributes.get_int(CAUSAL_ATTRIBUTE, 1))


def require_causal(node: "ir.Node", backend: str) -> None:
    """Refuse a node whose tokens see later ones, where a backend has causal attention only: UnsupportedModelError."""
    if not is_causal(node):
        raise UnsupportedModelError(
            f"{node.name}: tokens of this attention see later ones, and {backend} has causal attention only.",
            "build with `lowering: native-folded`, or for `ort-cpu`.",
        )

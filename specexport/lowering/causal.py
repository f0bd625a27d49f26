"""Whether tokens of an attention node see later ones of their row: those of a draft head that fills a block do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

CAUSAL_ATTRIBUTE = "causal"


def is_causal(node: "ir.Node") -> bool:
    """Whether each token of an ``UnpaddedAttention`` node sees nothing behind itself."""
    return bool(node.attributes.get_int(CAUSAL_ATTRIBUTE, 1))

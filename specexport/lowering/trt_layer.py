"""One attention layer as the TensorRT lowerings see it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx_ir as ir


class Attention(NamedTuple):
    """One ``UnpaddedAttention`` node, read.

    Attributes:
        node: the node.
        tensors: its inputs by name.
        num_heads: query heads.
        kv_heads: key/value heads.
        k_dim: size of a key head.
        v_dim: size of a value head.
        scale: factor on the scores.
        window: entries a token sees, its own included; -1 for all.
        softcap: 0 for off.
        dtype: dtype of caches and activations.
        causal: tokens see nothing behind themselves.
    """

    node: "ir.Node"
    tensors: "dict[str, ir.Value]"
    num_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int
    softcap: float
    dtype: "ir.DataType"
    causal: bool = True

"""One attention layer as the TensorRT lowerings see it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx_ir as ir


class Attention(NamedTuple):
    """One ``UnpaddedAttention`` node, read."""

    node: "ir.Node"
    tensors: "dict[str, ir.Value]"  # inputs by name
    num_heads: int
    kv_heads: int
    k_dim: int  # size of a key head
    v_dim: int  # size of a value head
    scale: float  # factor on the scores
    window: int  # entries a token sees, its own included; -1 for all
    softcap: float  # 0 for off
    dtype: "ir.DataType"  # of caches and activations
    causal: bool = True  # tokens see nothing behind themselves

"""What a graph on ``com.microsoft.PagedAttention`` has beside the contract: cache blocks, and two step inputs.

Source: the operator's schema in onnxruntime 1.31 and its backend selection (docs/contrib_ops/cuda/paged_attention.md).
"""

from specexport_runtime.abi import LayerGeometry, TensorSpec

BLOCK_ENTRIES = 256
"""Cache entries of a block: the least that the fused kernel takes for every head size."""
MAX_HEAD_SIZE = 256
BLOCK_TABLE = TensorSpec(
    "block_table", "int32", ("B", "N"), "index", "ort-cuda only: blocks of each row, in the order of their entries"
)
ATTENTION_METADATA = TensorSpec(
    "attention_metadata",
    "int32",
    (3,),
    "index",
    "ort-cuda only, in host memory: most new tokens of a row, most entries of a row, and a lower bound of the latter",
)
_HEAD_MULTIPLE = 8  # the operator refuses other head sizes


def paged_head_size(layer: LayerGeometry) -> int:
    """Head size of a layer's blocks: keys and values have one, a multiple of 8; smaller heads end in zeros."""
    return -(-max(layer.k_dim, layer.v_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE

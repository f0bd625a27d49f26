"""What a graph on ``com.microsoft.PagedAttention`` takes: cache blocks, two step inputs, and a row for each token.

ONNX Runtime splits the entries of rows of one new token over a GPU, and rows of several go through one pass that does
not. So a verify step of T tokens becomes T rows over the same blocks: the token after j others of its row sees j more
entries. The operator writes all new entries before it reads any, and attention is causal: the results are the same.

It pays where cuDNN computes rows of one token. Measured on an H200, one layer with 32 query and 8 KV heads of 128,
after 256, 2,048 and 8,192 entries: one token takes 13, 14 and 20 us, several in one pass 15, 34 and 95, and each row
more than one 0.2, 1.7 and 4.7. So the pass is passed by at 12 tokens.

Source: the operator's schema in onnxruntime 1.31 and its backend selection (docs/contrib_ops/cuda/paged_attention.md).
"""

from collections.abc import Mapping

import numpy as np

from specexport_runtime.abi import (
    CU_NEW_TOKENS,
    INPUT_IDS,
    KV_LENS,
    LOGIT_ROWS,
    POSITIONS,
    STEP_INPUTS,
    LayerGeometry,
    StepShape,
    TensorSpec,
)
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.executors.base import Int32Array, Int64Array, StepBuffers

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

MAX_TOKEN_ROWS = 12
CUDNN_SWITCH = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"
_CUDNN_FROM = 90
_KNOWN = (INPUT_IDS, POSITIONS, LOGIT_ROWS, KV_LENS, CU_NEW_TOKENS)


def paged_head_size(layer: LayerGeometry) -> int:
    """Head size of a layer's blocks: keys and values have one, a multiple of 8; smaller heads end in zeros."""
    return -(-max(layer.k_dim, layer.v_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def is_faster_with_token_rows(entry: ModelEntry, capability: int, environment: Mapping[str, str]) -> bool:
    """Whether steps of few tokens are faster with a row for each: cuDNN computes them, and only attention reads rows.

    ONNX Runtime takes cuDNN from ``capability`` 90 (9.0) on, unless its switch in ``environment`` turns cuDNN off.
    Layers with windows have no cuDNN kernel.
    """
    by_row, head = any(spec.name in entry.engine.inputs for spec in STEP_INPUTS if spec not in _KNOWN), entry.draft_head
    sees_rows = by_row or (head is not None and head.num_draft_heads > 0)
    has_windows = any(window > 0 for window in entry.attention.windows)
    takes_cudnn = capability >= _CUDNN_FROM and environment.get(CUDNN_SWITCH) != "0"
    return takes_cudnn and bool(entry.attention.layers) and not sees_rows and not has_windows


def to_token_rows(shape: StepShape) -> StepShape | None:
    """Sizes of a step with a row for each token; None for one that stays as it is."""
    if shape.max_new_tokens == 1 or shape.num_tokens > MAX_TOKEN_ROWS:
        return None
    return StepShape(0, shape.num_tokens, shape.num_tokens, 1, shape.num_logit_rows)


def token_row_shapes() -> list[StepShape]:
    """All that :func:`to_token_rows` makes of steps."""
    counts = range(2, MAX_TOKEN_ROWS + 1)
    return [StepShape(0, count, count, 1, wanted) for count in counts for wanted in range(1, count + 1)]


def spread_tokens(buffers: StepBuffers) -> tuple[Int64Array, Int32Array, Int32Array]:
    """Of a step with a row a token: step rows int64 [T], ``kv_lens`` int32 [T, 1], ``cu_new_tokens`` int32 [T+1]."""
    counts = np.diff(buffers.cu_new_tokens)
    rows = np.repeat(np.arange(len(counts)), counts)
    cu_new_tokens = np.arange(len(rows) + 1, dtype=np.int32)
    behind = cu_new_tokens[:-1] - buffers.cu_new_tokens[rows]
    return rows, buffers.kv_lens[rows] + behind[:, None], cu_new_tokens

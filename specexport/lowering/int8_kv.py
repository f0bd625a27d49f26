"""KV caches in int8: a quarter of float32's memory, with a fixed scale for each channel of each layer.

The operator rounds new keys and values when it appends them, and reads all entries as they are stored, those of the
step's own tokens too. So a token's result does not depend on the step it is in.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from specexport.channel_ranges import CacheRange, FloatVector
from specexport.lowering.fuse import ROTARY_INPUTS
from specexport.onnx_emit import constant, set_inputs
from specexport_runtime.abi import OP_DOMAIN, OP_NAME

if TYPE_CHECKING:
    import onnx_ir as ir

_CACHES = (3, 4)
_FIRST_SCALE = ROTARY_INPUTS[-1] + 1  # of a node's inputs: scales of keys and of values, float32 [H * D] each
_LARGEST = 127


def use_int8_caches(ir_model: "ir.Model", ranges: Seq[CacheRange]) -> None:
    """Let a model's attention keep its caches in int8, in place; ``ranges`` has one for each layer.

    Comes after the passes and, if rotary embeddings are fused, after ``fuse_rotary``.
    """
    import onnx_ir as ir

    nodes = [node for node in ir_model.graph if node.op_type == OP_NAME and node.domain == OP_DOMAIN]
    for layer, (node, found) in enumerate(zip(nodes, ranges, strict=True)):
        scales = [
            constant(ir_model.graph, f"{name}_cache_scale.{layer}", _scales(largest))
            for name, largest in zip("kv", found, strict=True)
        ]
        set_inputs(node, _FIRST_SCALE, scales)
        for cache in (*(node.inputs[index] for index in _CACHES), *node.outputs[1:]):
            cache.type = ir.TensorType(ir.DataType.INT8)  # type: ignore[union-attr]


def _scales(largest: FloatVector) -> FloatVector:
    """A channel that was quiet on all texts gets a hundredth of its layer's largest, so that nothing divides by 0."""
    least = max(float(largest.max()) / 100, float(np.finfo(np.float32).tiny) * _LARGEST)
    found: FloatVector = (np.maximum(largest, least) / _LARGEST).astype(np.float32)
    return found

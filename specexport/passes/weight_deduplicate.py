"""Store equal weights once."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import part_of
from specexport.passes.base import CountingPass, sizes_of

_SAMPLES = 512
_ROWS = 4  # beside the last one
_CHUNK = 1 << 22  # elements hashed at a time
_Key = Callable[[ir.TensorProtocol], object]


class WeightDeduplicatePass(CountingPass):
    """Make readers of equal weights share one, found by content.

    Tied embeddings are one parameter in the checkpoint and may be two initializers in a trace; so may buffers that
    every layer repeats. Weights are compared in two steps, so that the bytes of a large model are hashed only where a
    sparse sample agrees. Counts the weights that went away.
    """

    name = "weight-deduplicate"
    reason = "tied embeddings and repeated buffers are stored and mapped once"

    def rewrite(self, model: ir.Model) -> int:
        """Redirect the readers of each copy to the first of its equals."""
        initializers = model.graph.initializers
        outputs = set(model.graph.outputs)
        values = [v for v in initializers.values() if v.const_value is not None and v not in outputs]
        removed = 0
        for alike in _group(values, _sample_key):
            for kept, *copies in _group(alike, _content_key):
                for copy in copies:
                    ir.convenience.replace_all_uses_with(copy, kept)
                    del initializers[str(copy.name)]
                    removed += 1
        return removed


def _group(values: Iterable[ir.Value], key: _Key) -> list[list[ir.Value]]:
    """Groups of at least two values with equal keys, in order."""
    groups: dict[object, list[ir.Value]] = defaultdict(list)
    for value in values:
        tensor = value.const_value
        assert tensor is not None  # noqa: S101 - filtered by the caller
        groups[key(tensor)].append(value)
    return [group for group in groups.values() if len(group) > 1]


def _sample_key(tensor: ir.TensorProtocol) -> object:
    sizes = sizes_of(tensor)
    count = sizes[0] if sizes else 0
    rows = sorted({*range(0, count, max(1, count // _ROWS)), count - 1}) if count else []
    return (
        tensor.dtype,
        tuple(sizes),
        b"".join(_bytes(part_of(tensor, 0, row, row + 1)[..., :_SAMPLES]) for row in rows),
    )


def _content_key(tensor: ir.TensorProtocol) -> object:
    sizes = sizes_of(tensor)
    if not sizes:
        return _bytes(tensor.numpy())
    digest, step = hashlib.sha256(), max(1, _CHUNK // max(1, math.prod(sizes[1:])))
    for start in range(0, sizes[0], step):
        digest.update(_bytes(part_of(tensor, 0, start, min(start + step, sizes[0]))))
    return digest.digest()


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()

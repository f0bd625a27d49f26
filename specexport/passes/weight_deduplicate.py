"""Store equal weights once."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import has_parts, part_of
from specexport.passes.base import CountingPass

_SAMPLES = 512
_ROWS = 4  # of a matrix, beside its last one
_MATRIX = 2
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
    shape = tuple(int(str(size)) for size in tensor.shape)
    if len(shape) < _MATRIX or not has_parts(tensor):
        flat = tensor.numpy().reshape(-1)
        sample = np.ascontiguousarray(flat[:: max(1, flat.size // _SAMPLES)]).tobytes()
        return tensor.dtype, shape, sample
    rows = sorted({*range(0, shape[0], max(1, shape[0] // _ROWS)), shape[0] - 1}) if shape[0] else []
    return tensor.dtype, shape, b"".join(_bytes(part_of(tensor, 0, row, row + 1)[..., :_SAMPLES]) for row in rows)


def _content_key(tensor: ir.TensorProtocol) -> object:
    digest = hashlib.sha256()
    shape = tuple(int(str(size)) for size in tensor.shape)
    if len(shape) < _MATRIX or not has_parts(tensor):
        digest.update(_bytes(tensor.numpy()))
        return digest.digest()
    step = max(1, _CHUNK // max(1, int(np.prod(shape[1:]))))
    for start in range(0, shape[0], step):
        digest.update(_bytes(part_of(tensor, 0, start, min(start + step, shape[0]))))
    return digest.digest()


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()

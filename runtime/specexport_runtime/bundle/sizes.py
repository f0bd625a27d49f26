"""Bytes that a bundle's models take, told by its manifest alone."""

import math

from specexport_runtime.abi import CACHE_BYTES, ITEM_BYTES, kv_slack, num_pending, state_shapes
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.manifest import Manifest


def kv_bytes_per_token(entry: ModelEntry) -> int:
    """Bytes of KV cache that one token takes, over all layers; 0 of a head that reads the target's."""
    if entry.attention.target_layers:
        return 0
    values = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in entry.attention.layers)
    return values * CACHE_BYTES.get(entry.attention.cache_dtype, 4)


def state_bytes_per_row(entry: ModelEntry, lookahead: int) -> int:
    """Bytes that one row takes for states of recurrences, with what drafts leave beside them; 0 without recurrences."""
    shapes = state_shapes(entry.states, 1, num_pending(lookahead, drafts_itself=bool(entry.engine.gates.kinds)))
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES["float32"]


def engine_bytes(manifest: Manifest, role: str) -> int:
    """Bytes of the files of one model: its graphs and weights."""
    return sum(entry.size for name, entry in manifest.files.items() if name.startswith(f"{role}/"))


def most_memory(
    manifest: Manifest,
    *,
    num_rows: int,  # cache rows, those that only keep prefixes too
    max_model_len: int,
    kv_bytes: int | None = None,  # what the caches may take at most; None for whole rows
) -> int:
    """Bytes of all models' files, and of their cache rows once they are written to the end; not of activations."""
    models, lookahead = manifest.models, manifest.lookahead
    length = max_model_len + kv_slack(lookahead)
    row = sum(length * kv_bytes_per_token(each) + state_bytes_per_row(each, lookahead) for each in models.values())
    caches = num_rows * row if kv_bytes is None else min(num_rows * row, kv_bytes)
    return sum(engine_bytes(manifest, role) for role in models) + caches

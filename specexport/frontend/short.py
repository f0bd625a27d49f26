"""Attention that leaves entries of a long text out, and none of a short one: held to texts that are short enough.

Layers that attend in chunks (Llama 4) see all of a text that has one chunk. Layers that choose entries by an index
(DeepSeek-V3.2 and its kin) choose all of them while there are no more than they may choose. A bundle has a longest
text: where it is short enough, such layers are plain, exactly, and the model is made to say so.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNKED, INDEXED = "chunked_attention", "indexed_attention"


def _indexers(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__.endswith("Indexer") and isinstance(getattr(module, "index_topk", None), int):
            yield module


def _kinds(model: Any) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def _tuned(model: Any) -> list[Any]:
    """Attention whose scores grow with the position, in steps."""
    return [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]


def plain_length(model: Any) -> int | None:
    """Longest text of which tokens see all before them; None where no layer leaves entries out, or it is unknown."""
    limits = [module.index_topk for module in _indexers(model)] if INDEXED in _kinds(model) else []
    if CHUNKED in _kinds(model):
        chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
        limits.append(int(chunk or 0))  # without a size nothing is known
        limits += [int(module.floor_scale) - 1 for module in _tuned(model)]  # the first step is no change
    return min(limits, default=None) or None


def hold_short(model: Any, max_len: int) -> bool:
    """Make such layers plain for texts of at most ``max_len`` tokens, in place; False if it leaves all as they are."""
    longest = plain_length(model)
    if longest is None or max_len > longest:
        return False
    config = model.config.get_text_config()
    if CHUNKED in _kinds(model):
        config.layer_types = ["full_attention" if kind == CHUNKED else kind for kind in config.layer_types]
        for module in _tuned(model):
            module.attn_temperature_tuning = False
    for module in _indexers(model):
        module.forward = _choose_all
    return True


def _choose_all(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """What an index gives where it chooses everything: all entries, for each token [B, T, T]."""
    rows, tokens = hidden_states.shape[:2]
    return torch.arange(tokens, dtype=torch.int32).expand(rows, tokens, tokens)


def is_held(model: Any) -> bool:
    """Whether the model has indexes, and all of them choose everything."""
    found = [getattr(module.forward, "__name__", "") == _choose_all.__name__ for module in _indexers(model)]
    return bool(found) and all(found)

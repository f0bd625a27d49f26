"""What an assistant is checked against: drafts over random keys and values, by transformers' own attention."""

from typing import TYPE_CHECKING

import numpy as np

from specexport.build.check_head import CHECK_CAPACITY, CheckedRow, HeadReference, LentRows

if TYPE_CHECKING:
    from specexport.heads.assistant import AssistantHead
    from specexport.heads.config import HeadConfig

_LENS = ((11, 7), (1, 31), (5, 0), (0, 20), (19, 8))
"""Entries of the two rows in each step; an idle row has none."""


def assistant_reference(head: "AssistantHead", config: "HeadConfig") -> HeadReference:
    """Steps of one token a row, and what the assistant computes of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.assistant import Places, draft_steps, shape_of

    generator = np.random.default_rng(21)
    caches = {}
    for i, (heads, k_dim, v_dim) in enumerate(shape_of(config).geometries):
        for name, size in ((f"k_cache.{i}", k_dim), (f"v_cache.{i}", v_dim)):
            caches[name] = generator.standard_normal((2, 1, heads, CHECK_CAPACITY, size), np.float32)
    steps = []
    for lens in _LENS:
        rows = []
        for row, entries in enumerate(lens):
            tokens = generator.integers(0, config.vocab_size, min(entries, 1))
            fed = generator.standard_normal((len(tokens), config.feature_size), np.float32)
            own = [torch.from_numpy(cache[row]).to(head.dtype) for cache in caches.values()]
            places = Places(torch.full((len(tokens),), entries), list(zip(own[::2], own[1::2], strict=True)))
            logits, handed_on = np.zeros((0, config.vocab_size), np.float32), fed
            if len(tokens):
                found = draft_steps(head, torch.from_numpy(tokens), torch.from_numpy(fed), places)
                logits, handed_on = (each.float().numpy() for each in found)
            rows.append(CheckedRow(tokens, fed, 0, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps, LentRows(caches, _LENS))

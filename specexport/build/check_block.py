"""What a head that fills blocks is checked against: ragged steps of context and blocks, each block forgotten again."""

from typing import TYPE_CHECKING

import numpy as np

from specexport.build.check_head import CheckedRow, HeadReference

if TYPE_CHECKING:
    from specexport.heads.config import HeadConfig
    from specexport.heads.modules import DraftHead

BLOCK_STEPS = (((5, 3), (2, 2)), ((1, 3), (3, 4)), ((2, 2), (1, 3)))
"""New context entries and tokens of the block, of each row in each step."""


def block_reference(head: "DraftHead", config: "HeadConfig") -> HeadReference:
    """Steps with random features and tokens, and what the head computes of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.dflash import block_states
    from specexport_runtime.abi import CONTEXT_ID

    generator = np.random.default_rng(21)
    dtype = head.dtype
    known = [np.zeros((0, config.feature_size), np.float32) for _ in BLOCK_STEPS[0]]
    steps = []
    for sizes in BLOCK_STEPS:
        rows = []
        for row, (context, width) in enumerate(sizes):
            fresh = generator.normal(0, 1, (context, config.feature_size)).astype(np.float32)
            known[row] = np.concatenate([known[row], fresh])
            block = generator.integers(0, config.vocab_size, width)
            with torch.no_grad():
                features = torch.from_numpy(known[row]).to(dtype)
                starts = torch.tensor([len(features)])
                states = block_states(head, features, starts, torch.from_numpy(block)[None])[0]
                logits, handed_on = (each.float().numpy() for each in head.read(states))
            tokens = np.concatenate([np.full(context, CONTEXT_ID), block])
            fed = np.concatenate([fresh, np.zeros((width, config.feature_size), np.float32)])
            rows.append(CheckedRow(tokens, fed, context, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps)

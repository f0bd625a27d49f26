"""What Hydra heads are checked against: ragged steps of first heads, and of later ones behind each of them."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from specexport.build.check_head import CheckedRow, HeadReference

if TYPE_CHECKING:
    from specexport.heads.config import HeadConfig
    from specexport.heads.hydra import HydraHeads

READ = ((5, 2), (1, 3), (2, 1))
"""New features of each row in each step of first heads. Behind it come steps of later ones, as in a draft."""

Equations = Callable[[np.ndarray, Seq[int]], tuple[np.ndarray, np.ndarray]]
"""Logits [N] and the hidden state handed on [H], for all features of a sequence [n, H] and the tokens that the head
reads: the newest and the guessed ones."""


def hydra_reference(head: "HydraHeads", config: "HeadConfig") -> HeadReference:
    """Steps with random features and tokens, and what the heads compute of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.trace import causal_states

    def compute(features: np.ndarray, tokens: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(features).to(head.dtype)
        with torch.no_grad():
            state = causal_states(head, torch.zeros(len(given), dtype=torch.int64), given)[-1:]
            logits = head.guess(len(tokens) - 1, state, head.embed_tokens(torch.tensor([list(tokens)])))
        return logits[0].float().numpy(), state[0].float().numpy()

    return hydra_steps(compute, config.num_draft_heads, config.feature_size, config.vocab_size)


def hydra_steps(compute: Equations, num_heads: int, feature_size: int, vocab_size: int) -> HeadReference:
    """Steps with random features [n, E] and tokens, and what ``compute`` says of them."""
    from specexport_runtime.abi import CONTEXT_ID

    generator = np.random.default_rng(21)
    known = [np.zeros((0, feature_size), np.float32) for _ in READ[0]]
    steps = []
    for counts in READ:
        fresh = [generator.normal(0, 1, (count, feature_size)).astype(np.float32) for count in counts]
        known = [np.concatenate(pair) for pair in zip(known, fresh, strict=True)]
        windows = [generator.integers(0, vocab_size, num_heads) for _ in counts]
        rows = []
        for row, window in enumerate(windows):
            logits, handed_on = compute(known[row], window[:1].tolist())
            context = [CONTEXT_ID] * (counts[row] - 1)
            tokens = np.array([*context, window[0]])
            rows.append(CheckedRow(tokens, fresh[row], counts[row], logits[None], handed_on[None]))
        steps.append(rows)
        for width in range(2, num_heads + 1):
            depths = (width, max(2, width - 1))  # rows ask different heads
            later = []
            for row, depth in enumerate(depths):
                tokens = windows[row][:depth]
                logits, handed_on = compute(known[row], tokens.tolist())
                later.append(CheckedRow(tokens, np.tile(handed_on, (depth, 1)), 0, logits[None], handed_on[None]))
            steps.append(later)
    return HeadReference(steps)

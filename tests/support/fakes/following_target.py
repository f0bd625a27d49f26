"""A target that follows one token by another, whatever comes before; its hidden state tells the token."""

from typing import Any

import torch

from tests.support.models.tiny_heads import HIDDEN, VOCAB
from tests.support.models.tiny_models import make_llama


def make_target() -> Any:
    """A Llama whose next token is the one three further on, of 3 to 258; its norm turns half of the signs."""
    model = make_llama(seed=3, num_hidden_layers=2, hidden_size=HIDDEN)
    state = model.state_dict()
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    for name, value in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    state["model.embed_tokens.weight"].copy_(table)
    state["model.norm.weight"].copy_(torch.tensor([1.0, -1.0]).repeat(HIDDEN // 2))
    state["lm_head.weight"].copy_(rows_behind(table * state["model.norm.weight"], 1))
    return model


def behind(token: int, steps: int) -> int:
    return 3 + (token - 3 + 3 * steps) % 256


def rows_behind(seen: torch.Tensor, steps: int) -> torch.Tensor:
    """An LM head [V, H] that knows the token so far after the one that it sees, [V, H] by token."""
    rows = torch.zeros(VOCAB, HIDDEN)
    for token in range(3, 259):
        rows[behind(token, steps)] = seen[token]
    return rows / HIDDEN

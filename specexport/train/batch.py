"""Texts of a training step, side by side."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Texts of a training step."""

    tokens: Tensor  # int64 [B, T]
    states: list[Tensor]  # tapped hidden states, [B, T, H] each
    last: Tensor  # what the target's LM head reads, [B, T, H]
    lengths: Tensor  # tokens of each text, int64 [B]

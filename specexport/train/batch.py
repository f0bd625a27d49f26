"""Texts of a training step, side by side."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Texts of a training step.

    Attributes:
        tokens: int64 [B, T].
        states: tapped hidden states, [B, T, H] each.
        last: what the target's LM head reads [B, T, H].
        lengths: tokens of each text, int64 [B].
    """

    tokens: Tensor
    states: list[Tensor]
    last: Tensor
    lengths: Tensor

"""What a head is trained on: the target's distribution, at as many steps as it will draft (training-time test)."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


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


def divergence(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean cross entropy of the head's distribution under the target's, over valid places.

    Args:
        logits: of the head [B, T, N].
        target: of the target, for the same tokens [B, T, N].
        valid: bool [B, T].
    """
    places = valid.flatten()
    log_q = functional.log_softmax(logits.flatten(0, 1)[places].float(), dim=-1)
    p = functional.softmax(target.flatten(0, 1)[places].float(), dim=-1)
    return -(p * log_q).sum(dim=-1).mean()

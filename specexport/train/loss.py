"""What a head is trained on: the target's distribution, at as many steps as it will draft (training-time test)."""

from torch import Tensor
from torch.nn import functional


def divergence(logits: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean cross entropy of the head's distribution under the target's, over valid places.

    Both logits are of the same tokens, [B, T, N]; ``valid`` is bool [B, T].
    """
    places = valid.flatten()
    log_q = functional.log_softmax(logits.flatten(0, 1)[places].float(), dim=-1)
    p = functional.softmax(target.flatten(0, 1)[places].float(), dim=-1)
    return -(p * log_q).sum(dim=-1).mean()

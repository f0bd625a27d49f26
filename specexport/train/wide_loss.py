"""The loss over a whole vocabulary, a few places at a time: logits of a batch may be gigabytes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HELD_LOGITS = 1 << 25
"""Logits that are held at a time, 128 MiB in float32; a few such tensors are there at once."""

Read = Callable[[Tensor], Tensor]
"""From what an LM head reads [n, H] to logits [n, V]."""


def wide_divergence(hidden: Tensor, wanted: Tensor, read: Read, vocab_size: int) -> Tensor:
    """Mean cross entropy of the draft's distribution under the target's, nats; the LM head itself learns nothing.

    ``hidden`` is what the draft's LM head reads [n, H], ``wanted`` what the target's reads [n, H], ``read`` the LM head
    of both.
    """
    loss: Tensor = _WideDivergence.apply(hidden, wanted, read, _rows(vocab_size))
    return loss


class Comparison(NamedTuple):
    """A draft's distributions beside the target's."""

    drafted: Tensor  # best token ids of the draft, int64 [n]
    best: Tensor  # best token ids of the target, int64 [n]
    overlap: Tensor  # sum of min(p, q), float32 [n]
    loss: Tensor  # cross entropy of the draft's distribution under the target's, nats, float32 [n]


def compare(hidden: Tensor, wanted: Tensor, read: Read, vocab_size: int) -> Comparison:
    """What the draft would do at each place; see :func:`wide_divergence` for the arguments."""
    rows = _rows(vocab_size)
    found: list[Comparison] = []
    with torch.no_grad():
        for ours, theirs in zip(hidden.split(rows), wanted.split(rows), strict=True):
            log_q, p = read(ours).float().log_softmax(-1), read(theirs).float().softmax(-1)
            overlap, loss = torch.minimum(log_q.exp(), p).sum(-1), -(p * log_q).sum(-1)
            found.append(Comparison(log_q.argmax(-1), p.argmax(-1), overlap, loss))
    return Comparison(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _rows(vocab_size: int) -> int:
    return max(1, HELD_LOGITS // vocab_size)


class _WideDivergence(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """The gradient is made on the way forward, so that no logits have to be kept or made again for the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wanted: Tensor, read: Read, rows: int) -> Tensor:
        total, gradients = torch.zeros(()), []
        for ours, theirs in zip(hidden.detach().split(rows), wanted.split(rows), strict=True):
            p = read(theirs).float().softmax(-1)
            with torch.enable_grad():
                given = ours.requires_grad_()
                part = -(p * functional.log_softmax(read(given).float(), dim=-1)).sum()
                gradients.append(torch.autograd.grad(part, given)[0])
            total = total + part.detach()
        ctx.save_for_backward(torch.cat(gradients) / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None, None

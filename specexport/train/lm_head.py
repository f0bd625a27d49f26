"""From the last hidden state to logits as a model does it, and losses over its vocabulary, some places at a time."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specexport.train.options import refuse_pruning

_PROOF_TOKENS = 16

HELD_LOGITS = 1 << 25
"""Logits that are held at a time, 128 MiB in float32; a few such tensors are there at once."""

Read = Callable[[Tensor], Tensor]
"""From what an LM head reads [n, H] to logits [n, V]."""


class LmHead:
    """A model's way from what its LM head reads to its logits; factors and bounds on logits are in it.

    It is the model's forward pass, with layers that hand on what they are given, over a bfloat16 copy of the weights.
    UnsupportedModelError: it cannot be split there.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        shell = copy.copy(model)
        parts = {name: _IdentityLayers() if part is body else part for name, part in model._modules.items()}
        shell.__dict__["_modules"] = parts
        self._shell, self._dtype = shell, torch.float32
        tokens = torch.arange(1, 1 + _PROOF_TOKENS)[None] % model.config.get_text_config().vocab_size
        try:
            with torch.no_grad():
                wanted = model(input_ids=tokens, use_cache=False).logits
                hidden = body(input_ids=tokens, use_cache=False)[0]
                found = self(hidden[0])
        except Exception as error:  # it asks its layers for more than their output
            raise refuse_pruning(model, f"its LM head cannot be run alone ({type(error).__name__}: {error})") from error
        if not torch.allclose(found, wanted[0], rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
            raise refuse_pruning(model, "its logits do not follow from its last hidden state alone")
        head, self._dtype = model.get_output_embeddings(), torch.bfloat16
        shell.__dict__["_modules"] = {
            name: copy.deepcopy(part).bfloat16() if part is head else part for name, part in parts.items()
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        logits: Tensor = self._shell(inputs_embeds=hidden[None].to(self._dtype), use_cache=False).logits[0]
        return logits


class _IdentityLayers(nn.Module):  # type: ignore[misc]  # torch is not followed
    """In the place of a model's layers: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output(tuple[Tensor]):
    """What layers give, as models take it: by name or by number. There is nothing but the hidden state."""

    def __new__(cls, hidden: Tensor) -> "_Output":
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def chunked_cross_entropy(hidden: Tensor, wanted: Tensor, read: Read, vocab_size: int) -> Tensor:
    """Mean cross entropy of the draft's distribution under the target's, nats; what LM heads read is [n, H]."""
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, wanted, read, _rows_per_chunk(vocab_size))
    return loss


class DraftComparison(NamedTuple):
    """A draft's distributions beside the target's."""

    drafted: Tensor  # best token ids of the draft, int64 [n]
    best: Tensor  # best token ids of the target, int64 [n]
    overlap: Tensor  # sum of min(p, q), float32 [n]
    loss: Tensor  # cross entropy of the draft's distribution under the target's, nats, float32 [n]


def compare_distributions(hidden: Tensor, wanted: Tensor, read: Read, vocab_size: int) -> DraftComparison:
    """What the draft would do at each place; see :func:`chunked_cross_entropy` for the arguments."""
    rows = _rows_per_chunk(vocab_size)
    found: list[DraftComparison] = []
    with torch.no_grad():
        for ours, theirs in zip(hidden.split(rows), wanted.split(rows), strict=True):
            log_q, p = read(ours).float().log_softmax(-1), read(theirs).float().softmax(-1)
            overlap, loss = torch.minimum(log_q.exp(), p).sum(-1), -(p * log_q).sum(-1)
            found.append(DraftComparison(log_q.argmax(-1), p.argmax(-1), overlap, loss))
    return DraftComparison(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, HELD_LOGITS // vocab_size)


class _ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
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

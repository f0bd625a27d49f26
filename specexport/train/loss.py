"""What a head is trained on: the target's distribution, at as many steps as it will draft (training-time test)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specexport.heads.modules import DraftHead, FeatureProjection


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


class StepResult(NamedTuple):
    """One draft step at every place of the batch.

    Attributes:
        logits: of the head [B, T-1, N]: at place ``i``, of the token ``i + 2 + step``.
        valid: places whose target is known, bool [B, T-1].
        offset: the target's hidden state for place ``i`` is ``last[:, i + offset]``.
    """

    logits: Tensor
    valid: Tensor
    offset: int


def unroll(head: DraftHead, projection: FeatureProjection, batch: Batch, steps: int) -> Iterator[StepResult]:
    """Draft at every place of the texts at once, ``steps`` tokens deep, fed the text's own tokens.

    Step ``s`` at place ``i`` sees the true features of places up to ``i``, and what the head itself gave at this place
    in the steps before: as it will when it drafts (Li et al. 2025, section 3.1).
    """
    count, width = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    features = projection([state[:, :width] for state in batch.states])
    past: dict[int, tuple[Tensor, Tensor]] = {}
    causal = torch.full((width, width), float("-inf")).triu(1)
    diagonal = torch.full((width, width), float("-inf")).fill_diagonal_(0.0)
    places = torch.arange(width)
    for step in range(steps):
        shifted = functional.pad(batch.tokens[:, 1 + step :], (0, step))[:, :width]
        positions = (places + step)[None].expand(count, -1)
        rotary = head.body.rotary_emb(features, positions)
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        attend = _Attend(past, rotary, mask[None, None])
        state = head.hidden(head.embed(shifted).detach(), features, attend)
        logits, features = head.read(state)
        valid = places[None] + 1 + step < batch.lengths[:, None]
        yield StepResult(logits, valid, 1 + step)


class _Attend:
    """Runs attention modules over the keys and values of all steps so far."""

    def __init__(self, past: dict[int, tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor], mask: Tensor) -> None:
        self._past, self._rotary, self._mask = past, rotary, mask

    def __call__(self, module: torch.nn.Module, hidden: Tensor) -> Tensor:
        output: Tensor = module(
            hidden_states=hidden,
            position_embeddings=self._rotary,
            attention_mask=self._mask.to(hidden.dtype),
            past_key_values=self,
        )[0]
        return output

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As transformers' cache: these behind those of the steps before."""
        if layer in self._past:
            old_keys, old_values = self._past[layer]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._past[layer] = keys, values
        return keys, values


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

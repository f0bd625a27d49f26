"""A head drafting at every place of known texts at once: training-time test (Li et al. 2025, section 3.1)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specexport.heads.modules import DraftHead
from specexport.trace.layers import hidden_of


class StepResult(NamedTuple):
    """One draft step at every place of the batch."""

    logits: Tensor  # of the head [B, T-1, N]: at place ``i``, of the token ``i + 2 + step``
    valid: Tensor  # places whose target is known, bool [B, T-1]
    offset: int  # the target's hidden state for place ``i`` is ``last[:, i + offset]``


def unroll(head: DraftHead, tokens: Tensor, features: Tensor, lengths: Tensor, steps: int) -> Iterator[StepResult]:
    """Draft at every place of the texts at once, ``steps`` tokens deep, fed the text's own tokens.

    Step ``s`` at place ``i`` sees the true features of places up to ``i``, and what the head itself gave at this place
    in the steps before: as it will when it drafts. ``tokens`` is int64 [B, T], ``features`` [B, T-1, E] are of all
    tokens but the last, ``lengths`` int64 [B] counts the tokens of each text.
    """
    count, width = features.shape[:2]
    past: dict[int, tuple[Tensor, Tensor]] = {}
    causal = torch.full((width, width), float("-inf")).triu(1)
    diagonal = torch.full((width, width), float("-inf")).fill_diagonal_(0.0)
    places = torch.arange(width)
    for step in range(steps):
        shifted = functional.pad(tokens[:, 1 + step :], (0, step))[:, :width]
        positions = (places + step)[None].expand(count, -1)
        rotary = head.body.rotary_emb(features, positions)
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        state = head.hidden(head.embed(shifted).detach(), features, _Run(past, rotary, mask[None, None]))
        logits, features = head.read(state)
        valid = places[None] + 1 + step < lengths[:, None]
        yield StepResult(logits, valid, 1 + step)


class _Run:
    """Runs modules with attention over the keys and values of all steps so far."""

    def __init__(self, past: dict[int, tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor], mask: Tensor) -> None:
        self._past, self._rotary, self._mask = past, rotary, mask

    def __call__(self, module: Any, hidden: Tensor) -> Tensor:
        output = module(
            hidden_states=hidden,
            position_embeddings=self._rotary,
            attention_mask=self._mask.to(hidden.dtype),
            past_key_values=self,
        )
        return hidden_of(output)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As transformers' cache: these behind those of the steps before."""
        if layer in self._past:
            old_keys, old_values = self._past[layer]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._past[layer] = keys, values
        return keys, values

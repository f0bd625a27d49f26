"""DFlash in torch (Chen et al. 2026): a head that fills a block of masks in one step.

In every layer, keys and values come from the target's projected hidden states, one entry for each token so far, and
from the block; queries come from the block alone: the newest token, and a mask for each token to guess. All of the
block sees all of the context and all of the block, unless a layer is causal.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig
from specexport.heads.modules import DraftHead, FeatureProjection, RunModule, norm_class
from specexport_runtime.abi import CONTEXT_ID


class ContextProjection(FeatureProjection):
    """From hidden states of the target to the context that every layer reads: ``hidden_norm(fc(.))``."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.hidden_norm = norm_class(config)(config.hidden_size)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Features [..., E] of the tapped hidden states [..., H] each."""
        context: Tensor = self.hidden_norm(super().forward(states))
        return context


class BlockHead(DraftHead):
    """A head that reads context entries, which have a feature and no token, and a block of tokens behind them."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        # compute the rows of context entries too, so that no size depends on a value: a CUDA graph can hold it
        self.every_row = False
        for layer, causal in zip(self.body.layers, config.causal_layers, strict=True):
            layer.self_attn.is_causal = causal
            whole = layer.self_attn.o_proj
            layer.self_attn.o_proj = _OfBlock(whole.in_features, whole.out_features, whole.bias is not None)

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """The hidden state behind the last layer [1, T, H]; that of a context entry means nothing.

        A context entry, ``abi.CONTEXT_ID`` in the token ids [T], gives keys and values of its feature in every layer,
        and has no hidden state: what comes behind attention is computed for the block alone. The block's ``features``
        [1, T, E] are not read.
        """
        is_token = input_ids >= 0
        block = places = None
        state = self.embed(input_ids.clamp(min=0))[None]
        if not self.every_row:
            block = is_token.nonzero().flatten()
            counted = is_token.to(torch.int64).cumsum(0)
            places = torch.where(is_token, counted - 1, counted[-1])  # behind the block is a row of zeros
            state = state.index_select(1, block)
        for layer in self.body.layers:
            own = _spread(layer.input_layernorm(state), places)
            layer.self_attn.o_proj.rows = block
            state = state + run(layer.self_attn, torch.where(is_token[None, :, None], own, features))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        return _spread(state, places)


class _OfBlock(nn.Linear):  # type: ignore[misc]  # torch is not followed
    """The linear layer behind attention, for the block's rows alone."""

    rows: Tensor | None = None  # which of the step's rows these are, int64 [n]; None for all

    def forward(self, attended: Tensor) -> Tensor:
        """[1, n, H] of what attention gave for all rows [1, T, ·]."""
        result: Tensor = super().forward(attended if self.rows is None else attended.index_select(1, self.rows))
        return result


def _spread(state: Tensor, places: Tensor | None) -> Tensor:
    """The block's rows [1, n, H] at their places among all rows [1, T, H], zeros elsewhere; all rows as they are."""
    if places is None:
        return state
    zero = state.new_zeros(1, 1, state.shape[2])
    return torch.cat([state, zero], dim=1).index_select(1, places)


def block_states(head: DraftHead, features: Tensor, starts: Tensor, blocks: Tensor) -> Tensor:
    """Hidden states [A, R, H] of blocks of token ids [A, R] over one sequence; no block sees another.

    Attention is as transformers computes it. ``starts`` [A] is the position of each block's first token, at most n: it
    sees the ``features`` [n, E] before it.
    """
    count, width = blocks.shape
    known = len(features)
    at = torch.cat([torch.arange(known), (starts[:, None] + torch.arange(width)).flatten()])
    own = torch.cat([torch.full((known,), -1), torch.arange(count).repeat_interleave(width)])
    begin = torch.cat([torch.zeros(known, dtype=torch.long), starts.repeat_interleave(width)])
    whole = torch.where(own[None] < 0, at[None] < begin[:, None], own[:, None] == own[None])
    rotary = head.body.rotary_emb(features[None], at[None])

    def run(module: Any, hidden: Tensor) -> Tensor:
        seen = whole
        if module.is_causal:
            seen = seen & (at[None] <= at[:, None])
        if module.sliding_window:
            seen = seen & (at[None] > at[:, None] - module.sliding_window)
        seen = seen | torch.eye(len(at), dtype=torch.bool)  # a context entry sees something, so that it is a number
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, float("-inf"))[None, None]
        output: Tensor = module(hidden_states=hidden, position_embeddings=rotary, attention_mask=mask)[0]
        return output

    ids = torch.cat([torch.full((known,), CONTEXT_ID), blocks.flatten()])
    rows = torch.cat([features, features.new_zeros(count * width, features.shape[1])])
    with torch.no_grad():
        state = head.states(ids, rows[None], run)[0, known:]
    return state.view(count, width, -1)


def first_guesses(head: DraftHead, tokens: Tensor, features: Tensor, *, step: int, rows: int) -> Tensor:
    """Logits [A, N] of the token behind each ``step``-th token of a text [T], from the second one on.

    ``features`` [T-1, E] are of all its tokens but the last. ``rows`` is the length of each block, as a draft has them.
    """
    mask = head.head_config.mask_token_id
    starts = torch.arange(1, len(tokens), step)
    blocks = torch.full((len(starts), rows), 0 if mask is None else mask)
    blocks[:, 0] = tokens[starts]
    with torch.no_grad():
        logits: Tensor = head.read(block_states(head, features, starts, blocks)[:, 1])[0]
    return logits

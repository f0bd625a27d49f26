"""What draft heads in torch are made of: transformers' own decoder layers, and what several kinds of heads have."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig
from specexport_runtime.errors import UnsupportedModelError

RunModule = Callable[[Any, Tensor], Tensor]
"""``run(module, its input [B, T, ·])`` gives the output [B, T, H] of a decoder layer, or of the attention of one."""


class FeatureProjection(nn.Module):  # type: ignore[misc]  # torch is not followed
    """From hidden states of the target to the features that a head reads; part of the target's graph."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, count = config.target_hidden_size, len(config.taps)
        normed = config.norm_before_fc or config.fc_norm
        norm = norm_class(config) if normed else nn.Identity
        self.input_norm = norm(count * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([norm(width) for _ in range(count)]) if config.fc_norm else None
        self.fc = nn.Linear(count * width, config.hidden_size, bias=False) if config.projects else None

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Features [..., E] of the tapped hidden states [..., H] each."""
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(list(states), dim=-1) if len(states) > 1 else states[0]
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return joined if self.fc is None else self.fc(joined)


class HeadModule(nn.Module):  # type: ignore[misc]
    """What traces and loads see of a head of any kind."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_config = config

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype


class DraftHead(HeadModule):
    """A head over features: embedding, decoder layers, last norm, LM head. Each kind has its own way through them."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        # transformers' model of the layers' kind, for its layers, rotary embedding and last norm
        self.body = make_body(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)  # token embedding [V, H]
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)  # [N, H]

    @property
    def step_parameters(self) -> int:
        """Parameters that a step multiplies with each of its tokens: all but the embedding."""
        whole = sum(parameter.numel() for parameter in self.parameters())
        return int(whole - self.embed_tokens.weight.numel())

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of the tokens that follow the features."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def states(self, input_ids: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """The hidden state after the last layer [1, T, H] for token ids [T] and features [1, T, E]."""
        return self.hidden(self.embed(input_ids)[None], features, run)

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """The hidden state after the last layer [B, T, H], for features [B, T, E].

        ``embedded`` [B, T, H] is of the token after each feature; ``run`` runs a module with attention.
        """
        raise NotImplementedError

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., N] of hidden states [..., H], and what the next step reads as features [..., E]."""
        normed = self.body.norm(state)
        return self.lm_head(normed), normed if self.head_config.norm_output else state

    def side_by_side(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Both [..., H + E], in the order that the head's first linear layer joins them in."""
        return torch.cat([features, embedded] if self.head_config.feature_first else [embedded, features], dim=-1)


def through_layer(layer: Any, state: Tensor, run: RunModule) -> Tensor:
    """A decoder layer over a hidden state [B, T, H], its attention run by ``run``."""
    state = state + run(layer.self_attn, layer.input_layernorm(state))
    result: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
    return result


def make_body(config: HeadConfig) -> Any:
    """Transformers' model of the layers' kind, without its embedding."""
    from transformers import AutoModel

    body = AutoModel.from_config(body_config(config))
    del body.embed_tokens  # the head's own is beside it
    return body


def body_config(config: HeadConfig) -> Any:
    """Transformers' configuration of a head's layers, with a vocabulary of one token."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.layer_config.items() if not key.endswith("token_id")}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # it has no vocabulary to have them in
    return AutoConfig.for_model(**{**values, **none, "vocab_size": 1, "tie_word_embeddings": False})


def compute_rotation(body: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What turns queries and keys at ``positions`` [B, T]; UnsupportedModelError if layers differ in it."""
    kinds = set(getattr(body.config, "layer_types", None) or ()) & (body.config.rope_parameters or {}).keys()
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"the layers of a head are of kinds {', '.join(sorted(kinds))}, and turn positions in different ways.",
            "draft with `lookup`.",
        )
    found: tuple[Tensor, Tensor] = body.rotary_emb(states, positions, *kinds)
    return found


def norm_class(config: HeadConfig) -> Callable[[int], Any]:
    """What makes the norms of the layers' kind, by width."""
    with torch.device("meta"):
        kind = type(make_body(config).norm)
    eps = float(config.layer_config.get("rms_norm_eps", 1e-6))
    return lambda width: kind(width, eps=eps)


def find_row_heads(input_ids: Tensor, logit_rows: Tensor, cu_new_tokens: Tensor) -> Tensor:
    """Which head each logit row asks, int64 [R]; -1 for the row of an entry without a token.

    A row asks head i if i + 1 tokens stand among its sequence's entries up to it. An entry that has a feature alone has
    ``abi.CONTEXT_ID`` in ``input_ids`` [T]; such entries come first. ``logit_rows`` is [R], ``cu_new_tokens`` [B+1].
    """
    is_token = (input_ids >= 0).to(torch.int64)
    counted = is_token.cumsum(0)
    begins = cu_new_tokens.to(torch.int64)[None]
    begin = torch.where(begins <= logit_rows[:, None], begins, 0).amax(1)
    return counted.index_select(0, logit_rows) - (counted - is_token).index_select(0, begin) - 1


def run_by_head(numbers: Tensor, count: int, answer: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What heads say of the rows that ask them [R, ·], in the order of the rows.

    ``numbers`` int64 [R] has the head that each row asks; a number beyond the last head means the last.
    ``answer(number, mine)`` gives what a head says [n, ·] of the rows ``mine`` int64 [n]. A head that no row asks
    computes nothing.
    """
    numbers = numbers.clamp(0, count - 1)
    parts, rows = [], torch.zeros_like(numbers)
    before = torch.zeros((), dtype=torch.int64)
    for number in range(count):
        mine = numbers == number
        parts.append(answer(number, mine.nonzero().flatten()))
        counted = mine.to(torch.int64)
        rows = rows + counted * (before + counted.cumsum(0) - 1)
        before = before + counted.sum()
    return torch.cat(parts).index_select(0, rows)

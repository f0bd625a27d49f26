"""Draft heads in torch: the published equations over transformers' own decoder layers. What is traced and trained."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from specexport.heads.config import HeadConfig

Attend = Callable[[Any, Tensor], Tensor]
"""``attend(attention module, its input [B, T, ·])`` gives what the module does [B, T, H]."""


class FeatureProjection(nn.Module):  # type: ignore[misc]  # torch is not followed
    """From hidden states of the target to the features that a head reads; part of the target's graph.

    Args:
        config: of the head.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, count = config.target_hidden_size, len(config.taps)
        norm = norm_class(config)
        self.input_norm = norm(count * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([norm(width) for _ in range(count)]) if config.fc_norm else None
        self.fc = nn.Linear(count * width, config.hidden_size, bias=False) if config.projects else None

    def forward(self, states: Seq[Tensor]) -> Tensor:
        """Features [..., E] of the tapped hidden states [..., H] each."""
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(list(states), dim=-1) if len(states) > 1 else states[0]
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return joined if self.fc is None else self.fc(joined)


class DraftHead(nn.Module):  # type: ignore[misc]
    """A head over features: embedding, decoder layers, last norm, LM head.

    Args:
        config: of the head.

    Attributes:
        body: transformers' model of the layers' kind, for its layers, rotary embedding and last norm.
        embed_tokens: token embedding [V, H].
        lm_head: [N, H].
        swap: what its first linear layer joins comes in the other order, feature first.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_config, self.swap = config, False
        self.body = make_body(config)
        width, first = config.hidden_size, self.body.layers[0]
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.kind == "eagle3":
            first.hidden_norm = norm_class(config)(width)
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(first.self_attn, name)
                setattr(first.self_attn, name, nn.Linear(2 * width, old.out_features, bias=old.bias is not None))
        elif config.kind == "eagle":
            bias = bool(config.layer_config.get("bias", True))
            self.fc = nn.Linear(config.target_hidden_size + width, width, bias=bias)
            first.input_layernorm = nn.Identity()  # the file has none
            self.body.norm = nn.Identity()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of the tokens that follow the features."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def run(self, input_ids: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """The hidden state behind the last layer [1, T, H] for token ids [T] and features [1, T, E]."""
        return self.hidden(self.embed(input_ids)[None], features, attend)

    def hidden(self, embedded: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """The hidden state behind the last layer [B, T, H].

        Args:
            embedded: of the token behind each feature [B, T, H].
            features: [B, T, E].
            attend: runs an attention module.
        """
        layers = list(self.body.layers)
        if self.head_config.kind == "eagle3":
            state = self._join(layers.pop(0), embedded, features, attend)
        else:
            state = self.fc(self._side_by_side(embedded, features))
        for layer in layers:
            state = state + attend(layer.self_attn, layer.input_layernorm(state))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        return state

    def _join(self, layer: Any, embedded: Tensor, features: Tensor, attend: Attend) -> Tensor:
        """EAGLE-3's first layer: its attention reads embedding and feature side by side."""
        normed = layer.hidden_norm(features)
        both = self._side_by_side(layer.input_layernorm(embedded), normed)
        residual = normed if self.head_config.norm_before_residual else features
        state = residual + attend(layer.self_attn, both)
        joined: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
        return joined

    def _side_by_side(self, embedded: Tensor, features: Tensor) -> Tensor:
        return torch.cat([features, embedded] if self.swap else [embedded, features], dim=-1)

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., N] of hidden states [..., H], and what the next step reads as features [..., E]."""
        normed = self.body.norm(state)
        return self.lm_head(normed), normed if self.head_config.norm_output else state


def make_body(config: HeadConfig) -> Any:
    """Transformers' model of the layers' kind, without its embedding."""
    from transformers import AutoConfig, AutoModel

    values = {key: value for key, value in config.layer_config.items() if not key.endswith("token_id")}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # it has no vocabulary to have them in
    made = AutoConfig.for_model(**{**values, **none, "vocab_size": 1, "tie_word_embeddings": False})
    body = AutoModel.from_config(made)
    del body.embed_tokens  # the head's own is beside it
    return body


def norm_class(config: HeadConfig) -> Callable[[int], Any]:
    """What makes the norms of the layers' kind, by width."""
    with torch.device("meta"):
        kind = type(make_body(config).norm)
    eps = float(config.layer_config.get("rms_norm_eps", 1e-6))
    return lambda width: kind(width, eps=eps)

"""DFlash by its published equations (Chen et al. 2026), in plain torch: the whole sequence at once, nothing packed.

``ctx = hidden_norm(fc(states))``; in every layer, keys and values come from ``[ctx, norm(block)]`` and queries from the
block. The block is the newest token and a mask for each token to guess; it sees the context and all of itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.references import reference_head
from tests.support.references.reference_head import mlp, named, norm


class BlockSpec(NamedTuple):
    """What a reference needs to know; tensors are by their names in z-lab's files."""

    tensors: Mapping[str, Tensor]
    taps: Sequence[int]
    layers: int
    mask: int
    block_size: int
    causal: Sequence[bool]
    window: int = 0
    """Of the layers that are causal; 0 for none."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-6
    theta: float = 10000.0
    ids: Sequence[int] | None = None


def context_of(spec: BlockSpec, states: Sequence[Tensor]) -> Tensor:
    """Context [n, E] of the target's hidden states [n, H] at the taps."""
    joined = torch.cat(list(states), -1) @ spec.tensors["fc.weight"].T
    return norm(joined, spec.tensors["hidden_norm.weight"], spec.eps)


def attention(spec: BlockSpec, layer: int, context: Tensor, x: Tensor) -> Tensor:
    both, known = torch.cat([context, x]), len(context)
    query, key = torch.arange(known, len(both))[:, None], torch.arange(len(both))[None]
    hidden = (key > query) | (query - key >= (spec.window or len(both)))
    return reference_head.attention(spec, layer, both, known, hidden & spec.causal[layer])


def forward(spec: BlockSpec, context: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [R, N] and the hidden states in front of the last norm [R, H] of a block after a context [n, E]."""
    t = spec.tensors
    h = t["embed_tokens.weight"][torch.tensor(list(block))]
    for layer in range(spec.layers):
        h = h + attention(spec, layer, context, norm(h, t[f"layers.{layer}.input_layernorm.weight"], spec.eps))
        h = h + mlp(spec, layer, norm(h, t[f"layers.{layer}.post_attention_layernorm.weight"], spec.eps))
    return norm(h, t["norm.weight"], spec.eps) @ t["lm_head.weight"].T, h


def draft(spec: BlockSpec, target: Any, tokens: Sequence[int], count: int, limit: int) -> list[int]:
    """Greedy drafts after ``tokens``, all but the last of them read; ids from ``limit`` on are drafted as 0."""
    with torch.no_grad():
        hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        context = context_of(spec, [hidden[tap][0] for tap in spec.taps])
        logits, _ = forward(spec, context, [tokens[-1], *[spec.mask] * count])
    return named(spec, logits[1:].argmax(-1).tolist(), limit)

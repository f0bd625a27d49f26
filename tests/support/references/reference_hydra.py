"""Hydra heads by their published equations, in plain torch (Ankner et al. 2024): nothing of the compiler.

``x_i = [h_t, emb(t+1), ..., emb(t+1+i)]``; ``s = R x + b + SiLU(W x + c)``; ``s = s + SiLU(U s + d)`` for each further
block; ``logits = V s + e``. In Hydra++ ``h_t`` is what a decoder layer and a norm make of the hidden states up to t.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.references.reference_head import Spec, attention, mlp, norm


class HydraSpec(NamedTuple):
    """What a reference needs to know; tensors are by the names that their authors' file would have without dropout."""

    tensors: Mapping[str, Tensor]
    heads: int
    blocks: int
    taps: Sequence[int]
    prefix: Spec | None = None


def stream(spec: HydraSpec, features: Tensor) -> Tensor:
    """What the heads read, before its norm [T, H], of hidden states [T, H]."""
    if spec.prefix is None:
        return features
    own = spec.prefix
    weight = own.tensors
    h = features + attention(own, 0, norm(features, weight["layers.0.input_layernorm.weight"], own.eps))
    return h + mlp(own, 0, norm(h, weight["layers.0.post_attention_layernorm.weight"], own.eps))


def guess(spec: HydraSpec, state: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [V] of the head that reads so many tokens, over what :func:`stream` gives for one place [H]."""
    t, head = spec.tensors, len(tokens) - 1

    def linear(name: str, x: Tensor) -> Tensor:
        return t[f"{name}.weight"] @ x + t[f"{name}.bias"]

    if spec.prefix is not None:
        state = norm(state, spec.prefix.tensors["norm.weight"], spec.prefix.eps)
    x = torch.cat([state, *(t["input_embed_fn.weight"][token] for token in tokens)])
    name = f"hydra_mlp.{head}"
    s = linear(f"{name}.0.res_connection", x) + functional.silu(linear(f"{name}.0.linear", x))
    for block in range(1, spec.blocks):
        s = s + functional.silu(linear(f"{name}.{block}.linear", s))
    return linear(f"hydra_lm_head.{head}", s)


def draft(spec: HydraSpec, target: Any, tokens: Sequence[int], count: int, limit: int) -> list[int]:
    """Greedy drafts after ``tokens``, of which the target has read all but the last: everything is computed anew."""
    with torch.no_grad():
        output = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True)
        features = output.hidden_states[spec.taps[0]][0]
        state, window = stream(spec, features)[-1], [tokens[-1]]
        for _ in range(min(count, spec.heads)):
            token = int(guess(spec, state, window).argmax())
            window.append(token if token < limit else 0)
    return window[1:]

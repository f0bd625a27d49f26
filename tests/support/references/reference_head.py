"""Draft heads by their published equations, in plain torch: nothing of the compiler, nothing of transformers' layers.

EAGLE-3 (Li et al. 2025): ``g = fc(norms(states))``; the first attention reads ``[norm(emb(t_{i+1})), norm(g_i)]``.
EAGLE (Li et al. 2024): ``fc([emb(t_{i+1}), f_i])`` goes into a layer without a norm in front, with no norm after.
Medusa (Cai et al. 2024): head i guesses token t+i+2 from ``h_t`` alone, ``W2 (SiLU(W1 h + b) + h)``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Spec(NamedTuple):
    """What a reference needs to know; tensors are by their names in the speculators format."""

    kind: str
    tensors: Mapping[str, Tensor]
    taps: Sequence[int]
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-6
    theta: float = 10000.0
    norm_before_residual: bool = False
    norm_output: bool = False
    mask: tuple[int, Tensor] | None = None
    ids: Sequence[int] | None = None
    draft_heads: int = 0


def doubled(spec: Any) -> Any:
    """The spec in float64: what a reference rounds is then no part of a difference."""
    return spec._replace(tensors={name: tensor.double() for name, tensor in spec.tensors.items()})


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, spec: Spec) -> Tensor:
    half = spec.head_dim // 2
    rate = spec.theta ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[0])[:, None] * rate
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(spec: Any, layer: int, x: Tensor, known: int = 0, hidden: Tensor | None = None) -> Tensor:
    """Of the rows from ``known`` on, each of which sees all up to itself, or what is not ``hidden``."""

    def part(name: str, count: int) -> Tensor:
        found = x @ spec.tensors[f"layers.{layer}.self_attn.{name}_proj.weight"].T
        found = found.view(len(x), count, spec.head_dim)
        if name != "v":
            weight = spec.tensors.get(f"layers.{layer}.self_attn.{name}_norm.weight")
            found = rotate(norm(found, weight, spec.eps), spec)
        return found

    q, k, v = part("q", spec.heads)[known:], part("k", spec.kv_heads), part("v", spec.kv_heads)
    k, v = (each.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) if hidden is None else hidden
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return mixed @ spec.tensors[f"layers.{layer}.self_attn.o_proj.weight"].T


def mlp(spec: Spec, layer: int, x: Tensor) -> Tensor:
    gate, up, down = (spec.tensors[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def project(spec: Spec, states: Sequence[Tensor]) -> Tensor:
    """Features [T, E] of the target's hidden states [T, H] at the taps."""
    t = spec.tensors
    if spec.kind != "eagle3":
        return states[0]
    if "fc_norm.0.weight" in t:
        states = [norm(state, t[f"fc_norm.{i}.weight"], spec.eps) for i, state in enumerate(states)]
    joined = norm(torch.cat(list(states), -1), t.get("input_norm.weight"), spec.eps)
    return joined @ t["fc.weight"].T


def forward(spec: Spec, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, N] and what is handed on [T, E]; ``tokens[i]`` follows the token of ``features[i]``."""
    t = spec.tensors
    if spec.kind == "medusa":  # a token is the number of a head; one beyond the last means that
        rows = [medusa(spec, min(n, spec.draft_heads - 1), each) for n, each in zip(tokens, features, strict=True)]
        return torch.stack(rows), features
    embedded = t["embed_tokens.weight"][torch.tensor(list(tokens))]
    for layer in range(spec.layers):

        def weight(name: str, layer: int = layer) -> Tensor | None:
            return t.get(f"layers.{layer}.{name}.weight")

        if layer == 0 and spec.kind == "eagle3":
            normed = norm(features, weight("hidden_norm"), spec.eps)
            x = torch.cat([norm(embedded, weight("input_layernorm"), spec.eps), normed], dim=-1)
            h = (normed if spec.norm_before_residual else features) + attention(spec, 0, x)
        else:
            if layer == 0:
                h = torch.cat([embedded, features], dim=-1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
            h = h + attention(spec, layer, norm(h, weight("input_layernorm"), spec.eps))
        h = h + mlp(spec, layer, norm(h, weight("post_attention_layernorm"), spec.eps))
    last = norm(h, t.get("norm.weight"), spec.eps)
    return last @ t["lm_head.weight"].T, last if spec.norm_output else h


def medusa(spec: Spec, head: int, hidden: Tensor) -> Tensor:
    """Logits [N] of one head over one hidden state [H]."""
    t = spec.tensors
    for layer in range(spec.layers):
        name = f"blocks.{head}.layers.{layer}"
        hidden = hidden + functional.silu(t[f"{name}.weight"] @ hidden + t.get(f"{name}.bias", 0.0))
    return t[f"lm_heads.{head}.weight"] @ hidden


def named(spec: Any, rows: list[int], limit: int, stand_in: int = 0) -> list[int]:
    """Token ids of rows of logits; ``stand_in`` where the tokenizer cannot produce one."""
    ids = rows if spec.ids is None else [spec.ids[row] for row in rows]
    return [token if token < limit else stand_in for token in ids]


def draft(spec: Spec, target: Any, tokens: Sequence[int], count: int, limit: int) -> list[int]:
    """Greedy drafts after ``tokens``, all but the last read; from ``limit`` on the head's first id is drafted."""
    stand_in = 0 if spec.ids is None else spec.ids[0]
    with torch.no_grad():
        output = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True)
        if spec.kind != "eagle3":
            states = [output.hidden_states[-1][0]]
        else:
            states = [output.hidden_states[tap][0] for tap in spec.taps]
        features, fed = project(spec, states), list(tokens[1:])
        found: list[int] = []
        if spec.kind == "medusa":  # all from the last hidden state that is there
            rows = [int(medusa(spec, i, features[-1]).argmax()) for i in range(min(count, spec.draft_heads))]
            return named(spec, rows, limit, stand_in)
        if spec.mask is not None:  # P-EAGLE: all in one forward pass
            token, hidden = spec.mask
            unknown = project(spec, list(hidden.flatten().split(states[0].shape[1])))
            features = torch.cat([features, unknown.expand(count - 1, -1)])
            logits, _ = forward(spec, [*fed, *[token] * (count - 1)], features)
            return named(spec, logits[-count:].argmax(-1).tolist(), limit, stand_in)
        for _ in range(count):
            logits, handed_on = forward(spec, fed, features)
            found += named(spec, [int(logits[-1].argmax())], limit, stand_in)
            fed.append(found[-1])
            features = torch.cat([features, handed_on[-1:]])
    return found

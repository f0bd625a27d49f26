"""The MTP module of Qwen3-Next and Qwen3.5 in plain torch, from its tensors as they are stored, without transformers.

``h' = layer(fc [norm(emb(t_{i+1})), norm(h_i)])``; the layer has attention whose output goes through a sigmoid gate, of
which queries and keys are normed and rotated in part, and an MLP, or experts beside one that all tokens share. Norms
multiply by one more than their weight. What the LM head reads is what is handed on.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class QwenModule:
    def __init__(self, stored: Mapping[str, Tensor], config: Mapping[str, Any], table: Tensor, lm_head: Tensor) -> None:
        self.t = {name.removeprefix("mtp."): value for name, value in stored.items() if name.startswith("mtp.")}
        self.c, self.table, self.lm_head = config, table, lm_head

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and what is handed on [T, H]; ``tokens[i]`` follows the token of ``features[i]``."""
        embedded = self._norm(self.table[tokens], "pre_fc_norm_embedding")
        state = torch.cat([embedded, self._norm(features, "pre_fc_norm_hidden")], -1) @ self.t["fc.weight"].T
        state = state + self._attention(self._norm(state, "layers.0.input_layernorm"))
        state = state + self._mlp(self._norm(state, "layers.0.post_attention_layernorm"))
        last = self._norm(state, "norm")
        return last @ self.lm_head.T, last

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return x * scale * (1 + self.t[f"{name}.weight"])

    def _attention(self, x: Tensor) -> Tensor:
        heads, groups, size = (self.c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

        def project(name: str) -> Tensor:
            return x @ self.t[f"layers.0.self_attn.{name}_proj.weight"].T

        q, gate = project("q").view(len(x), heads, 2 * size).split(size, -1)
        k, v = (project(name).view(len(x), groups, size) for name in "kv")
        q, k = (
            self._rotate(self._norm(q, "layers.0.self_attn.q_norm")),
            self._rotate(self._norm(k, "layers.0.self_attn.k_norm")),
        )
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        return (mixed * gate.sigmoid()).flatten(1) @ self.t["layers.0.self_attn.o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """The first part of each head is rotated, the rest is not."""
        rope = self.c["rope_parameters"]
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        rates = rope["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(len(x))[:, None, None] * rates
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.cat([*turned, rest], -1)

    def _mlp(self, x: Tensor) -> Tensor:
        place = "layers.0.mlp"
        if f"{place}.gate.weight" not in self.t:
            return self._gated(x, place)
        chances = (x @ self.t[f"{place}.gate.weight"].T).softmax(-1)
        best = chances.topk(self.c["num_experts_per_tok"], -1)
        found = (x @ self.t[f"{place}.shared_expert_gate.weight"].T).sigmoid() * self._gated(
            x, f"{place}.shared_expert"
        )
        for row, (values, experts) in enumerate(zip(best.values, best.indices.tolist(), strict=True)):
            for weight, expert in zip(values / values.sum(), experts, strict=True):
                found[row] += weight * self._gated(x[row], f"{place}.experts.{expert}")
        return found

    def _gated(self, x: Tensor, place: str) -> Tensor:
        if f"{place}.up_proj.weight" in self.t:
            gate, up, down = (self.t[f"{place}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        else:  # all experts in one tensor
            place, _, expert = place.rpartition(".")
            gate, up = self.t[f"{place}.gate_up_proj"][int(expert)].chunk(2)
            down = self.t[f"{place}.down_proj"][int(expert)]
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

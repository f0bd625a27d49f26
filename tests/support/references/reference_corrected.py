"""DFlash 2 and DSpark by their published equations, in plain torch: the whole sequence at once, nothing packed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.references.reference_dflash import BlockSpec, attention, context_of
from tests.support.references.reference_head import mlp, norm


class CorrectedSpec(NamedTuple):
    """A block, and what comes beside it; names of tensors are those of the files."""

    block: BlockSpec
    from_anchor: bool = False
    group: int = 0
    """Values of a convolution's group; 0 for a head without convolutions."""
    most: int = 0
    """Tokens of the selector; 0 for a head without one."""
    scale: float = 1.0
    multiplier: float = 1.0
    softcap: float = 0.0
    markov: str = ""
    confidence: bool = False
    """Whether the confidence head reads the token in front."""


def convolved(spec: CorrectedSpec, name: str, side: int, given: Tensor, rows: Tensor) -> Tensor:
    """``sum_j (base[s, j, c] + d[t, s, j, c // group]) z[t - j, c]``, and nothing in front of the first row."""
    t = spec.block.tensors
    base = t[f"{name}.base_kernel"]
    _, taps, width = base.shape
    dynamic = (given @ t[f"{name}.kernel_projection.weight"].T).view(len(given), 2, taps, width // spec.group)
    found = torch.zeros_like(rows)
    for place in range(len(rows)):
        for tap in range(taps):
            if place >= tap:
                for value in range(width):
                    weight = base[side, tap, value] + dynamic[place, side, tap, value // spec.group]
                    found[place, value] += weight * rows[place - tap, value]
    return found


def states_of(spec: CorrectedSpec, context: Tensor, block: Sequence[int]) -> Tensor:
    """The hidden states after the last norm [R, H] of a block after a context [n, E]."""
    base, t = spec.block, spec.block.tensors
    h = t["embed_tokens.weight"][torch.tensor(list(block))] * spec.scale
    for layer in range(base.layers):
        prefix = f"layers.{layer}"

        def mixed(part: str, side: int, given: Tensor, rows: Tensor, prefix: str = prefix) -> Tensor:
            return convolved(spec, f"{prefix}.{part}_conv", side, given, rows) if spec.group else rows

        a = norm(h, t[f"{prefix}.input_layernorm.weight"], base.eps)
        h = h + mixed("attention", 1, a, attention(base, layer, context, mixed("attention", 0, a, a)))
        a = norm(h, t[f"{prefix}.post_attention_layernorm.weight"], base.eps)
        h = h + mixed("mlp", 1, a, mlp(base, layer, mixed("mlp", 0, a, a)))
    return norm(h, t["norm.weight"], base.eps)


def logits_of(spec: CorrectedSpec, states: Tensor) -> Tensor:
    """U [R, N], before any correction."""
    logits = states @ spec.block.tensors["lm_head.weight"].T * spec.multiplier
    return spec.softcap * torch.tanh(logits / spec.softcap) if spec.softcap else logits


class Walk:
    """The places of a draft in turn; each call gives the logits [V] of the next place, by token id."""

    def __init__(
        self, spec: CorrectedSpec, context: Tensor, newest: int, count: int, limit: int | None = None
    ) -> None:  # ids from ``limit`` on, which the tokenizer cannot produce, are left out
        block = [newest, *[spec.block.mask] * (count - 1 if spec.from_anchor else count)]
        self.spec, self.states = spec, states_of(spec, context, block)[-count:]
        self.logits, self.place = logits_of(spec, self.states), 0
        self.ids = torch.arange(self.logits.shape[1]) if spec.block.ids is None else torch.tensor(spec.block.ids)
        if limit is not None:
            self.logits = self.logits.masked_fill(self.ids >= limit, float("-inf"))
        self.memory = torch.zeros(1)

    def __call__(self, before: int) -> Tensor:
        spec, t = self.spec, self.spec.block.tensors
        row, h = self.logits[self.place], self.states[self.place]
        ids = self.ids
        self.place += 1
        if spec.most:
            best = row.argsort(descending=True)[: spec.most]
            query = t["candidate_selector.hidden_projection.weight"] @ h
            first = t["candidate_selector.predecessor_codebook"][before]
            scores = torch.full_like(row, float("-inf"))
            for slot in best.tolist():
                second = t["candidate_selector.successor_codebook"][ids[slot]]
                scores[slot] = row[slot] + (first * query * second).sum()
            row = scores
        if spec.markov:
            row = row + t["markov_head.markov_w2.weight"] @ self._vector(before, h)
        found = torch.full((spec_vocab(spec),), float("-inf"), dtype=row.dtype)
        found[ids] = row
        return found

    def _vector(self, before: int, h: Tensor) -> Tensor:
        t, w = self.spec.block.tensors, self.spec.block.tensors["markov_head.markov_w1.weight"][before]
        if self.spec.markov == "gated":
            gate = t["markov_head.gate_proj.weight"] @ torch.cat([h, w]) + t["markov_head.gate_proj.bias"]
            return torch.sigmoid(gate) * w
        if self.spec.markov == "rnn":
            s = torch.zeros_like(w) if self.place == 1 else self.memory
            joint = t["markov_head.joint_proj.weight"] @ torch.cat([s, w, h]) + t["markov_head.joint_proj.bias"]
            g, c, o = joint.split(len(w))
            self.memory = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
            return torch.tanh(o)
        return w

    def confidence(self, before: int) -> float:
        t, h = self.spec.block.tensors, self.states[self.place]
        if self.spec.confidence:
            h = torch.cat([h, t["markov_head.markov_w1.weight"][before]])
        return float(torch.sigmoid(t["confidence_head.proj.weight"] @ h + t.get("confidence_head.proj.bias", 0)))


def spec_vocab(spec: CorrectedSpec) -> int:
    return len(spec.block.tensors["embed_tokens.weight"])


def target_context(spec: CorrectedSpec, target: Any, tokens: Sequence[int]) -> Tensor:
    hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
    return context_of(spec.block, [hidden[tap][0] for tap in spec.block.taps])


def draft(spec: CorrectedSpec, target: Any, tokens: Sequence[int], count: int, limit: int) -> list[int]:
    """Greedy drafts after ``tokens`` of ids below ``limit``: everything is computed anew."""
    with torch.no_grad():
        walk = Walk(spec, target_context(spec, target, tokens), tokens[-1], count, limit)
        found = [tokens[-1]]
        for _ in range(count):
            found.append(int(walk(found[-1]).argmax()))
    return found[1:]

"""A Llama with blocks of its residual stream left out: growing it, forward pass, similarity, choice of layers.

A model of N layers has 2N blocks, the attention and the MLP of each layer, and each adds its output to one stream of
hidden states. Leaving a block out leaves the stream as it is, so a subset of the blocks is a model too: the draft of
*Draft on the Fly* (Metel et al. 2024), and, with random subsets, layer dropout in training.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM


class Kept(NamedTuple):
    """Which blocks of a model run, one flag a layer."""

    attention: tuple[bool, ...]  # whether layer i's attention runs
    mlp: tuple[bool, ...]  # whether layer i's MLP runs

    @classmethod
    def every(cls, layers: int) -> Kept:
        """The whole model."""
        return cls((True,) * layers, (True,) * layers)


class Passed(NamedTuple):
    """What a forward pass gives."""

    logits: torch.Tensor  # shape (rows, length, vocabulary), float32 or the autocast type
    # shape (layers, rows, length): cosine between the stream before and after each attention block that ran; 1 where it
    # did not run. None unless asked for
    similarity: torch.Tensor | None


def grow(model: LlamaForCausalLM, pattern: str) -> LlamaForCausalLM:
    """Puts copies of layers into a model without changing what it computes; the deeper model shares no weights with it.

    ``pattern`` starts with ``o``, an old layer; each ``i`` is a copy of the old layer before it whose attention and MLP
    outputs start at zero. It is repeated until the old layers are used up.
    """
    if not pattern.startswith("o") or set(pattern) - {"o", "i"}:
        raise ValueError(f"--pattern {pattern!r}: use the letters o and i, and begin with o")
    old, layers = list(model.model.layers), []
    taken = 0
    while taken < len(old):
        for letter in pattern:
            if letter == "o" and taken == len(old):
                break
            taken += letter == "o"
            layer = copy.deepcopy(old[taken - 1])
            if letter == "i":
                torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
                torch.nn.init.zeros_(layer.mlp.down_proj.weight)
            layer.self_attn.layer_idx = len(layers)
            layers.append(layer)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    config.layer_types = None
    grown = LlamaForCausalLM(config)
    state = {n: t for n, t in model.state_dict().items() if ".layers." not in n}
    state |= {f"model.layers.{i}.{n}": t for i, layer in enumerate(layers) for n, t in layer.state_dict().items()}
    grown.load_state_dict(state)
    return grown


def run_blocks(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    kept: Kept,
    *,
    # keys and values of the positions before ``start``, which this pass adds to; one token at a time then
    cache: DynamicCache | None = None,
    start: int = 0,  # position of the first token
    similarity: bool = False,  # whether to measure the attention blocks' similarity
) -> Passed:
    """Run the chosen blocks of a model on token ids of shape (rows, length)."""
    inner = model.model
    stream = inner.embed_tokens(tokens)
    positions = torch.arange(start, start + tokens.shape[1])[None]
    rotary = inner.rotary_emb(stream, positions)
    found = []
    for layer, attention, mlp in zip(inner.layers, kept.attention, kept.mlp, strict=True):
        before = stream
        if attention:
            normed = layer.input_layernorm(stream)
            mixed = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None, past_key_values=cache)[0]
            stream = stream + mixed
        if similarity:
            found.append(functional.cosine_similarity(before.float(), stream.float(), dim=-1))
        if mlp:
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
    return Passed(model.lm_head(inner.norm(stream)), torch.stack(found) if similarity else None)


def choose_blocks(similarity: torch.Tensor, threshold: float | None, period: int | None, keep_last: int | None) -> Kept:
    """The blocks that the draft keeps, by the paper's three rules; None switches a rule off.

    Attention blocks whose ``similarity``, a mean over a prompt, shape (layers,), is above ``threshold`` are left out;
    so is every ``period``-th layer, attention and MLP. The last ``keep_last`` layers stay whole.
    """
    layers = len(similarity)
    attention, mlp = [True] * layers, [True] * layers
    for i in range(layers - (keep_last or 0)):
        periodic = period is not None and (i + 1) % period == 0
        mlp[i] = not periodic
        attention[i] = not periodic and not (threshold is not None and float(similarity[i]) > threshold)
    return Kept(tuple(attention), tuple(mlp))

"""Tiny random DFlash 2 and DSpark heads in each dialect, written as their own writers write them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.tiny_dflash import MASK, tensors
from tests.support.models.tiny_heads import HIDDEN, IDS, LAYER, VOCAB, mapping, whole, write
from tests.support.references.reference_corrected import CorrectedSpec
from tests.support.references.reference_dflash import BlockSpec

RANK, GROUP = 8, 16
PAIR = 3.0
"""Size of what the token in front changes: enough to change the best token at most places."""


def _random(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, size=1.0: torch.randn(*shape, generator=generator) * size


def convolutions(layers: int, taps: int, seed: int = 40) -> dict[str, Tensor]:
    random, made = _random(seed), {}
    for layer in range(layers):
        for part in ("attention", "mlp"):
            name = f"layers.{layer}.{part}_conv"
            base = random(2, taps, HIDDEN, size=0.3)
            base[:, 0] += 1
            made[f"{name}.base_kernel"] = base
            made[f"{name}.kernel_projection.weight"] = random(
                2 * taps * HIDDEN // GROUP, HIDDEN, size=0.3 * HIDDEN**-0.5
            )
    return made


def selector(seed: int = 41) -> dict[str, Tensor]:
    random = _random(seed)
    return {
        "candidate_selector.predecessor_codebook": random(VOCAB, RANK),
        "candidate_selector.successor_codebook": random(VOCAB, RANK, size=PAIR * RANK**-0.5),
        "candidate_selector.hidden_projection.weight": random(RANK, HIDDEN, size=HIDDEN**-0.5),
    }


def markov(kind: str, rows: int, *, confidence: int | None = None, seed: int = 42) -> dict[str, Tensor]:
    """``confidence``: how wide what the confidence head reads is; None for a head without one."""
    random = _random(seed)
    made = {
        "markov_head.markov_w1.weight": random(VOCAB, RANK),
        "markov_head.markov_w2.weight": random(rows, RANK, size=PAIR * RANK**-0.5),
    }
    if kind == "gated":
        made["markov_head.gate_proj.weight"] = random(RANK, HIDDEN + RANK, size=0.3)
        made["markov_head.gate_proj.bias"] = random(RANK)
    if kind == "rnn":
        made["markov_head.joint_proj.weight"] = random(3 * RANK, 2 * RANK + HIDDEN, size=0.2)
        made["markov_head.joint_proj.bias"] = random(3 * RANK)
    if confidence is not None:
        made["confidence_head.proj.weight"] = random(1, confidence, size=confidence**-0.5)
    return made


def zlab2(folder: Path, target: Any) -> CorrectedSpec:
    """Keys in ``dflash_config``, the target's tables, windows that are not causal, scales and a softcap."""
    own = tensors(2, 2, seed=20) | convolutions(2, 2) | selector()
    config = {
        **LAYER, "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True,
        "is_causal": False, "input_embedding_scale": 0.8, "output_multiplier": 1.5, "final_logit_softcapping": 12.0,
        "dflash_config": {
            "mask_token_id": MASK, "target_layer_ids": [1, 3], "block_size": 8, "conv_kernel_size": 2,
            "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 16,
        },
    }  # fmt: skip
    write(folder, config, own)
    block = BlockSpec(whole(own, target), (2, 4), 2, MASK, 8, [False] * 2)
    return CorrectedSpec(block, group=GROUP, most=16, scale=0.8, multiplier=1.5, softcap=12.0)


def speculators2(folder: Path, target: Any) -> CorrectedSpec:
    """A reduced vocabulary, and convolutions of three rows."""
    own = tensors(1, 2, rows=len(IDS), seed=21) | convolutions(1, 3) | selector()
    config = {
        "architectures": ["DFlash2Speculator"], "speculators_model_type": "dflash2", "block_size": 6,
        "transformer_layer_config": {**LAYER, "model_type": "qwen3", "num_hidden_layers": 1},
        "draft_vocab_size": len(IDS), "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 4],
        "conv_kernel_size": 3, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 10,
    }  # fmt: skip
    write(folder, config, own | mapping(IDS))
    block = BlockSpec(whole(own, target), (1, 4), 1, MASK, 6, [False], ids=IDS)
    return CorrectedSpec(block, group=GROUP, most=10)


def deepspec(folder: Path, target: Any, kind: str = "vanilla", **changes: Any) -> CorrectedSpec:
    """The first place guesses, copies of the target's tables, a confidence head over hidden state and token."""
    own = whole(tensors(2, 2, seed=22), target) | markov(kind, VOCAB, confidence=HIDDEN + RANK)
    config = {
        **LAYER, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "block_size": 7, "mask_token_id": MASK, "target_layer_ids": [0, 3], "markov_rank": RANK,
        "markov_head_type": kind, "enable_confidence_head": True, "confidence_head_with_markov": True, **changes,
    }  # fmt: skip
    write(folder, config, own)
    block = BlockSpec(own, (1, 4), 2, MASK, 7, [False] * 2)
    anchor = changes.get("sample_from_anchor", True)
    return CorrectedSpec(block, from_anchor=anchor, markov=kind, confidence=True)


def gated(folder: Path, target: Any) -> CorrectedSpec:
    return deepspec(folder, target, "gated", sample_from_anchor=False)


def rnn(folder: Path, target: Any) -> CorrectedSpec:
    return deepspec(folder, target, "rnn")


def speculators_spark(folder: Path, target: Any) -> CorrectedSpec:
    """A reduced vocabulary in an order of its own; the first place guesses nothing unless the files say so."""
    own = tensors(1, 2, rows=len(IDS), seed=23) | markov("vanilla", len(IDS), confidence=HIDDEN)
    config = {
        "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "block_size": 5,
        "transformer_layer_config": {**LAYER, "model_type": "qwen3", "num_hidden_layers": 1},
        "draft_vocab_size": len(IDS), "aux_hidden_state_layer_ids": [1, 4],
        "dspark_config": {"noise_token_id": MASK, "markov_rank": RANK, "markov_head_type": "vanilla"},
    }  # fmt: skip
    ids = IDS[::-1]
    write(folder, config, own | mapping(ids))
    block = BlockSpec(whole(own, target), (1, 4), 1, MASK, 5, [False], ids=ids)
    return CorrectedSpec(block, markov="vanilla")


DIALECTS = {
    "z-lab 2": zlab2, "speculators 2": speculators2, "deepspec": deepspec, "gated": gated, "rnn": rnn,
    "speculators spark": speculators_spark,
}  # fmt: skip

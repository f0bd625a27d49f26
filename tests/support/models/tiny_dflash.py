"""Tiny random DFlash heads in each dialect, written as their own writers write them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.tiny_heads import HIDDEN, IDS, LAYER, MLP, mapping, whole, write
from tests.support.references.reference_dflash import BlockSpec

MASK = 318


def tensors(layers: int, taps: int, *, rows: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Weights by z-lab's names; an LM head of its own where it has ``rows``."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.2 * columns**-0.5

    def vector(size: int = HIDDEN) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    made = {"fc.weight": matrix(HIDDEN, taps * HIDDEN), "hidden_norm.weight": vector(), "norm.weight": vector()}
    for layer in range(layers):
        sizes = {"q_proj": (64, HIDDEN), "k_proj": (32, HIDDEN), "v_proj": (32, HIDDEN), "o_proj": (HIDDEN, 64)}
        made |= {f"layers.{layer}.self_attn.{name}.weight": matrix(*size) for name, size in sizes.items()}
        made |= {f"layers.{layer}.self_attn.{name}_norm.weight": vector(16) for name in "qk"}
        made |= {f"layers.{layer}.mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
        made[f"layers.{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        made |= {f"layers.{layer}.{name}_layernorm.weight": vector() for name in ("input", "post_attention")}
    if rows is not None:
        made["lm_head.weight"] = matrix(rows, HIDDEN)
    return made


def zlab(folder: Path, target: Any) -> BlockSpec:
    """Keys of its own in ``dflash_config``, layers whose output is read, no tables."""
    own = tensors(3, 3, seed=10)
    config = {
        **LAYER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 3, "block_size": 8,
        "layer_types": ["full_attention"] * 3, "num_target_layers": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]},
    }  # fmt: skip
    write(folder, config, own)
    return BlockSpec(whole(own, target), (1, 3, 5), 3, MASK, 8, [False] * 3)


def sliding(folder: Path, target: Any) -> BlockSpec:
    """Layers with a window, which are causal, before one that sees everything; all keys in ``dflash_config``."""
    own = tensors(3, 2, seed=11)
    config = {
        **LAYER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [4, 1], "block_size": 6},
    }  # fmt: skip
    write(folder, config, own)
    return BlockSpec(whole(own, target), (5, 2), 3, MASK, 6, [True, True, False], window=6)


def speculators(folder: Path, target: Any) -> BlockSpec:
    """Hidden states counted at the top level, a reduced vocabulary, and a block that limits the draft."""
    own = tensors(2, 2, rows=len(IDS), seed=12)
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 3,
        "transformer_layer_config": {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2},
        "draft_vocab_size": len(IDS), "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 4],
        "sliding_window_non_causal": False,
        "speculators_config": {"proposal_methods": [{"accept_tolerance": 0.0, "verifier_accept_k": 1}]},
    }  # fmt: skip
    write(folder, config, own | mapping(IDS) | {"verifier_norm.weight": torch.ones(HIDDEN)})
    return BlockSpec(whole(own, target), (1, 4), 2, MASK, 3, [False] * 2, ids=IDS)


DIALECTS = {"z-lab": zlab, "sliding": sliding, "speculators": speculators}

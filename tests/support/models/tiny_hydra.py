"""Tiny random Hydra heads, written as their authors write them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.tiny_heads import HIDDEN, LAYERS, VOCAB, tensors, write
from tests.support.references.reference_head import Spec
from tests.support.references.reference_hydra import HydraSpec


def hydra_tensors(
    heads: int, blocks: int, table: Tensor, *, one_block: bool = True, seed: int = 12
) -> dict[str, Tensor]:
    """Weights by their authors' names, as they are without dropout."""
    generator = torch.Generator().manual_seed(seed)

    def linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return {f"{name}.weight": weight, f"{name}.bias": 0.2 * torch.randn(rows, generator=generator)}

    made = {"input_embed_fn.weight": table}
    for head in range(heads):
        for part in ("linear", "res_connection"):
            made |= linear(f"hydra_mlp.{head}.0.{part}", HIDDEN, (head + 2) * HIDDEN)
        again = linear("", HIDDEN, HIDDEN)
        for block in range(1, blocks):
            own = again if one_block else linear("", HIDDEN, HIDDEN)
            made |= {f"hydra_mlp.{head}.{block}.linear{name}": value.clone() for name, value in own.items()}
        made |= linear(f"hydra_lm_head.{head}", VOCAB, HIDDEN)
    return made


def with_dropout(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that heads have which were trained with dropout layers."""
    return {_with_dropout(name): value for name, value in stored.items()}


def _with_dropout(name: str) -> str:
    kind, head, *rest = name.split(".")
    if kind == "hydra_mlp":
        return ".".join([kind, head, str(2 * int(rest[0]) + 1), *rest[1:]])
    return f"{kind}.{head}.1.{rest[0]}" if kind == "hydra_lm_head" else name


def config_of_heads(heads: int, blocks: int, architecture: str = "mlp", **values: Any) -> dict[str, Any]:
    return {
        "base_model_name_or_path": "t", "hydra_num_heads": heads, "hydra_num_layers": blocks, "grounded_heads": True,
        "hydra_head_arch": architecture, "hidden_state_offset": 0, "transformers_version": "4.34.1", **values,
    }  # fmt: skip


def hydra(folder: Path, target: Any) -> HydraSpec:
    """Heads over the target's last hidden state, of two blocks each."""
    own = hydra_tensors(3, 2, target.get_input_embeddings().weight.detach().clone())
    write(folder, config_of_heads(3, 2), own)
    return HydraSpec(own, 3, 2, (-1,))


def hydra_plus(folder: Path, target: Any) -> HydraSpec:
    """Hydra++: after a decoder layer; four blocks, of which three are one; trained with dropout."""
    table = target.get_input_embeddings().weight.detach().clone()
    own = hydra_tensors(4, 4, table, seed=13)
    layer = {name: value for name, value in tensors("eagle", seed=14).items() if name.startswith("layers.0.")}
    layer |= {
        "layers.0.input_layernorm.weight": torch.linspace(0.8, 1.2, HIDDEN),
        "norm.weight": torch.linspace(1.1, 0.7, HIDDEN),
    }
    extra = {"embed_tokens.weight": table.clone(), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    prefix = {f"prefix_embeding_layer.{name}": value for name, value in (layer | extra).items()}
    write(folder, config_of_heads(4, 4, "prefix-mlp"), with_dropout(own) | prefix)
    return HydraSpec(own, 4, 4, (-1,), Spec("llama", layer, ()))


def hydra_earlier(folder: Path, target: Any) -> HydraSpec:
    """Heads over a hidden state two layers before the last, with blocks that differ, and no embedding beside them."""
    table = target.get_input_embeddings().weight.detach().clone()
    own = hydra_tensors(2, 3, table, one_block=False, seed=15)
    stored = {name: value for name, value in own.items() if name != "input_embed_fn.weight"}
    write(folder, config_of_heads(2, 3, hidden_state_offset=2), stored)
    return HydraSpec(own, 2, 3, (LAYERS - 2,))


DIALECTS = {"hydra": hydra, "hydra-plus": hydra_plus, "hydra-earlier": hydra_earlier}

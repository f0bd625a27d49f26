"""LoRA adapters made on the spot, as PEFT's ``save_pretrained`` writes them, and what they mean in plain torch."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Any, folder: Path, *, targets: Sequence[str] | str = ALL, r: int = 4, alpha: float = 8, seed: int = 0,
    strength: float = 1.0, **config: Any,
) -> Path:  # fmt: skip
    """Write a random adapter of ``targets``; with a strength of 1 its factors are about as large as the weights."""
    import torch
    from safetensors.torch import save_file

    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": alpha, "bias": "none"}
    settings |= {"target_modules": targets if isinstance(targets, str) else list(targets), "use_dora": False} | config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in adapted_layers(model, settings):
        rank = rank_of(settings, name)
        width, depth = shape_of(layer)
        a, b = (torch.randn(size, generator=generator) for size in ((rank, depth), (width, rank)))
        kind = "lora_embedding_{}" if isinstance(layer, torch.nn.Embedding) else "lora_{}.weight"
        prefix = f"base_model.model.{name}."
        tensors[prefix + kind.format("A")] = strength * a * depth**-0.5
        tensors[prefix + kind.format("B")] = strength * b * rank**-0.5 / scale_of(settings, name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def adapted_layers(model: Any, settings: dict[str, Any]) -> list[tuple[str, Any]]:
    import torch
    from transformers.pytorch_utils import Conv1D

    wanted, layers = settings["target_modules"], settings.get("layers_to_transform")
    found = []
    for name, layer in model.named_modules():
        if not isinstance(layer, (torch.nn.Linear, torch.nn.Embedding, Conv1D)):
            continue
        if wanted == "all-linear":
            named = layer is not model.get_output_embeddings() and not isinstance(layer, torch.nn.Embedding)
        elif isinstance(wanted, str):
            named = re.fullmatch(wanted, name) is not None
        else:
            named = name.split(".")[-1] in wanted
        number = re.search(r"\.(\d+)\.", name)
        if named and (layers is None or (number is not None and int(number[1]) in layers)):
            found.append((name, layer))
    return found


def shape_of(layer: Any) -> tuple[int, int]:
    import torch
    from transformers.pytorch_utils import Conv1D

    first, second = layer.weight.shape
    return (second, first) if isinstance(layer, (torch.nn.Embedding, Conv1D)) else (first, second)


def rank_of(settings: dict[str, Any], name: str) -> int:
    found = (rank for end, rank in settings.get("rank_pattern", {}).items() if name.endswith(end))
    return int(next(found, settings["r"]))


def scale_of(settings: dict[str, Any], name: str) -> float:
    patterns, rank = settings.get("alpha_pattern", {}), rank_of(settings, name)
    alpha = next((value for end, value in patterns.items() if name.endswith(end)), settings["lora_alpha"])
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def apply_adapter(model: Any, folder: Path) -> Any:
    """Let ``model`` compute ``W x + s B A x`` in each layer of an adapter, in plain torch: its weights stay."""
    import torch
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, layer in adapted_layers(model, settings):
        table = isinstance(layer, torch.nn.Embedding)
        kind = "lora_embedding_{}" if table else "lora_{}.weight"
        a, b = (tensors[f"base_model.model.{name}.{kind.format(side)}"] for side in "AB")
        scale = scale_of(settings, name)

        layer.register_forward_hook(partial(_add, a=a, b=b, scale=scale, table=table))
    return model


def _add(_layer: Any, given: Any, out: Any, *, a: Any, b: Any, scale: float, table: bool) -> Any:
    import torch

    low = torch.nn.functional.embedding(given[0], a.T) if table else given[0] @ a.T
    return out + scale * (low @ b.T)

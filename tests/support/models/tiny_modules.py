"""Tiny random MTP modules, written into the checkpoints of their targets by the names of each family."""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, HYBRIDS, make_model, randomize, save_checkpoint

LAYERS = 3
_GLM = GROUPED | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 16, "num_nextn_predict_layers": 1,
}  # fmt: skip


class Module(NamedTuple):
    """A target with a module; ``deeper`` has its layer as one more; ``centred``: norms add one to their weight."""

    target: Any
    deeper: Any
    tensors: dict[str, Tensor]
    feature_first: bool
    norm_output: bool
    centred: bool


class Family(NamedTuple):
    """How a family stores its module; ``names``: of ``embed_norm``, ``feature_norm``, ``fc`` and ``norm``."""

    classes: str
    config: dict[str, Any]
    place: str
    layer: str
    names: tuple[str, str, str, str]
    feature_first: bool = False
    norm_output: bool = True
    centred: bool = False


_NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_QWEN = ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
FAMILIES = {
    "deepseek": Family(*ARCHITECTURES["deepseek_v3"], f"model.layers.{LAYERS}.", "", _NEXTN, norm_output=False),
    "glm": Family("Glm4Moe", _GLM, f"model.layers.{LAYERS}.", "", _NEXTN, norm_output=False),
    "qwen": Family("Qwen3", GROUPED | {"head_dim": 24}, *_QWEN),
    "qwen3_next": Family(*HYBRIDS["qwen3_next"], *_QWEN, centred=True),
    "qwen3_5": Family(*HYBRIDS["qwen3_5"], *_QWEN, centred=True),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe:Qwen3_5MoeForCausalLM:Qwen3_5MoeTextConfig",
        HYBRIDS["qwen3_next"][1] | {"shared_expert_intermediate_size": 48}, *_QWEN, centred=True,
    ),
    "mimo": Family(
        "Qwen2", GROUPED, "model.mtp_layers.0.", "",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), feature_first=True,
    ),
    "mimo-v2": Family(
        "Qwen2", GROUPED, "model.mtp.layers.0.", "", ("enorm", "hnorm", "eh_proj", "final_layernorm"), norm_output=False
    ),
}  # fmt: skip


def _layers(family: Family, count: int) -> dict[str, Any]:
    """Configuration of a target of so many layers, of which some keep a state where the family has such."""
    kinds = {"layer_types": _KINDS[:count]} if "linear_num_key_heads" in family.config else {}
    for key in ("layer_types", "mlp_layer_types"):
        if key in family.config:
            kinds[key] = family.config[key][:count]
    return family.config | kinds | {"num_hidden_layers": count}


def make(name: str, folder: Path, seed: int = 0) -> Module:
    family = FAMILIES[name]
    deeper, target = (make_model(family.classes, _layers(family, count), seed) for count in (LAYERS + 1, LAYERS))
    own = {key: value for key, value in deeper.state_dict().items() if f"layers.{LAYERS}." not in key}
    target.load_state_dict(own)
    width = family.config["hidden_size"]
    linear = randomize(torch.nn.Linear(2 * width, width, bias=False), seed + 1).weight.detach()
    norms = {
        key: (not family.centred) + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(seed + i))
        for i, key in enumerate(("embed_norm", "feature_norm", "norm"))
    }
    tensors = norms | {"fc": linear}
    save_checkpoint(deeper, folder)  # experts one by one, as transformers stores them
    stored = load_file(folder / "model.safetensors")
    put_module(stored, name, family, LAYERS, tensors)
    save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors")
    values = cut_config(folder)
    if name == "qwen3_5_moe":
        _put_beside_images(folder, values)
    return Module(target, copy.deepcopy(deeper), tensors, family.feature_first, family.norm_output, family.centred)


def put_module(stored: dict[str, Tensor], name: str, family: Family, layer: int, tensors: dict[str, Tensor]) -> None:
    """Make the tensors of a layer, and ``tensors``, those of a module by the names of its family."""
    last, place = f"model.layers.{layer}.", family.place
    moved = {place + family.layer + k.removeprefix(last): stored.pop(k) for k in list(stored) if k.startswith(last)}
    if name.startswith("mimo-v2"):
        moved[place + "pre_mlp_layernorm.weight"] = moved.pop(place + "post_attention_layernorm.weight")
    ours = ("embed_norm", "feature_norm", "fc", "norm")
    moved |= {f"{place}{theirs}.weight": tensors[key] for theirs, key in zip(family.names, ours, strict=True)}
    stored |= moved


def cut_config(folder: Path, **more: Any) -> dict[str, Any]:
    """Let a configuration count the target's layers only, and say ``more``."""
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS} | more
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(values.get(key), list):
            values[key] = values[key][:LAYERS]
    (folder / "config.json").write_text(json.dumps(values))
    return values


def _put_beside_images(folder: Path, text: dict[str, Any]) -> None:
    """Names and configuration as checkpoints have them whose model reads images too, and as Qwen3.5's are published."""
    stored = load_file(folder / "model.safetensors")
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
        for name, value in stored.items()
    }
    save_file(renamed, folder / "model.safetensors")
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    values = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values))


def save_knowing(model: Any, folder: Path, *, centred: bool = False) -> Path:
    """A target whose layers do little, and a module that hands the embedding to a layer of the same kind."""
    save_checkpoint(model, folder)
    stored, config = load_file(folder / "model.safetensors"), model.config
    width, last = config.hidden_size, f"model.layers.{config.num_hidden_layers - 1}."
    module = {"mtp.layers.0." + name.removeprefix(last): value for name, value in stored.items() if last in name}
    module |= {f"mtp.pre_fc_norm_{of}.weight": torch.full((width,), 1.0 - centred) for of in ("embedding", "hidden")}
    module |= {"mtp.norm.weight": stored["model.norm.weight"]}
    module |= {"mtp.fc.weight": torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)}
    save_file({name: value.clone() for name, value in (stored | module).items()}, folder / "model.safetensors")
    return folder


def norm(x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
    return (weight + centred) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def run_layer(model: Any, number: int, x: Tensor) -> Tensor:
    """One layer over all rows [T, H], in a window where the last layer has one."""
    width, config = len(x), model.config
    in_windows = getattr(config, "layer_types", ["full_attention"])[-1] != "full_attention"
    rotary = model.rotary_emb(x[None], torch.arange(width)[None], *["sliding_attention"][:in_windows])
    mask = torch.full((width, width), float("-inf"))
    mask = mask.triu(1) + (mask.tril(-config.sliding_window) if in_windows else 0)
    made = model.layers[number](x[None], attention_mask=mask[None, None], position_embeddings=rotary)
    return (made if isinstance(made, Tensor) else made[0])[0]


def forward(module: Module, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and what is handed on [T, H], by the published equations over the layer that is one too many."""
    t, model, eps = module.tensors, module.deeper.model, module.target.config.rms_norm_eps
    embedded = norm(module.target.get_input_embeddings()(tokens), t["embed_norm"], eps, module.centred)
    normed = norm(features, t["feature_norm"], eps, module.centred)
    joined = torch.cat([normed, embedded] if module.feature_first else [embedded, normed], -1) @ t["fc"].T
    state = run_layer(model, LAYERS, joined)
    last = norm(state, t["norm"], eps, module.centred)
    return last @ module.target.get_output_embeddings().weight.T, last if module.norm_output else state


def draft(module: Module, tokens: list[int], count: int, limit: int) -> list[int]:
    """Greedy drafts after ``tokens``, everything computed anew; an id from ``limit`` on is drafted as 0."""
    with torch.no_grad():
        features = module.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        fed, found = list(tokens[1:]), []
        for _ in range(count):
            logits, handed_on = forward(module, torch.tensor(fed), features)
            token = int(logits[-1].argmax())
            found.append(token if token < limit else 0)
            fed.append(found[-1])
            features = torch.cat([features, handed_on[-1:]])
    return found

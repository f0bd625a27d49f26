"""Tiny random MTP modules, several to a target, and what they draft by the published equations."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.tiny_models import GROUPED, calm, make_model, randomize, save_checkpoint
from tests.support.models.tiny_modules import FAMILIES, LAYERS, Family, _layers, cut_config, norm, put_module, run_layer

_MIMO = GROUPED | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24, "v_head_dim": 16,
    "num_key_value_heads": 1, "sliding_window": 5, "mlp_layer_types": ["dense", "sparse", "sparse", *["dense"] * 3],
    "layer_types": ["full_attention", *["sliding_attention"] * 5],
}  # fmt: skip
ALL_FAMILIES = FAMILIES | {
    "mimo-v2-flash": Family(
        "MiMoV2Flash", _MIMO, "", "", ("enorm", "hnorm", "eh_proj", "final_layernorm"), norm_output=False
    )
}
"""MiMo-V2's own layers have a window and sinks, and are those of modules in turn alone."""
PLACES = {
    **dict.fromkeys(("deepseek", "glm"), "model.layers.{}."),
    **dict.fromkeys(("mimo-v2", "mimo-v2-flash"), "model.mtp.layers.{}."),
}


class Modules(NamedTuple):
    """A target with modules: ``deeper`` has a layer more for each, and ``tensors`` the rest of each."""

    target: Any
    deeper: Any
    tensors: list[dict[str, Tensor]]
    lm_heads: list[Tensor] | None = None


def make(
    name: str, folder: Path, *, seed: int = 0, own_lm_heads: bool = False, scale: float | None = None, count: int = 3,
    num_tokens: int = 259,
) -> Modules:  # fmt: skip
    """A random target with modules, in ``folder``; if its layers do only what ``scale`` says, modules know a part."""
    tokens = {} if scale is None else {"vocab_size": num_tokens}  # those of the tokenizer
    more = {"num_nextn_predict_layers": count} | tokens
    family: Family = ALL_FAMILIES[name]._replace(config=ALL_FAMILIES[name].config | more)
    deeper, target = (make_model(family.classes, _layers(family, size), seed) for size in (LAYERS + count, LAYERS))
    numbers = range(LAYERS, LAYERS + count)
    if scale is not None:
        calm(deeper, scale)
    extra = tuple(f"layers.{at}." for at in numbers)
    target.load_state_dict({k: v for k, v in deeper.state_dict().items() if not any(each in k for each in extra)})
    save_checkpoint(deeper, folder)
    stored, width, made = load_file(folder / "model.safetensors"), family.config["hidden_size"], []
    tables = []
    for i, at in enumerate(numbers):
        place = PLACES[name].format(at if "model.layers" in PLACES[name] else i)
        generator = torch.Generator().manual_seed(seed + i)
        tensors = {
            key: 1 + 0.2 * torch.randn(width, generator=generator) for key in ("embed_norm", "feature_norm", "norm")
        }
        tensors["fc"] = randomize(torch.nn.Linear(2 * width, width, bias=False), seed + 1 + i).weight.detach()
        if scale is not None:
            tensors |= {"embed_norm": torch.ones(width), "norm": deeper.model.norm.weight.detach().clone()}
            tensors["fc"] = torch.cat([torch.eye(width), scale * tensors["fc"][:, width:]], dim=1)
        put_module(stored, name, family._replace(place=place), at, tensors)
        if own_lm_heads:
            tables.append(torch.randn(target.config.vocab_size, width, generator=generator) * 0.1)
            stored[place + "shared_head.head.weight"] = tables[-1]
        made.append(tensors)
    save_file({key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors")
    cut_config(folder, num_nextn_predict_layers=count)
    return Modules(target, copy.deepcopy(deeper), made, tables or None)


def last_states(target: Any, tokens: Sequence[int]) -> Tensor:
    """The target's hidden states [T, H] before its last norm."""
    seen: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    target.model(torch.tensor([list(tokens)]))
    hook.remove()
    return seen[0][0]


def forward(modules: Modules, number: int, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and hidden states [T, H] of one module, for the token and the state that each place reads."""
    t, model, eps = modules.tensors[number], modules.deeper.model, modules.target.config.rms_norm_eps
    embedded = norm(modules.target.get_input_embeddings()(torch.tensor(list(tokens))), t["embed_norm"], eps)
    joined = torch.cat([embedded, norm(states, t["feature_norm"], eps)], -1) @ t["fc"].T
    state = run_layer(model, LAYERS + number, joined)
    own = modules.target.get_output_embeddings().weight if modules.lm_heads is None else modules.lm_heads[number]
    return norm(state, t["norm"], eps) @ own.T, state


def draft(modules: Modules, tokens: Sequence[int], count: int, limit: int, *, from_target: bool = False) -> list[int]:
    """Greedy drafts after ``tokens``, everything computed anew; an id from ``limit`` on is drafted as 0."""
    with torch.no_grad():
        known, first = list(tokens), last_states(modules.target, tokens[:-1])
        places, states = len(first), first
        for number in range(count):
            logits, states = forward(modules, number, known[number + 1 : number + 1 + places], states)
            if from_target:
                states = first
            token = int(logits[-1].argmax())
            known.append(token if token < limit else 0)
    return known[len(tokens) :]

"""Tiny random heads of every dialect, written as their own writers write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.references.reference_head import Spec

HIDDEN, MLP, VOCAB, LAYERS = 64, 96, 320, 6
"""Of the target, and of the heads."""
LAYER = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "vocab_size": VOCAB, "max_position_embeddings": 256,
}  # fmt: skip
IDS = [*range(3, 60), *range(61, 250, 2), 300, 311]
"""Token ids of a reduced vocabulary."""


def tensors(
    kind: str = "eagle3", *, taps: int = 3, layers: int = 1, rows: int = VOCAB, seed: int = 0
) -> dict[str, Tensor]:
    """Weights by the names of the speculators format; all that any dialect has."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.4 * columns**-0.5

    def vector(size: int = HIDDEN) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    made = {"fc.weight": matrix(HIDDEN, taps * HIDDEN if kind == "eagle3" else 2 * HIDDEN)}
    if kind == "eagle3":
        made |= {"layers.0.hidden_norm.weight": vector(), "layers.0.input_layernorm.weight": vector()}
        made |= {"norm.weight": vector()}
    else:
        made["fc.bias"] = 0.2 * torch.randn(HIDDEN, generator=generator)
    for layer in range(layers):
        width = 2 * HIDDEN if layer == 0 and kind == "eagle3" else HIDDEN
        own = {
            "q_proj": matrix(64, width),
            "k_proj": matrix(32, width),
            "v_proj": matrix(32, width),
            "o_proj": matrix(64, 64),
        }
        made |= {f"layers.{layer}.self_attn.{name}.weight": value for name, value in own.items()}
        made |= {f"layers.{layer}.mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
        made[f"layers.{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        made[f"layers.{layer}.post_attention_layernorm.weight"] = vector()
        if layer:
            made[f"layers.{layer}.input_layernorm.weight"] = vector()
    made |= {"embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(rows, HIDDEN)}
    return made


def write(folder: Path, config: dict[str, Any], stored: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    return folder


def mapping(ids: list[int]) -> dict[str, Tensor]:
    """``d2t``, which holds offsets, and ``t2d``."""
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": known}


def _without(stored: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in stored.items() if name not in names}


def whole(own: dict[str, Tensor], target: Any) -> dict[str, Tensor]:
    """The weights, with the target's tables in the place of those that the file lacks."""
    tables = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }
    return tables | own


def speculators(folder: Path, target: Any) -> Spec:
    """Layers named ``layers.0``, hidden states counted at the top level, a reduced vocabulary, no embedding."""
    own = tensors(rows=len(IDS)) | {f"fc_norm.{i}.weight": torch.full((HIDDEN,), 0.9 + 0.1 * i) for i in range(3)}
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": LAYER, "draft_vocab_size": len(IDS),
        "norm_before_residual": True, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "speculators_config": {"proposal_methods": [{"accept_tolerance": 0.0, "verifier_accept_k": 1}]},
    }  # fmt: skip
    extra = {"verifier_norm.weight": torch.ones(HIDDEN)}
    stored = _without(own, "embed_tokens.weight")
    write(folder, config, stored | mapping(IDS) | extra)
    return Spec("eagle3", whole(stored, target), (1, 3, 4), norm_before_residual=True, ids=IDS)


def specforge(folder: Path, target: Any) -> Spec:
    """Layer 0 named ``midlayer``, no list of layers: the defaults of the paper's code."""
    own = _without(tensors(rows=len(IDS), seed=1), "embed_tokens.weight")
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in own.items()}
    write(folder, config, renamed | mapping(IDS))
    return Spec("eagle3", whole(own, target), (2, 3, 3), ids=IDS)


def modelopt(folder: Path, target: Any) -> Spec:
    """Layers whose *output* is read, in ``eagle_config``; tables of its own, a prefix, all tokens."""
    own = tensors(seed=2)
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"]}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    del target
    write(folder, config, {f"model.{name}": value for name, value in own.items()})
    return Spec("eagle3", own, (1, 3, 5))


def norm_before_fc(folder: Path, target: Any) -> Spec:
    """One norm over all hidden states, two of them only, and a normed hidden state handed on; two layers."""
    own = _without(tensors(taps=2, layers=2, seed=3), "lm_head.weight")
    own |= {"input_norm.weight": torch.linspace(0.8, 1.2, 2 * HIDDEN)}
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
        "norm_before_fc": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [2, 5],
    }  # fmt: skip
    write(folder, config, own)
    return Spec("eagle3", whole(own, target), (2, 5), layers=2, norm_output=True)


def qwen3(folder: Path, target: Any) -> Spec:
    """Layers as Qwen3 has them: queries and keys with norms of their own."""
    own = tensors(seed=4)
    own |= {f"layers.0.self_attn.{name}_norm.weight": torch.linspace(0.7, 1.3, 16) for name in "qk"}
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": {**LAYER, "model_type": "qwen3"},
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }  # fmt: skip
    del target
    write(folder, config, own)
    return Spec("eagle3", own, (2, 3, 4))


def peagle(folder: Path, target: Any) -> Spec:
    """P-EAGLE: a token and hidden states that stand for what is not known; two layers."""
    own = _without(tensors(rows=len(IDS), layers=2, seed=6), "embed_tokens.weight")
    hidden = torch.randn(1, 1, 3 * HIDDEN, generator=torch.Generator().manual_seed(7))
    config = {
        "speculators_model_type": "peagle", "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
        "draft_vocab_size": len(IDS), "mask_token_id": 319, "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
    }  # fmt: skip
    write(folder, config, own | mapping(IDS) | {"mask_hidden": hidden})
    return Spec("eagle3", whole(own, target), (1, 2, 5), layers=2, mask=(319, hidden), ids=IDS)


def eagle(folder: Path, target: Any) -> Spec:
    """EAGLE-1 and 2: one feature, joined by a linear layer with a bias, the target's LM head."""
    own = _without(tensors("eagle", seed=5), "lm_head.weight")
    write(folder, {**LAYER, "bias": True}, own)
    return Spec("eagle", whole(own, target), ())


def medusa_tensors(
    heads: int, layers: int, *, rows: int = VOCAB, bias: bool = False, seed: int = 8
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, HIDDEN, generator=generator) * 1.4 * HIDDEN**-0.5

    made = {f"lm_heads.{i}.weight": matrix(rows) for i in range(heads)}
    for name in (f"blocks.{i}.layers.{j}" for i in range(heads) for j in range(layers)):
        made[f"{name}.weight"] = matrix(HIDDEN)
        if bias:
            made[f"{name}.bias"] = 0.2 * torch.randn(HIDDEN, generator=generator)
    return made


def numbered(stored: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Medusa heads by FasterDecoding's names."""
    found = {}
    for name, value in stored.items():
        _, head, *rest = name.split(".")
        found[f"{head}.{rest[1]}.linear.{rest[2]}" if len(rest) > 1 else f"{head}.{layers}.weight"] = value
    return found


def medusa(folder: Path, target: Any) -> Spec:
    """Medusa heads as FasterDecoding writes them: two blocks with a bias; the file has more heads than it says."""
    own = medusa_tensors(3, 2, bias=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "t"}
    del target
    write(folder, config, numbered(own, 2))
    return Spec("medusa", own, (), layers=2, draft_heads=3)


def medusa_vllm(folder: Path, target: Any) -> Spec:
    """Medusa heads as vLLM has them: LM heads with some tokens, in no order; no bias."""
    own = medusa_tensors(4, 1, rows=len(IDS), seed=9)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_heads": 4, "num_hidden_layers": 1, "truncated_vocab_size": len(IDS), "max_paths": 64, "topk": 10,
    }  # fmt: skip
    del target
    turned = {name: value[order] if "lm_heads" in name else value for name, value in own.items()}
    write(folder, config, turned | {"token_map": torch.tensor(IDS)[order]})
    return Spec("medusa", own, (), draft_heads=4, ids=IDS)


def medusa_one_lm_head(folder: Path, target: Any) -> Spec:
    """Medusa heads over one LM head, the target's own, with scaled logits."""
    own = {name: value for name, value in medusa_tensors(2, 1, seed=10).items() if "lm_heads" not in name}
    config = {
        "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 2, "num_hidden_layers": 1,
        "original_lm_head": True, "logit_scale": 0.5, "medusa_fc_bias": False,
    }  # fmt: skip
    write(folder, config, {f"medusa_heads.{name}": value for name, value in own.items()})
    table = 0.5 * target.get_output_embeddings().weight.detach()
    return Spec("medusa", own | {f"lm_heads.{i}.weight": table for i in range(2)}, (), draft_heads=2)


DIALECTS = {
    "speculators": speculators, "specforge": specforge, "modelopt": modelopt, "norm-before-fc": norm_before_fc,
    "qwen3": qwen3, "eagle": eagle, "peagle": peagle, "medusa": medusa, "medusa-vllm": medusa_vllm,
    "medusa-one-lm-head": medusa_one_lm_head,
}  # fmt: skip


def edit(folder: Path, inner: dict[str, Any] | None = None, **values: Any) -> None:
    """Change values of a configuration, and ``inner`` ones of its ``dflash_config``; None takes one out."""
    path = folder / "config.json"
    whole = json.loads(path.read_text()) | values
    if inner is not None:
        whole["dflash_config"] = whole.get("dflash_config", {}) | inner
    for each in (whole, whole.get("dflash_config", {})):
        for key in [key for key, value in each.items() if value is None]:
            del each[key]
    path.write_text(json.dumps(whole))

"""MTP modules in checkpoints of every family: what our engines draft is what the published equations draft."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from specexport.checkpoint.source import resolve_source
from specexport.compile.head import find_unused_mtp_hint
from specexport.heads.mtp_files import holds_module, name_in_module, open_mtp
from specexport.heads.trace import causal_step
from specexport.inspect import list_contract_rows
from specexport.recipe import BuildRecipe
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models import tiny_modules
from tests.support.models.head_bundles import build_module
from tests.support.models.loading import load_module, tables_of
from tests.support.models.tiny_heads import write
from tests.support.models.tiny_models import calm, make_llama, save_checkpoint
from tests.support.references.drafted import PROMPTS, accepted, check_drafts


class QwenModule:
    """The module of Qwen3-Next and Qwen3.5 in plain torch, from its tensors as they are stored, without transformers.

    ``h' = layer(fc [norm(emb(t_{i+1})), norm(h_i)])``; attention's output goes through a sigmoid gate, queries and keys
    are normed and rotated in part; an MLP, or experts beside one that all tokens share. Norms multiply by one more than
    their weight. What the LM head reads is what is handed on.
    """

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


@pytest.mark.one_of_kind
@pytest.mark.parametrize("family", tiny_modules.FAMILIES)
def test_a_module_computes_the_published_equations(family: str, tmp_path: Path) -> None:
    module = tiny_modules.make(family, tmp_path)
    _, loaded = load_module(tmp_path, tiny_modules.LAYERS)
    config = loaded.config
    assert (config.kind, config.taps, config.layer_config["num_hidden_layers"]) == ("mtp", (AFTER_NORM,), 1)
    assert (config.feature_first, config.norm_output) == (module.feature_first, module.norm_output)
    features, tokens = torch.randn(7, config.hidden_size), torch.tensor([5, 6, 7, 200, 9, 10, 319])
    with torch.no_grad():
        wanted_logits, wanted = tiny_modules.forward(module, tokens, features)
    logits, handed_on = causal_step(loaded.head, tokens, features)
    torch.testing.assert_close(handed_on, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-5)


def in_one_tensor(stored: dict[str, torch.Tensor]) -> None:
    """Experts as published checkpoints of Qwen3.5 have them: side by side in one tensor for all."""
    place = "mtp.layers.0.mlp.experts."
    names = sorted(name for name in stored if name.startswith(place))
    count = 1 + max(int(name.removeprefix(place).split(".")[0]) for name in names)
    parts = {
        kind: torch.stack([stored[f"{place}{i}.{kind}_proj.weight"] for i in range(count)])
        for kind in ("gate", "up", "down")
    }
    for name in names:
        del stored[name]
    stored[f"{place}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
    stored[f"{place}down_proj"] = parts["down"]


@pytest.mark.one_of_kind
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe in one tensor"])
def test_a_module_of_a_hybrid_computes_the_published_equations(family: str, tmp_path: Path) -> None:
    """Gated attention, rotary embeddings in part, centred norms and shared experts, from the tensors of the file."""
    name, *fused = family.split(" ", 1)
    tiny_modules.make(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if fused:
        in_one_tensor(stored)
        assert len([key for key in stored if key.startswith("mtp.")]) == 19  # as Qwen3.5-35B-A3B has
        save_file(stored, tmp_path / "model.safetensors")
    target, loaded = load_module(tmp_path, tiny_modules.LAYERS)
    tables = tables_of(target)
    reference = QwenModule(stored, target.config.get_text_config().to_dict(), tables.embedding, tables.lm_head)
    features, tokens = torch.randn(7, loaded.config.hidden_size), torch.tensor([5, 6, 7, 200, 9, 10, 319])
    wanted_logits, wanted = reference.forward(tokens, features)
    logits, handed_on = causal_step(loaded.head, tokens, features)
    torch.testing.assert_close(handed_on, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-5)


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("family", ["deepseek", "qwen3_next"])  # what is read, see above
def test_a_bundle_drafts_what_the_module_drafts(family: str, tmp_path: Path) -> None:
    module = tiny_modules.make(family, tmp_path / "t")
    entry = build_module(tmp_path / "t", tmp_path / "b", check=False)["head"]
    assert (entry.draft_head.kind, entry.draft_head.taps) == ("mtp", (AFTER_NORM,))
    assert "next_features" in [spec.name for spec in list_contract_rows(entry)]
    check_drafts(tmp_path / "b", lambda before, count, limit: tiny_modules.draft(module, before, count, limit))


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends on its last one alone, and a module that knows that from the embedding."""
    folder = tmp_path_factory.mktemp("knowing")
    model = make_llama(seed=5, num_hidden_layers=tiny_modules.LAYERS, vocab_size=259)  # no id but the tokenizer's
    return tiny_modules.save_knowing(calm(model, 0.0), folder)


def change(folder: Path, copied: Path, **tensors: torch.Tensor | None) -> Path:
    shutil.copytree(folder, copied)
    stored = load_file(folder / "model.safetensors")
    changed = {name: tensors.get(name, value) for name, value in stored.items()}
    save_file({name: value for name, value in changed.items() if value is not None}, copied / "model.safetensors")
    return copied


@pytest.mark.whole
@pytest.mark.bundle
def test_what_a_module_knows_is_accepted(knowing: Path, tmp_path: Path) -> None:
    entry = build_module(knowing, tmp_path / "b")["head"]
    assert (entry.draft_head.guessed, entry.draft_head.reading) == (1.0, None)
    assert accepted(tmp_path / "b", PROMPTS) > 0.99


@pytest.mark.whole
@pytest.mark.bundle
def test_halves_in_the_other_order_are_found(knowing: Path, tmp_path: Path) -> None:
    halves = load_file(knowing / "model.safetensors")["mtp.fc.weight"].chunk(2, dim=1)
    other = change(knowing, tmp_path / "t", **{"mtp.fc.weight": torch.cat(halves[::-1], dim=1)})
    entry = build_module(other, tmp_path / "b")["head"]
    assert entry.draft_head.guessed == 1.0
    assert "embedding and feature joined in the other order" in entry.draft_head.reading
    assert accepted(tmp_path / "b", PROMPTS) > 0.99


@pytest.mark.whole
@pytest.mark.bundle
def test_a_module_at_chance_is_refused_and_nothing_is_left(knowing: Path, tmp_path: Path) -> None:
    noise = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    other = change(knowing, tmp_path / "t", **{"mtp.fc.weight": noise})
    with pytest.raises(CheckpointError, match="it was made for another target, or its files say"):
        build_module(other, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_checkpoints_without_a_whole_module_are_refused(knowing: Path, tmp_path: Path) -> None:
    plain = save_checkpoint(make_llama(num_hidden_layers=tiny_modules.LAYERS), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="plain holds no MTP module"):
        load_module(plain, tiny_modules.LAYERS)
    for number, (name, message) in enumerate(
        (
            ("mtp.layers.0.mlp.up_proj.weight", r"lacks 1 tensors, for example layers.0.mlp.up_proj.weight"),
            ("mtp.norm.weight", r"lacks 1 tensors, for example norm.weight"),
            ("mtp.pre_fc_norm_hidden.weight", r"lacks 1 tensors, for example feature_norm.weight"),
        )
    ):
        with pytest.raises(CheckpointError, match=message):
            load_module(change(knowing, tmp_path / str(number), **{name: None}), tiny_modules.LAYERS)
    short = change(knowing, tmp_path / "short", **{"mtp.layers.0.mlp.up_proj.weight": torch.zeros(96, 32)})
    with pytest.raises(CheckpointError, match="its MTP module cannot be loaded"):
        load_module(short, tiny_modules.LAYERS)


def test_a_build_without_the_module_tells_of_it(knowing: Path, tmp_path: Path) -> None:
    recipe = BuildRecipe(target=str(knowing), output=str(tmp_path / "b"))
    assert "with `--head mtp` it drafts" in str(find_unused_mtp_hint(recipe))
    assert find_unused_mtp_hint(replace(recipe, head="mtp")) is None
    plain = save_checkpoint(make_llama(), tmp_path / "plain")
    assert find_unused_mtp_hint(replace(recipe, target=str(plain))) is None
    assert find_unused_mtp_hint(replace(recipe, target=str(tmp_path / "gone"))) is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("mtp.layers.0.self_attn.q_proj.weight_scale", "weights of its MTP module are quantized"),
        ("mtp.layers.0.self_attn.q_proj.weight_scale_inv", "weights of its MTP module are quantized"),
        ("mtp.layers.0.mixer.q_proj.weight", "attention and experts in blocks of their own, as Nemotron-H has them"),
    ],
)
def test_modules_of_other_forms_are_refused_by_name(extra: str, message: str, tmp_path: Path) -> None:
    values = {"layers_block_type": ["mamba", "attention"], "model_type": "nemotron_h"}
    write(tmp_path, values, {"mtp.layers.0.enorm.weight": torch.ones(8), extra: torch.ones(8)})
    source = resolve_source(str(tmp_path), None)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_mtp(source, values)
    assert caught.value.exit_code == 2
    assert not holds_module(source)


@pytest.mark.whole
def test_a_folder_of_speculators_holds_a_module(knowing: Path, tmp_path: Path) -> None:
    stored, names = load_file(knowing / "model.safetensors"), {"fc": "input_proj", "norm": "final_layernorm"}
    names |= {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
    module = {}
    for name, value in stored.items():
        if name.startswith("mtp."):
            stem, _, kind = name.removeprefix("mtp.").rpartition(".")
            module[f"mtp_layers.0.{names.get(stem, stem.removeprefix('layers.0.'))}.{kind}"] = value
    values = json.loads((knowing / "config.json").read_text())
    config = {"speculators_model_type": "mtp", "transformer_layer_config": values}
    write(tmp_path / "head", config, module)
    entry = build_module(knowing, tmp_path / "b", head=str(tmp_path / "head"))["head"]
    assert (entry.draft_head.kind, entry.draft_head.guessed, entry.draft_head.reading) == ("mtp", 1.0, None)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("mtp.fc.weight", "fc.weight"),
        ("mtp.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("mtp.layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"),
        ("model.mtp_layers.0.final_layernorm.weight", "norm.weight"),
        ("model.mtp_layers.1.final_layernorm.weight", "more.1.norm.weight"),
        ("model.mtp.layers.0.pre_mlp_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
        ("model.mtp.layers.1.enorm.weight", "more.1.embed_norm.weight"),
        ("model.mtp.layers.2.pre_mlp_layernorm.weight", "layers.2.post_attention_layernorm.weight"),
        ("model.layers.5.eh_proj.weight", "more.2.fc.weight"),
        ("model.layers.3.shared_head.head.weight", "lm_head.weight"),
        ("model.language_model.layers.3.eh_proj.weight", "fc.weight"),
        ("model.layers.3.mlp.experts.0.up_proj.weight", "layers.0.mlp.experts.0.up_proj.weight"),
        ("model.layers.2.self_attn.q_proj.weight", None),
        ("vision.layers.3.self_attn.q_proj.weight", None),
    ],
)
def test_names_of_every_family(key: str, name: str | None) -> None:
    assert name_in_module(key, 3) == name

"""MTP modules in GGUF files: their tensors and drafts are those of the same module in safetensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import resolve_source
from specexport.compile.head import find_unused_mtp_hint
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import read_config
from specexport.heads.mtp_files import holds_module, open_mtp
from specexport.recipe import BuildRecipe
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models import tiny_gguf_modules, tiny_modules, tiny_turns
from tests.support.models.head_bundles import build_module
from tests.support.models.loading import load_head, tables_of
from tests.support.references.drafted import check_drafts

LAYERS = tiny_modules.LAYERS
FAMILIES = {
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next", "glm4moe": "glm",
    "deepseek2": "deepseek",
}  # fmt: skip


class Files(NamedTuple):
    module: tiny_modules.Module
    folder: Path
    whole: Path
    trunk: Path
    alone: Path


def make_files(architecture: str, folder: Path, **changed: Any) -> Files:
    # What the next step reads is normed, as llama.cpp has it; a checkpoint does not say so
    module = tiny_modules.make(FAMILIES[architecture], folder / "hf")._replace(norm_output=True)
    round_tensors(module, folder / "hf")
    paths = [
        tiny_gguf_modules.file_of(folder / f"{name}.gguf", architecture, module, only, **changed)
        for name, only in (("whole", ""), ("trunk", "trunk"), ("mtp-alone", "module"))
    ]
    return Files(module, folder / "hf", *paths)


def round_tensors(module: tiny_modules.Module, folder: Path) -> None:
    """Norms that a file, which has one more than each weight, holds exactly."""
    for model in (module.target, module.deeper):
        tiny_gguf_modules.round_norms(model)
    for name, value in module.tensors.items():
        if "norm" in name:
            module.tensors[name] = (value * 1024).round() / 1024
    stored = load_file(folder / "model.safetensors")
    rounded = {name: (value * 1024).round() / 1024 if "norm" in name else value for name, value in stored.items()}
    save_file(rounded, folder / "model.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    made: dict[str, Files] = {}

    def of(architecture: str) -> Files:
        if architecture not in made:
            made[architecture] = make_files(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return of


def load_from(path: Path, model: Any) -> Any:
    text = model.config.get_text_config()
    found = open_mtp(resolve_source(str(path), None), text.to_dict())
    config = read_config(found, TargetFacts(text.num_hidden_layers, text.hidden_size, text.vocab_size))
    return load_head(found, config, tables_of(model))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_target_is_read_without_its_module(architecture: str, stream: bool, files: Any) -> None:
    """All weights of the target, and value heads back in their order; logarithms are rounded."""
    made = files(architecture)
    wanted: Any = load_checkpoint(str(made.folder)).model
    for path in (made.whole, made.trunk):
        found: Any = load_checkpoint(str(path), stream=stream)
        assert found.model.config.get_text_config().num_hidden_layers == LAYERS
        own = {name: value for name, value in found.model.state_dict().items() if not value.is_meta}
        own |= {name: weight.whole() for name, weight in found.stored.items()}
        assert bool(found.stored) == stream
        assert own.keys() == wanted.state_dict().keys()
        for name, value in wanted.state_dict().items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6 if "A_log" in name else 0, msg=name)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_module_is_that_of_the_safetensors_to_the_bit(architecture: str, files: Any) -> None:
    made = files(architecture)
    model: Any = load_checkpoint(str(made.folder)).model
    wanted = load_from(made.folder, model)
    for path in (made.whole, made.alone):
        found = load_from(path, model)
        assert (found.config.taps, found.config.feature_first) == (wanted.config.taps, wanted.config.feature_first)
        assert found.config.norm_output
        state = found.head.state_dict()
        assert state.keys() == wanted.head.state_dict().keys()
        assert [name for name, value in wanted.head.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("fused", [False, True])
def test_modules_in_turn_are_those_of_the_safetensors_to_the_bit(fused: bool, tmp_path: Path) -> None:
    """MiMo-V2's, with windows, sinks, and queries, keys and values in a tensor each or in one."""
    modules = tiny_turns.make("mimo-v2-flash", tmp_path / "hf")
    tensors, settings = (
        of("mimo2", modules, LAYERS) for of in (tiny_gguf_modules.tensors_of, tiny_gguf_modules.settings_of)
    )
    for block in range(LAYERS + 3) if fused else ():
        parts = [tensors.pop(f"blk.{block}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{block}.attn_qkv.weight"] = torch.cat(parts)
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", "mimo2", settings, tensors)
    model, wanted_model = (load_checkpoint(str(each)).model for each in (path, tmp_path / "hf"))
    for name, value in wanted_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.config.to_dict()["layer_types"] == wanted_model.config.layer_types
    assert model.config.sliding_window == wanted_model.config.sliding_window
    wanted, found = load_from(tmp_path / "hf", model), load_from(path, model)
    assert (found.config.kind, found.config.taps, found.config.norm_output) == ("mtp-modules", (LAYERS,), False)
    state = found.head.state_dict()
    assert state.keys() == wanted.head.state_dict().keys()
    assert [name for name, value in wanted.head.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.whole
@pytest.mark.bundle
def test_bundles_draft_what_the_module_drafts(files: Any, tmp_path: Path) -> None:
    """From the target's own file, and from a file of its own beside the target's."""
    made = files("qwen35moe")
    for number, (target, head) in enumerate(((made.whole, "mtp"), (made.trunk, str(made.alone)))):
        models = build_module(target, tmp_path / str(number), head=head, draft_quantize="none", check=False)
        assert models["head"].draft_head.kind == "mtp"
        check_drafts(
            tmp_path / str(number), lambda before, count, limit: tiny_modules.draft(made.module, before, count, limit)
        )


@pytest.mark.whole
@pytest.mark.bundle
def test_a_target_is_built_without_its_module_and_says_so(files: Any, tmp_path: Path) -> None:
    made = files("qwen35")
    models = build_module(made.whole, tmp_path / "b", head=None, check=False)
    assert list(models) == ["target"]
    recipe = BuildRecipe(target=str(made.whole), output=str(tmp_path / "b"))
    assert "with `--head mtp` it drafts" in str(find_unused_mtp_hint(recipe))
    assert not holds_module(resolve_source(str(made.trunk), None))


def test_a_file_of_the_trunk_alone_has_no_module(files: Any) -> None:
    made = files("qwen35")
    model: Any = load_checkpoint(str(made.trunk)).model
    with pytest.raises(CheckpointError, match=r"trunk.gguf counts 1 MTP modules, and holds none \(blk.3.nextn.eh_proj"):
        load_from(made.trunk, model)


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ("nextn.hnorm.weight", r"t.gguf: its MTP module lacks blk.3.nextn.hnorm.weight"),
        ("ffn_up.weight", r"t.gguf: block 3, its MTP module, lacks 1 tensors, for example that of mlp.up_proj.weight"),
        ("attn_q_norm.weight", r"lacks 1 tensors, for example that of self_attn.q_norm.weight"),
    ],
)
def test_a_module_without_all_tensors_is_refused(dropped: str, message: str, files: Any, tmp_path: Path) -> None:
    module = files("qwen35").module
    tensors = tiny_gguf_modules.tensors_of("qwen35", module, LAYERS)
    del tensors[f"blk.3.{dropped}"]
    path = tiny_gguf_modules.write(
        tmp_path / "t.gguf", "qwen35", tiny_gguf_modules.settings_of("qwen35", module, LAYERS), tensors
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        load_from(path, load_checkpoint(str(path)).model)
    assert caught.value.exit_code == 2


def test_norm_and_tables_may_be_the_targets(files: Any, tmp_path: Path) -> None:
    module = files("qwen35").module
    tensors = tiny_gguf_modules.tensors_of("qwen35", module, LAYERS)
    del tensors["blk.3.nextn.shared_head_norm.weight"]
    settings = tiny_gguf_modules.settings_of("qwen35", module, LAYERS)
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", "qwen35", settings, tensors)
    model: Any = load_checkpoint(str(path)).model
    head = load_from(path, model).head
    assert torch.equal(head.body.norm.weight, model.model.norm.weight)
    assert torch.equal(head.embed_tokens.weight, model.model.embed_tokens.weight)
    tensors["blk.3.nextn.embed_tokens.weight"] = torch.randn(head.embed_tokens.weight.shape)
    own = tiny_gguf_modules.write(tmp_path / "own.gguf", "qwen35", settings, tensors)
    assert torch.equal(load_from(own, model).head.embed_tokens.weight, tensors["blk.3.nextn.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("stated", "kind", "message"),
    [
        (
            {"nextn_predict_layers": None, "block_count": LAYERS},
            CheckpointError,
            r"m.gguf holds no MTP module \(qwen35.nextn_predict_layers is not there, or 0\)",
        ),
        ({"vocabulary": 300}, CheckpointError, "m.gguf is for a vocabulary of 300 tokens, and the target has 320"),
        ({"embedding_length": 128}, CheckpointError, "m.gguf reads hidden states of 128 values"),
        ({"block_count": LAYERS + 3}, CheckpointError, "m.gguf counts 1 MTP modules, and holds none"),
        (
            {"block_count": LAYERS + 2, "nextn_predict_layers": 2},
            UnsupportedModelError,
            "m.gguf holds 2 MTP modules, and files of qwen35 are read with one",
        ),
        ({"architecture": "exaone-moe"}, UnsupportedModelError, "MTP modules in GGUF files of exaone-moe are not read"),
    ],
)
def test_other_files_are_refused_by_name(stated: Any, kind: Any, message: str, files: Any, tmp_path: Path) -> None:
    made = files("qwen35")
    tensors, settings = (
        of("qwen35", made.module, LAYERS) for of in (tiny_gguf_modules.tensors_of, tiny_gguf_modules.settings_of)
    )
    if (size := stated.get("vocabulary")) is not None:
        tensors["token_embd.weight"] = torch.zeros(size, 64)
    if stated.get("nextn_predict_layers") == 2:
        tensors |= {name.replace("blk.3.", "blk.4."): value for name, value in tensors.items() if "blk.3." in name}
    settings = {key: value for key, value in (settings | stated).items() if key in settings and value is not None}
    path = tiny_gguf_modules.write(tmp_path / "m.gguf", stated.get("architecture", "qwen35"), settings, tensors)
    with pytest.raises(kind, match=message) as caught:
        load_from(path, load_checkpoint(str(made.folder)).model)
    assert caught.value.exit_code == 2


def test_a_module_of_another_kind_of_target_is_refused(files: Any) -> None:
    model: Any = load_checkpoint(str(files("qwen35").folder)).model
    with pytest.raises(CheckpointError, match="an MTP module of a qwen35moe of 3 layers, and the target is a qwen3_5"):
        load_from(files("qwen35moe").alone, model)


def test_value_heads_in_another_order_cannot_be_kept_and_the_rest_can(files: Any, tmp_path: Path) -> None:
    """Their columns go across blocks. Weights of the module's block are none of the target's."""
    module = files("qwen35").module
    settings, tensors = (
        of("qwen35", module, LAYERS) for of in (tiny_gguf_modules.settings_of, tiny_gguf_modules.tensors_of)
    )
    path = tiny_gguf_modules.write(tmp_path / "q.gguf", "qwen35", settings, tensors, quantized=lambda _: True)
    with pytest.raises(
        UnsupportedModelError, match=r"blk.0.ssm_out.weight of q.gguf \(Q8_0\) cannot be kept"
    ) as caught:
        load_checkpoint(str(path), keep=True, stream=True)
    assert caught.value.exit_code == 2
    assert load_checkpoint(str(path)).kept == {}
    some = tiny_gguf_modules.write(
        tmp_path / "s.gguf", "qwen35", settings, tensors, quantized=lambda name: "ssm_out" not in name
    )
    found = load_checkpoint(str(some), keep=True, stream=True)
    assert "model.model.layers.0.linear_attn.in_proj_qkv.weight" in found.kept
    assert not any(f"layers.{LAYERS}." in name for name in found.kept)

"""Checkpoints of GPTQ, AWQ and compressed-tensors: the floats that they stand for, the integers that are kept."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.packed_blocks import awq_weight, compressed_weight, gptq_weight
from specexport.compile.pipeline import build_bundle
from specexport.passes.block_weight import BlockWeight
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, make_model, save_checkpoint
from tests.support.models.tiny_packed import SETTINGS, pack_checkpoint, random_layer


def read(method: str, tensors: dict[str, np.ndarray], bits: int = 4) -> BlockWeight:
    settings = SETTINGS[method] | {"bits": bits}
    if method == "gptq":
        return gptq_weight(tensors, settings, "layer")
    return awq_weight(tensors, settings, "layer") if method == "awq" else compressed_weight(tensors, "layer")


@pytest.mark.parametrize(("method", "bits"), [*((method, 4) for method in SETTINGS), ("gptq", 8), ("w4a16", 8)])
def test_values_are_those_of_the_format(method: str, bits: int) -> None:
    tensors, wanted = random_layer(method, (24, 128), np.random.default_rng(3), bits)
    weight = read(method, tensors, bits)
    np.testing.assert_allclose(weight.floats(), wanted, rtol=0, atol=2e-7)
    assert weight.form.bits == (8 if method == "w8a8" else bits)
    assert weight.form.has_offsets == (method not in ("w4a16", "w8a8"))


@pytest.mark.one_of_kind
@pytest.mark.parametrize("method", SETTINGS)
def test_a_checkpoint_is_kept_or_made_float(method: str, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("Qwen2", GROUPED), tmp_path / "model")
    floats = pack_checkpoint(folder, method)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}), encoding="utf-8")
    loaded = load_checkpoint(str(folder), keep=True)
    assert set(loaded.eos_token_ids) == {2, 7}
    state = loaded.model.state_dict()
    for name, wanted in floats.items():
        np.testing.assert_allclose(state[name].numpy(), wanted, rtol=0, atol=2e-7)
    assert set(loaded.kept) == {f"model.{name}" for name in floats}
    kept = build_bundle(BuildRecipe(str(folder), str(tmp_path / "kept")), use_cache=False)
    assert kept.manifest.models["target"].quantize == "keep"
    found = kept.checks["target"]
    assert found is not None
    assert found.lost is not None
    assert found.lost < 0.01
    if method == "gptq":  # the others are read by the same code
        plain = build_bundle(BuildRecipe(str(folder), str(tmp_path / "plain"), quantize="none"), use_cache=False)
        assert plain.manifest.models["target"].quantize is None


@pytest.mark.parametrize(("name", "method"), [("qwen3_moe", "gptq"), ("mixtral", "awq"), ("qwen3_moe", "w8a8")])
def test_experts_are_kept_where_transformers_stacks_them(name: str, method: str, tmp_path: Path) -> None:
    classes, config = ARCHITECTURES[name]
    # A token takes all experts: rounded activations choose others now and then, which would hide how near they are.
    config = config | {"moe_intermediate_size": 64, "num_experts_per_tok": 4}
    folder = save_checkpoint(make_model(classes, config), tmp_path / "model")
    floats = pack_checkpoint(folder, method)
    assert sum(".experts." in part for part in floats) == 2 * 4 * 3
    if method == "w8a8":
        path = folder / "model.safetensors"
        tensors = load_file(path)
        scales = [name for name in tensors if ".experts." in name and name.endswith("weight_scale")]
        zeros = {name.replace("weight_scale", "weight_zero_point"): np.full_like(tensors[name], 3) for name in scales}
        save_file(tensors | zeros, path, metadata={"format": "pt"})
    built = build_bundle(BuildRecipe(str(folder), str(tmp_path / "kept")), use_cache=False)
    entry, found = built.manifest.models["target"], built.checks["target"]
    assert dict(entry.passes)["experts-keep"] == 2
    assert sum(count for _, count, _ in entry.engine.weight_formats) == sum(weight.size for weight in floats.values())
    assert found is not None
    assert found.lost is not None
    assert found.lost < 0.01, "only activations are rounded"
    with closing(SpecEngine.load(tmp_path / "kept", num_threads=1, spin=False, adaptive=False)) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        (plain,) = engine.generate("abcabcabcabc", params, drafter="none")
        (drafted,) = engine.generate("abcabcabcabc", params, drafter="lookup", num_speculative_tokens=3)
        assert drafted.token_ids == plain.token_ids


def test_groups_that_are_no_neighbours_are_refused(tmp_path: Path) -> None:
    tensors, _ = random_layer("gptq", (24, 128), np.random.default_rng(3))
    tensors["g_idx"] = tensors["g_idx"][::-1].copy()
    with pytest.raises(CheckpointError, match="desc_act"):
        read("gptq", tensors)
    tensors, _ = random_layer("w4a16", (24, 128), np.random.default_rng(3))
    read("w4a16", tensors | {"weight_g_idx": np.full(128, -1)})  # none
    with pytest.raises(CheckpointError, match="desc_act"):
        read("w4a16", tensors | {"weight_g_idx": np.arange(128)[::-1] // 32})
    tensors, _ = random_layer("awq", (24, 128), np.random.default_rng(3))
    with pytest.raises(CheckpointError, match="3 bits"):
        read("awq", tensors, bits=3)


def test_int8_weights_have_zeros_and_one_scale_too() -> None:
    tensors, floats = random_layer("w8a8", (24, 128), np.random.default_rng(3))
    zeros = np.arange(-12, 12, dtype=np.int8)[:, None]
    moved = read("w8a8", tensors | {"weight_zero_point": zeros})
    np.testing.assert_allclose(moved.floats(), floats - zeros * tensors["weight_scale"], rtol=0, atol=2e-7)
    one = read("w8a8", tensors | {"weight_scale": np.array([0.002], np.float32)})
    np.testing.assert_allclose(one.floats(), tensors["weight"] * np.float32(0.002), rtol=0, atol=2e-7)
    with pytest.raises(CheckpointError, match="24 outputs"):
        read("w8a8", tensors | {"weight_scale": np.ones((3, 2), np.float32)})


def test_a_wrapped_zero_is_zero() -> None:
    tensors, _ = random_layer("gptq", (8, 128), np.random.default_rng(3))
    tensors["qzeros"] = np.full_like(tensors["qzeros"], -1)  # every zero less one is 15
    codes = read("gptq", tensors)
    assert (codes.floats() >= 0).all()


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("Qwen2", GROUPED), tmp_path / "model")
    pack_checkpoint(folder, "w8a8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["format"] = "float-quantized"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="float-quantized"):
        load_checkpoint(str(folder))
    config["quantization_config"] = SETTINGS["w8a8"] | {"transform_config": {"config_groups": {"R4": {}}}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="rotated"):
        load_checkpoint(str(folder))
    config["quantization_config"] = SETTINGS["gptq"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="qweight"):
        load_checkpoint(str(folder))


def test_a_damaged_file_and_other_shapes_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("Qwen2", GROUPED), tmp_path / "model")
    pack_checkpoint(folder, "w4a16")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_shape"))
    save_file(tensors | {name: np.array([2, 24, 128])}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is no compressed-tensors matrix"):
        load_checkpoint(str(folder))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(str(folder))

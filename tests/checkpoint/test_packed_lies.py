"""Packed checkpoints whose configuration says other things than their words: read rightly, or refused in one line.

What is right is computed here, of codes and zeros that are drawn here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.packed import check_centre
from specexport.checkpoint.packed_blocks import awq_weight, compressed_weight, gptq_weight
from specexport.checkpoint.source import Source
from specexport.passes.block_weight import BlockWeight
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_models import GROUPED, make_model, save_checkpoint
from tests.support.models.tiny_packed import GROUP, SETTINGS, pack, pack_checkpoint, random_layer

SHAPE = (64, 128)
SOURCE = Source("model", Path(), None, ())


def settings(**more: Any) -> dict[str, Any]:
    return SETTINGS["gptq"] | more


def quantized(seed, bits=4, *, symmetric=False, mean=0.0, shape=SHAPE):
    """Codes [N, K], zeros and scales [N, groups] of normal weights, and the weights that they mean."""
    generator = np.random.default_rng(seed)
    weight = generator.normal(mean * 0.02, 0.02, shape).astype(np.float32)
    parts = weight.reshape(shape[0], -1, GROUP)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales, zeros = np.abs(parts).max(-1) / (middle - 1), np.full(parts.shape[:2], middle)
    else:
        low, high = parts.min(-1), parts.max(-1)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), 1, top).astype(int)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(parts / scales[..., None]) + zeros[..., None], 0, top).astype(int)
    meant = (codes - zeros[..., None]) * scales[..., None]
    return codes.reshape(shape), zeros, scales, meant.reshape(shape).astype(np.float32)


def gptq(codes: np.ndarray, stored: np.ndarray, scales: np.ndarray, bits: int = 4) -> dict[str, np.ndarray]:
    order = (np.arange(codes.shape[1]) // GROUP).astype(np.int32)
    words = {"qweight": pack(codes.T, bits, 0), "qzeros": pack(stored.T, bits, 1)}
    return words | {"scales": scales.T.astype(np.float16), "g_idx": order}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("mark", [None, "gptq", "gptq_v2"])
def test_a_symmetric_zero_is_the_middle_however_it_is_stored(bits: int, less: int, mark: str | None) -> None:
    codes, zeros, scales, meant = quantized(1, bits, symmetric=True)
    marked = {} if mark is None else {"checkpoint_format": mark}
    found = gptq_weight(gptq(codes, zeros - less, scales, bits), settings(sym=True, bits=bits, **marked), "layer")
    np.testing.assert_allclose(found.floats(), meant, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stored", [6, 0, 15, "both"])
def test_a_symmetric_zero_that_is_no_middle_is_refused(stored: int | str) -> None:
    codes, zeros, scales, _ = quantized(1, symmetric=True)
    wrong = zeros - 1 if stored == "both" else np.full_like(zeros, stored)
    if stored == "both":
        wrong[0] += 1
    with pytest.raises(CheckpointError, match=r"layer is symmetric .* all stored zeros are 7 or all 8"):
        gptq_weight(gptq(codes, wrong, scales), settings(sym=True), "layer")


def layers(read: Any, mean: float = 0.0, count: int = 7, bits: int = 4) -> dict[str, BlockWeight]:
    made = {}
    for seed in range(count):
        codes, zeros, scales, _ = quantized(seed, bits, mean=mean)
        made[f"layer{seed}"] = read(codes, zeros, scales)
    return made


@pytest.mark.parametrize("mark", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("mean", [0.0, 0.05, -0.05])
def test_asymmetric_zeros_of_the_other_version_are_found_by_the_centre(mark: str, stored: str, mean: float) -> None:
    marked = settings(checkpoint_format=mark)

    def read(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> BlockWeight:
        return gptq_weight(gptq(codes, zeros - (stored == "gptq"), scales), marked, "layer")

    if mark == stored:
        check_centre(SOURCE, layers(read, mean), marked)
        return
    with pytest.raises(CheckpointError, match=r"steps beside zero") as caught:
        check_centre(SOURCE, layers(read, mean), marked)
    assert f"checkpoint_format in quantization_config to {stored} if" in str(caught.value.hint)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("method", "bits"), [*((method, 4) for method in SETTINGS), ("gptq", 8), ("w4a16", 8)])
def test_other_weights_are_no_alarm(method: str, bits: int, seed: int) -> None:
    """Uniform codes lie half a step off; eight bits have many steps."""
    generator, found = np.random.default_rng(seed), {}
    for layer in range(1 + 3 * seed):
        tensors, _ = random_layer(method, SHAPE, generator, bits)
        if method in ("gptq", "awq"):
            take = gptq_weight if method == "gptq" else awq_weight
            found[str(layer)] = take(tensors, SETTINGS[method] | {"bits": bits}, "layer")
        else:
            found[str(layer)] = compressed_weight(tensors, "layer")
    check_centre(SOURCE, found, SETTINGS[method])


def test_a_layer_of_its_own_bits_is_read_with_them() -> None:
    """GPTQModel's ``dynamic``: the first expression that fits, with or without its sign."""
    from specexport.checkpoint.packed import _layer_settings

    found = settings(dynamic={r"+:.*\.down_proj": {"bits": 8}, r".*\.1\..*": {"group_size": 64}, "-:.*up_proj": {}})
    assert _layer_settings(SOURCE, found, "model.layers.1.mlp.down_proj")["bits"] == 8
    assert _layer_settings(SOURCE, found, "model.layers.1.mlp.gate_proj")["group_size"] == 64
    assert _layer_settings(SOURCE, found, "model.layers.0.mlp.gate_proj")["bits"] == 4
    with pytest.raises(CheckpointError, match=r"that model\.layers\.0\.mlp\.up_proj is not"):
        _layer_settings(SOURCE, found, "model.layers.0.mlp.up_proj")
    with pytest.raises(CheckpointError, match="is no expression"):
        _layer_settings(SOURCE, settings(dynamic={"+:(": {}}), "layer")


@pytest.mark.parametrize(
    ("method", "lie", "message"),
    [
        ("gptq", {"group_size": 64}, "has 4 groups for 128 inputs, and group_size is 64"),
        ("gptq", {"group_size": -1}, "has 4 groups for 128 inputs, and group_size is -1"),
        ("gptq", {"bits": 8}, "its bits are others than its configuration says"),
        ("awq", {"group_size": 128}, "has 4 groups for 128 inputs, and group_size is 128"),
        ("awq", {"version": "gemv"}, "is packed as AWQ's gemv"),
    ],
)
def test_settings_that_do_not_fit_the_words_are_refused(method: str, lie: dict[str, Any], message: str) -> None:
    tensors, _ = random_layer(method, (24, 128), np.random.default_rng(3))
    with pytest.raises(CheckpointError, match=message):
        (gptq_weight if method == "gptq" else awq_weight)(tensors, SETTINGS[method] | lie, "layer")


def test_an_order_that_is_not_there_is_asked_for() -> None:
    tensors, _ = random_layer("gptq", (24, 128), np.random.default_rng(3))
    del tensors["g_idx"]
    with pytest.raises(CheckpointError, match="layer has no g_idx"):
        gptq_weight(tensors, settings(desc_act=True), "layer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(
        make_model("Qwen2", GROUPED | {"hidden_size": 128, "intermediate_size": 160}), tmp_path / "m"
    )


def test_zero_points_that_are_said_and_missing_are_asked_for(folder: Path) -> None:
    pack_checkpoint(folder, "w4a16")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["config_groups"] = {"group_0": {"weights": {"symmetric": False, "num_bits": 4}}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has no weight_zero_point beside its other tensors"):
        load_checkpoint(str(folder))


def test_the_index_says_which_file_a_tensor_is_of(folder: Path) -> None:
    """A stale file in the folder has tensors of the same names; one that is named and not there is missed."""
    floats = pack_checkpoint(folder, "gptq")
    tensors = load_file(folder / "model.safetensors")
    stale = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(stale, folder / "z-old.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}), encoding="utf-8")
    found = dict(load_checkpoint(str(folder)).model.named_parameters())
    for name, weight in floats.items():
        np.testing.assert_allclose(found[name].numpy(), weight, rtol=0, atol=2e-7)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00002.safetensors")}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors is missing"):
        load_checkpoint(str(folder))

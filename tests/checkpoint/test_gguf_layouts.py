"""GGUF files of architectures that transformers has no way to: what is kept of them, and what is refused.

That their models are those of the safetensors is tested with their MTP modules (``tests/heads/test_mtp_gguf.py``).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.checkpoint.load import load_checkpoint
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models import tiny_gguf_modules, tiny_modules, tiny_turns
from tests.support.models.tiny_modules import LAYERS

FAMILIES = {"qwen3next": "qwen3_next", "glm4moe": "glm", "deepseek2": "deepseek", "mimo2": "mimo-v2-flash"}


def parts_of(architecture: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    made: Any = (tiny_turns if architecture == "mimo2" else tiny_modules).make(FAMILIES[architecture], folder)
    tensors = tiny_gguf_modules.tensors_of(architecture, made, LAYERS)
    return tensors, tiny_gguf_modules.settings_of(architecture, made, LAYERS)


def fuse(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("attn_q.weight")]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)


@pytest.mark.parametrize(
    ("architecture", "kept"),
    [
        ("qwen3next", "linear_attn.in_proj_qkvz"),
        ("glm4moe", "self_attn.q_proj"),
        ("deepseek2", "self_attn.kv_a_proj_with_mqa"),
        ("mimo2", "self_attn.v_proj"),
    ],
)
def test_kept_weights_are_the_models(architecture: str, kept: str, tmp_path: Path) -> None:
    """The integers of the file, of matrices in one piece, in several, and of experts."""
    tensors, settings = parts_of(architecture, tmp_path / "hf")
    if architecture == "mimo2":
        fuse(tensors)
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", architecture, settings, tensors, quantized=lambda _: True)
    found, wanted = load_checkpoint(str(path), keep=True, stream=True).kept, load_checkpoint(str(path)).model
    state = wanted.state_dict()
    assert any(kept in name for name in found)
    assert any(name.endswith("experts.gate_up_proj") for name in found)
    for name, weight in found.items():
        value = state[name.removeprefix("model.")].reshape(weight.shape).numpy()
        np.testing.assert_array_equal(weight.floats(np.arange(weight.shape[0])), value, err_msg=name)


def test_what_a_latent_becomes_is_made_of_floats(tmp_path: Path) -> None:
    """Its keys are stored turned, so no integers of the file are those of the model's matrix."""
    tensors, settings = parts_of("deepseek2", tmp_path / "hf")
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", "deepseek2", settings, tensors, quantized=lambda _: True)
    found = load_checkpoint(str(path), keep=True, stream=True)
    assert not any("kv_b_proj" in name for name in found.kept)
    assert any("kv_b_proj" in name for name in found.stored)


def test_older_files_have_some_weights_in_one_piece(tmp_path: Path) -> None:
    for architecture, name, module in (
        ("deepseek2", "attn_kv_b", "self_attn.kv_b_proj"),
        ("qwen3next", "ssm_in", "linear_attn.in_proj_qkvz"),
    ):
        tensors, settings = parts_of(architecture, tmp_path / architecture)
        state = load_checkpoint(str(tmp_path / architecture)).model.state_dict()
        for block in range(LAYERS):
            if (weight := f"model.layers.{block}.{module}.weight") in state:
                for old in ("attn_k_b", "attn_v_b", "attn_qkv", "attn_gate"):
                    tensors.pop(f"blk.{block}.{old}.weight", None)
                tensors[f"blk.{block}.{name}.weight"] = state[weight]
        path = tiny_gguf_modules.write(tmp_path / f"{architecture}.gguf", architecture, settings, tensors)
        found = load_checkpoint(str(path)).model.state_dict()
        assert all(torch.equal(found[key], value) for key, value in state.items() if module in key)


@pytest.mark.parametrize(
    ("architecture", "changed", "kind", "message"),
    [
        (
            "deepseek2",
            {"rope.scaling.type": "yarn"},
            UnsupportedModelError,
            "with positions scaled by yarn are not read",
        ),
        ("deepseek2", {"expert_gating_func": 1}, UnsupportedModelError, "deepseek2 with expert_gating_func 1 are not"),
        ("glm4moe", {"rope.dimension_count": None}, CheckpointError, "does not say glm4moe.rope.dimension_count"),
        ("qwen3next", {"ssm.group_count": None}, CheckpointError, "does not say qwen3next.ssm.group_count"),
    ],
)
def test_what_cannot_be_read_is_refused(architecture, changed, kind, message, tmp_path):
    tensors, settings = parts_of(architecture, tmp_path / "hf")
    settings = {key: value for key, value in (settings | changed).items() if value is not None}
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", architecture, settings, tensors)
    with pytest.raises(kind, match=message) as caught:
        load_checkpoint(str(path))
    assert caught.value.exit_code == 2


def test_a_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors, settings = parts_of("deepseek2", tmp_path / "hf")
    del tensors["blk.1.attn_v_b.weight"]
    path = tiny_gguf_modules.write(tmp_path / "t.gguf", "deepseek2", settings, tensors)
    with pytest.raises(CheckpointError, match=r"1 weights are missing, for example model.layers.1.self_attn.kv_b_proj"):
        load_checkpoint(str(path))

"""Hybrids that a build refuses: layer lists that do not fit, states without room, functions that changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.checkpoint.config_checks import check_no_layer_left
from specexport.checkpoint.source import Source
from specexport.trace import recurrence
from specexport_runtime.errors import CheckpointError
from tests.support.cases.refusals import Refuse
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_llama, make_model, save_checkpoint


def refused(refuse_cli: Refuse, folder: Path) -> str:
    return refuse_cli("build", folder, "-o", folder.parent / "out", "-q", "--no-cache")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3_next", {"num_hidden_layers": 3}, "num_hidden_layers is 3, and the length of layer_types is 4"),
        # transformers takes the list, and says nothing of layers that are left over
        ("nemotron_h", {"num_hidden_layers": 9}, "num_hidden_layers is 9, and the length of layers_block_type is 3"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention"]}, "describes 2 layers, and the weights have more"),
        ("nemotron_h", {"layers_block_type": ["mamba", "banana", "moe"]}, "contains invalid types: {'banana'}"),
        ("lfm2", {"layer_types": ["conv", "banana"]}, "'banana']"),
        ("gemma3", {"layer_types": ["full_attention", "linear_attention"]}, "kind 'linear_attention', and this"),
        ("bamba", {"attn_layer_indices": [7]}, "weights are missing, for example model.layers.1.mamba"),
        ("lfm2", {"conv_L_cache": 1}, "model.layers.0.conv.conv.weight: [64, 1, 3], and not [64, 1, 1]"),
    ],
)
def test_a_configuration_that_does_not_fit(refuse_cli, tmp_path, name, change, words):
    folder = save_checkpoint(make_model(*(ARCHITECTURES | HYBRIDS)[name]), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    line = refused(refuse_cli, folder)
    assert words in line
    assert "config.json" in line or name == "bamba"


def test_layers_that_only_guess_tokens_may_be_left() -> None:
    """DeepSeek and GLM number the layers of their MTP modules after the model's own."""
    model, source = make_llama(), Source("one", Path("none"), None, ())
    model.config.num_nextn_predict_layers = 1
    check_no_layer_left(source, model, ["model.layers.2.eh_proj.weight", "visual.layers.7.norm.weight", "other"])
    with pytest.raises(CheckpointError, match=r"describes 2 layers, and .* for example model\.layers\.3\.norm"):
        check_no_layer_left(source, model, ["model.layers.3.norm.weight"])


@pytest.mark.parametrize(("name", "size"), [("lfm2", "conv_L_cache"), ("qwen3_next", "linear_conv_kernel_dim")])
def test_a_state_that_the_contract_cannot_hold(refuse_cli: Refuse, tmp_path: Path, name: str, size: str) -> None:
    classes, config = HYBRIDS[name]
    line = refused(refuse_cli, save_checkpoint(make_model(classes, config | {size: 1}), tmp_path / "model"))
    assert "recurrence 0 (UnpaddedCausalConv) has 0x" in line
    assert "check the sizes of its kernels" in line


def test_a_function_that_takes_other_arguments(refuse_cli, tmp_path, monkeypatch):
    from transformers.models.lfm2 import modeling_lfm2

    folder = save_checkpoint(make_model(*HYBRIDS["lfm2"]), tmp_path / "model")
    own = modeling_lfm2.causal_conv1d_fn
    changed: list[Callable[..., Any]] = [  # as they would be: the model itself runs with them
        lambda inputs, kernel, bias=None, activation=None: own(inputs, kernel, bias, activation),
        lambda hidden_states, weight, bias=None, gate=None: own(hidden_states, weight, bias, gate),
    ]
    for function in changed:
        monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", function)
        line = refused(refuse_cli, folder)
        assert "lfm2 (Lfm2ForCausalLM) cannot be exported: causal_conv1d_fn of " in line
        assert "and not hidden_states, weight, bias, activation; transformers is " in line
        assert "install the version of transformers" in line


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("lfm2", (), "its layers of kind conv keep a state, and compute it in no function that is known"),
        (
            "qwen3_next",
            ("causal_conv1d_fn",),
            "of what keeps a state, 3 UnpaddedCausalConv were seen, and transformers",
        ),
    ],
)
def test_a_function_under_another_name(refuse_cli, tmp_path, monkeypatch, name, known, words):
    hooks = {each: hook for each, hook in recurrence._HOOKS.items() if each in known}
    monkeypatch.setattr(recurrence, "_HOOKS", hooks)
    folder = save_checkpoint(make_model(*HYBRIDS[name]), tmp_path / "model")
    assert words in refused(refuse_cli, folder)


def test_hooks_fit_the_functions_that_transformers_has() -> None:
    for name in HYBRIDS:
        recurrence.check_functions(make_model(*HYBRIDS[name]))

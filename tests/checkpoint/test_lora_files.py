"""LoRA adapters read without PEFT: the numbers of plain torch where they are honoured, a named refusal where not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.lora import CONFIG, WEIGHTS, find_adapter
from specexport.checkpoint.lora_fit import merge_adapter, read_adapter, use_adapter
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_lora import ALL, apply_adapter, save_adapter
from tests.support.models.tiny_models import ARCHITECTURES, make_model, save_checkpoint

IDS = [[5, 9, 200, 31, 7, 310, 2, 44, 45, 46]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("llama", {"targets": "all-linear"}),
    "rsLoRA, patterns": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"q_proj": 2, "mlp.up_proj": 8}, "alpha_pattern": {"o_proj": 3}},
    ),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "a pattern": ("llama", {"targets": r".*\.0\.(self_attn\.[qv]_proj|mlp\.down_proj)"}),
    "biases": ("llama_tied", {"targets": ["q_proj", "v_proj"]}),
    "turned weights": ("gpt2", {"targets": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "embedding and LM head": ("llama", {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "a router": ("mixtral", {"targets": ["q_proj", "v_proj"]}),
}


def make(folder: Path, name: str = "llama", **config: Any) -> tuple[Any, Path]:
    model = make_model(*ARCHITECTURES[name])
    return model, save_adapter(model, folder / "adapter", **config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
def test_merged_weights_compute_what_the_factors_do(kind: str, stream: bool, tmp_path: Path) -> None:
    name, config = KINDS[kind]
    model, folder = make(tmp_path, name, **config)
    checkpoint = load_checkpoint(str(save_checkpoint(model, tmp_path / "model")), stream=stream)
    assert bool(checkpoint.stored) == (stream and name not in ("mixtral",))  # experts are stacked when they are loaded
    plain = compute_reference_logits(checkpoint, IDS)[0]
    adapter = read_adapter(find_adapter("a", str(folder)), checkpoint.model)
    with torch.no_grad():
        wanted = apply_adapter(model, folder)(torch.tensor(IDS)).logits[0].numpy()
    with use_adapter(checkpoint, adapter) as changed:
        within = compute_reference_logits(changed, IDS)[0]
    assert (compute_reference_logits(checkpoint, IDS)[0] == plain).all()
    merge_adapter(checkpoint, adapter)
    found = compute_reference_logits(checkpoint, IDS)[0]
    assert (found == within).all()
    assert abs(found - wanted).max() < 1e-4 * max(1.0, abs(wanted).max())
    assert abs(found - plain).max() > 0.1


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "is of type 'IA3', not LORA"),
    "another task": ({"task_type": "SEQ_CLS"}, "is for task 'SEQ_CLS'"),
    "biases": ({"bias": "lora_only"}, "bias 'lora_only', which is not honoured"),
    "bias of B": ({"lora_bias": True}, "lora_bias True, which is not honoured"),
    "DoRA": ({"use_dora": True}, "use_dora True, which is not honoured"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\], which is not honoured"),
    "rows of a table": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "stacked experts": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
    "copied layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "from a token on": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    "of the future": ({"use_something_new": 1}, "use_something_new 1, which is not honoured"),
    "another base": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights 'pissa', which changes the base model's weights",
    ),
    "no rank": ({"r": 0}, "r is 0"),
    "no number": ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    "no modules": ({"target_modules": None}, "target_modules is None"),
    "no pattern": ({"target_modules": "(q_proj"}, "which is no pattern"),
    "another rank": ({"r": 5}, r"proj\.lora_A\.weight: it is \[4, 96\], and .* takes \[5, 96\]"),
    "fewer modules": ({"target_modules": ["q_proj"]}, "a module that its configuration does not name"),
    "more modules": ({"target_modules": [*ALL, "lm_head"]}, "names lm_head, and it has no tensors for it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(what: str, tmp_path: Path) -> None:
    values, words = REFUSED[what]
    model, folder = make(tmp_path)
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(find_adapter("mine", str(folder)), model)
    assert "LoRA adapter mine (adapter)" in str(caught.value)
    assert caught.value.hint


def _damaged(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), "there is no such folder"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "pickled": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        r"is pickled \(adapter_model\.bin\)",
    ),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json cannot be read"),
    "not safetensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"no"), "safetensors cannot be read"),
    "no B": (_damaged(lambda t: t.pop(f"{_Q}.lora_B.weight")), "q_proj has A only"),
    "another shape": (
        _damaged(lambda t: t.update({f"{_Q}.lora_B.weight": torch.zeros(63, 4)})),
        rf"{re.escape(_Q)}\.lora_B\.weight: it is \[63, 4\]",
    ),
    "an unknown module": (
        _damaged(lambda t: t.update({_Q.replace("0", "9") + ".lora_A.weight": torch.zeros(4, 64)})),
        "the model has no module model.layers.9.self_attn.q_proj",
    ),
    "a magnitude": (
        _damaged(lambda t: t.update({f"{_Q}.lora_magnitude_vector": torch.zeros(64)})),
        "lora_magnitude_vector, which is no factor",
    ),
    "a whole matrix": (
        _damaged(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(320, 64)})),
        "lm_head.weight, which is no factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, words = BROKEN[what]
    model, folder = make(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=words):
        read_adapter(find_adapter("mine", str(folder)), model)


def test_one_matrix_for_two_cannot_be_changed_for_one(tmp_path: Path) -> None:
    model, folder = make(tmp_path, "llama_tied", targets=["embed_tokens"])
    with pytest.raises(CheckpointError, match="one matrix for its embedding and its LM head"):
        read_adapter(find_adapter("mine", str(folder)), model)


def test_an_adapter_that_changes_while_it_is_read(tmp_path: Path) -> None:
    model, folder = make(tmp_path)
    checkpoint = load_checkpoint(str(save_checkpoint(model, tmp_path / "model")), stream=True)
    merge_adapter(checkpoint, read_adapter(find_adapter("a", str(folder)), checkpoint.model))
    edit_tensors(folder, lambda tensors: tensors.update({f"{_Q}.lora_B.weight": torch.zeros(64, 4)}))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        compute_reference_logits(checkpoint, IDS)

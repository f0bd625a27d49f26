"""What tests of one structure share: an export with the weights of each model, and nothing where structures differ."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specexport.checkpoint.load import load_checkpoint
from specexport.trace.check import trace_checkpoint
from tests.support.models import tiny_traces
from tests.support.models.half_models import load
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_llama, make_model, save_checkpoint
from tests.support.models.tiny_traces import Unknown, read_export, structure_of, tiny_model, trace_of, write_export
from tests.support.references.engine_harness import make_checkpoint


def test_models_that_differ_in_weights_share_an_export_and_keep_their_own() -> None:
    first, second = make_llama(0, num_hidden_layers=1), make_llama(1, num_hidden_layers=1)
    traced = [trace_checkpoint(make_checkpoint(model)).ir_model for model in (first, second)]
    exported = len(tiny_traces._EXPORTS)
    trace_checkpoint(make_checkpoint(make_llama(2, num_hidden_layers=1)))
    assert len(tiny_traces._EXPORTS) == exported, "nothing is exported anew"
    for model, ir_model in zip((first, second), traced, strict=True):
        weights = {f"model.{name}": weight for name, weight in model.named_parameters()}
        found = {name: value for name, value in ir_model.graph.initializers.items() if name in weights}
        assert len(found) == len(weights)
        for name, value in found.items():
            np.testing.assert_array_equal(value.const_value.numpy(), weights[name].detach().numpy())
    assert {id(node) for node in traced[0].graph}.isdisjoint(id(node) for node in traced[1].graph)


def test_what_decides_an_export_is_told_apart() -> None:
    def told(*more: Any, half: bool = False, **overrides: Any) -> str | None:
        model = make_llama(0, num_hidden_layers=1, **overrides)
        return structure_of(model.half() if half else model, *more)

    def scaled() -> str | None:
        model = make_llama(0, num_hidden_layers=1)
        model.model.layers[0].self_attn.scaling *= 2
        return structure_of(model)

    def turned() -> str | None:
        model = make_llama(0, num_hidden_layers=1)
        model.model.rotary_emb.inv_freq *= 2
        return structure_of(model)

    different = [
        told(), told("another input"), told(half=True), told(tie_word_embeddings=True), told(attention_bias=True),
        told(rms_norm_eps=1e-3), scaled(), turned(), structure_of(make_model(*ARCHITECTURES["qwen2"])),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert told() == different[0] == structure_of(make_llama(7, num_hidden_layers=1))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "mamba2"])
def test_a_model_that_was_saved_shares_the_export_of_the_one_in_memory(name: str, tmp_path: Path) -> None:
    model = make_model(*(ARCHITECTURES | HYBRIDS)[name])
    made = structure_of(model)
    assert structure_of(load_checkpoint(str(save_checkpoint(model, tmp_path))).model) == structure_of(model) == made


def test_what_cannot_be_compared_is_exported_anew() -> None:
    model = make_llama(0, num_hidden_layers=1)
    model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(Unknown):
        structure_of(model)
    closure = torch.nn.Linear(2, 2)
    closure.after = lambda x: x + different
    different = 1
    with pytest.raises(Unknown):
        structure_of(closure)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gpt_oss", "float32"), ("mamba2", "float32")])
def test_an_export_of_another_worker_is_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    """Graph, weights and constants, bit by bit."""
    model = load(ARCHITECTURES[name], dtype) if name in ARCHITECTURES else tiny_model(name, vocab_size=259)
    own = trace_of(model).ir_model
    write_export(own, tmp_path / "export.onnx")
    read = read_export(tmp_path / "export.onnx")
    contents = [ir.to_proto(each).SerializeToString(deterministic=True) for each in (own, read)]
    assert contents[0] == contents[1]
    kinds = [{type(value.const_value) for value in each.graph.initializers.values()} for each in (own, read)]
    assert kinds[0] == kinds[1]

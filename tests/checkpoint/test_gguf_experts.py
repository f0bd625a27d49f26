"""Experts of GGUF files: the model is that of the file, read expert by expert, and its integers are kept."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from specexport.checkpoint.gguf_blocks import FORMATS
from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.stored import StoredWeight, stored_tensor
from specexport.passes.block_experts import pack_rounded_experts
from specexport.passes.block_format import unpack
from specexport.passes.transpose_fold import TransposeFoldPass
from specexport.trace.check import compute_reference_logits
from specexport_runtime.errors import SpecexportError, UnsupportedModelError
from tests.support.models.tiny_gguf import EXPERTS, MIXED_EXPERTS, write_experts, write_gguf
from tests.support.models.tiny_models import GROUPED, make_model
from tests.support.references.engine_harness import make_checkpoint


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_the_model_is_the_file_s(tmp_path: Path, architecture: str, stream: bool) -> None:
    path = tmp_path / "tiny.gguf"
    wanted = make_checkpoint(write_experts(path, architecture, MIXED_EXPERTS))
    checkpoint = load_checkpoint(str(path), stream=stream, keep=True)
    assert type(checkpoint.model) is type(wanted.model)
    assert any("gate_up_proj" in name for name in checkpoint.stored) is stream
    sequences = [[5, 9, 200, 31, 7, 7, 80]]
    found, right = (compute_reference_logits(each, sequences)[0] for each in (checkpoint, wanted))
    np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])  # one below the other, and in turn
def test_the_integers_of_experts_are_the_file_s(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    kinds = MIXED_EXPERTS if architecture == "qwen3moe" else {"_exps.weight": "MXFP4", "": "Q8_0"}
    write_experts(path, architecture, kinds)
    kept = load_checkpoint(str(path), stream=True, keep=True).kept
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        codes = {}
        for part in ("gate", "up", "down"):
            tensor = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            found = FORMATS[tensor.tensor_type.name].read(np.array(tensor.data).reshape(4 * 256, -1))
            codes[part] = found.codes.reshape(4, 256, 256)
        experts = f"model.model.layers.{layer}.mlp.experts"
        both = kept[f"{experts}.gate_up_proj"].read(np.arange(4 * 512)).codes.reshape(4, 512, 256)
        in_turn = architecture == "gpt-oss"
        gates, ups = (both[:, ::2], both[:, 1::2]) if in_turn else np.split(both, 2, axis=1)
        np.testing.assert_array_equal(gates, codes["gate"])
        np.testing.assert_array_equal(ups, codes["up"])
        down = kept[f"{experts}.down_proj"].read(np.arange(4 * 256)).codes
        np.testing.assert_array_equal(down.reshape(4, 256, 256), codes["down"])
    assert all(name in kept for name in ("model.lm_head.weight", "model.model.layers.1.self_attn.q_proj.weight"))


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])  # as the file has them, and turned
def test_experts_are_rounded_one_at_a_time(tmp_path: Path, architecture: str) -> None:
    write_experts(tmp_path / "tiny.gguf", architecture, MIXED_EXPERTS)
    stored = load_checkpoint(str(tmp_path / "tiny.gguf"), stream=True).stored["model.layers.1.mlp.experts.gate_up_proj"]
    asked: list[int] = []

    def rows(start: int, stop: int) -> Any:
        asked.append(stop - start)
        return stored.rows(start, stop)

    tensor = stored_tensor("experts", StoredWeight(stored.shape, stored.dtype, rows))
    if architecture == "gpt-oss":
        weight = ir.Value(name="experts", const_value=tensor, shape=tensor.shape)
        turned = ir.node("Transpose", [weight], {"perm": [0, 2, 1]})
        end = ir.node("Identity", turned.outputs)
        graph = ir.Graph([], end.outputs, nodes=[turned, end], initializers=[weight], opset_imports={"": 20})
        TransposeFoldPass().rewrite(ir.Model(graph, ir_version=10))
        tensor = graph.initializers["experts.transposed"].const_value
    packed = pack_rounded_experts(tensor, 8).make()
    assert set(asked) == {1}
    values = [unpack("int8", part, 512, 256) for part in np.split(packed, 4)]
    whole = stored.whole().numpy()
    wanted = whole.swapaxes(1, 2) if architecture == "gpt-oss" else whole
    np.testing.assert_allclose(values, wanted, atol=np.abs(wanted).max() / 127)


def test_how_gpt_oss_files_scale_positions_is_read(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 16.0, "original_context_length": 64}
    stated = {f"gpt-oss.rope.scaling.{key}": value for key, value in scaling.items()}
    write_experts(tmp_path / "tiny.gguf", "gpt-oss", MIXED_EXPERTS, **stated)
    found = load_checkpoint(str(tmp_path / "tiny.gguf"), stream=True).model.config.rope_parameters
    assert {name: found[name] for name in ("rope_type", "factor", "original_max_position_embeddings", "truncate")} == {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "truncate": False,  # no key says it
    }


def test_the_gate_of_shared_experts_may_be_a_row_or_a_matrix_of_one(tmp_path: Path) -> None:
    name = "blk.1.ffn_gate_inp_shexp.weight"
    wanted = (
        write_experts(tmp_path / "row.gguf", "qwen2moe", MIXED_EXPERTS).model.layers[1].mlp.shared_expert_gate.weight
    )
    write_experts(tmp_path / "matrix.gguf", "qwen2moe", MIXED_EXPERTS, one_row=True)
    for path in (tmp_path / "row.gguf", tmp_path / "matrix.gguf"):
        shape = next(tensor.shape for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
        assert len(shape) == (2 if path.stem == "matrix" else 1)
        found = load_checkpoint(str(path), stream=True).stored["model.layers.1.mlp.shared_expert_gate.weight"]
        np.testing.assert_array_equal(found.whole(), wanted.detach())


def test_gates_and_ups_of_two_formats_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_experts(path, "qwen3moe", {"gate_exps.weight": "Q6_K"} | MIXED_EXPERTS)
    with pytest.raises(UnsupportedModelError, match=r"gate_exps.weight \(Q6_K\) and .*up_exps.weight \(Q4_K\) of tiny"):
        load_checkpoint(str(path), stream=True, keep=True)
    assert load_checkpoint(str(path), stream=True).stored


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "blk.1.ffn_gate.3.weight"), ("qwen2", "blk.0.ffn_up_exps.weight"), ("dbrx", "blk.0.ffn_up_exps.weight")],
)
def test_experts_that_cannot_be_read_are_refused(tmp_path: Path, architecture: str, name: str) -> None:
    """As files had them before llama.cpp stacked them; in a model without experts; and of one that is not known."""
    path, experts = tmp_path / "tiny.gguf", {name: np.zeros((2, 4, 64), np.float32)}
    write_gguf(make_model("Llama", GROUPED), path, architecture=architecture, tensors=experts)
    with pytest.raises(SpecexportError, match=r"^tiny\.gguf.*(experts that cannot be read|dbrx is not supported)"):
        load_checkpoint(str(path))

"""Weights that stay in their files: the same model, to the last bit, and nothing read that is not asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.checkpoint import streaming
from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.stored import StoredWeight
from specexport.checkpoint.tagged import Tags
from specexport.trace.check import compute_reference_logits, trace_checkpoint
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import ARCHITECTURES, GROUPED, make_llama, make_model, save_checkpoint
from tests.support.models.tiny_traces import tiny_model

SEQUENCES = [list(range(3, 40)), list(range(7, 19))]
WHOLE = {"mixtral", "qwen3_moe", "deepseek_v3"}
"""Transformers stacks their experts: no parameter of these is a stored tensor."""


YOUTU = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True, "pad_token_id": 3},
}


def parameters_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    named = dict(checkpoint.model.named_parameters(remove_duplicate=False))
    return {name: checkpoint.stored[name].whole() if name in checkpoint.stored else p for name, p in named.items()}


def assert_same_model(path: Path, dtype: str = "float32") -> Checkpoint:
    streamed, whole = (load_checkpoint(str(path), dtype=dtype, stream=stream) for stream in (True, False))
    ours, theirs = parameters_of(streamed), parameters_of(whole)
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert ours[name].dtype == wanted.dtype
        assert torch.equal(ours[name], wanted), name
    for found, wanted_logits in zip(
        compute_reference_logits(streamed, SEQUENCES), compute_reference_logits(whole, SEQUENCES), strict=True
    ):
        np.testing.assert_allclose(found, wanted_logits, atol=1e-5 if dtype == "float32" else 0.1)
    same = ("architecture", "vocab_size", "num_parameters", "eos_token_ids", "bos_token_id", "source_sha256")
    assert [getattr(streamed, name) for name in same] == [getattr(whole, name) for name in same]
    return streamed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matrix_of_every_architecture_is_the_one_in_its_file(name: str, tmp_path: Path) -> None:
    checkpoint = assert_same_model(save_checkpoint(tiny_model(name), tmp_path / "tiny"))
    matrices = {n for n, p in checkpoint.model.named_parameters(remove_duplicate=False) if p.ndim > 1}
    assert set(checkpoint.stored) == (set() if name in WHOLE else matrices)
    for weight, parameter in checkpoint.model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (weight in checkpoint.stored)


@pytest.mark.parametrize("kept", ["bfloat16", "float16", "float32"])
def test_stored_floats_become_the_dtype_that_is_asked_for(kept: str, tmp_path: Path) -> None:
    folder = save_checkpoint(make_llama().to(getattr(torch, kept)), tmp_path / "tiny")
    assert assert_same_model(folder).stored
    assert assert_same_model(folder, "bfloat16").stored


def test_a_file_may_mix_dtypes_and_shards(tmp_path: Path) -> None:
    folder = save_checkpoint(make_llama(), tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for at in range(3):
        part = {name: tensors[name] for name in names[at::3]}
        part = {name: t.to(torch.float16) if n % 2 else t for n, (name, t) in enumerate(part.items())}
        save_file(part, folder / f"model-{at}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(part, f"model-{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert assert_same_model(folder).stored


@pytest.mark.parametrize(
    ("architecture", "classes", "kind"),
    [
        ("llama", "Llama", "Q8_0"),  # rows of queries and keys in another order
        ("qwen2", "Qwen2", "Q4_K"),
        ("qwen2", "Qwen2", "F32"),
        ("gemma3", "Gemma3:Gemma3ForCausalLM:Gemma3TextConfig", "Q6_K"),  # norms less one
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_read_as_transformers_reads_it(architecture, classes, kind, tied, tmp_path):
    config = GROUPED | {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": tied}
    path = tmp_path / "tiny.gguf"
    kinds = {} if kind == "F32" else {"": kind}
    write_gguf(make_model(classes, config), path, architecture=architecture, kinds=kinds)
    checkpoint = assert_same_model(path)
    assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"} <= checkpoint.stored.keys()


def refuse_to_read(checkpoint: Checkpoint, but: Callable[[str], bool] = lambda _: False) -> None:
    def rows(start: int, stop: int) -> Any:
        raise AssertionError(f"rows {start} to {stop} were read")

    checkpoint.stored = {
        name: weight if but(name) else StoredWeight(weight.shape, weight.dtype, rows)
        for name, weight in checkpoint.stored.items()
    }


def test_tracing_reads_no_weight(tmp_path: Path) -> None:
    folder = save_checkpoint(make_llama(tie_word_embeddings=True), tmp_path / "tiny")
    checkpoint, wanted = load_checkpoint(str(folder), stream=True), load_checkpoint(str(folder))
    real = checkpoint.stored
    refuse_to_read(checkpoint)
    graph = trace_checkpoint(checkpoint).ir_model.graph
    for name, weight in real.items():
        checkpoint.stored[name] = weight  # type: ignore[index]  # a mapping that this test made
    assert all(parameter.is_meta for _, parameter in checkpoint.model.named_parameters() if parameter.ndim > 1)
    theirs = trace_checkpoint(wanted).ir_model.graph
    assert graph.initializers.keys() == theirs.initializers.keys()
    for name, value in theirs.initializers.items():
        read = real.get(name.removeprefix("model."))
        found = graph.initializers[name].const_value.numpy() if read is None else read.whole().numpy()  # type: ignore[union-attr]
        np.testing.assert_array_equal(found, value.const_value.numpy())  # type: ignore[union-attr]


def test_a_large_layer_is_multiplied_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(make_llama(mlp_bias=True), tmp_path / "tiny")
    wanted = compute_reference_logits(load_checkpoint(str(folder)), SEQUENCES)
    monkeypatch.setattr("specexport.checkpoint.stored.CHUNK", 64 * 7)  # seven rows of most
    found = compute_reference_logits(load_checkpoint(str(folder), stream=True), SEQUENCES)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_embedding_is_read_where_it_is_looked_up(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(make_llama(), tmp_path / "tiny")), stream=True)
    table, seen = checkpoint.stored["model.embed_tokens.weight"], []

    def rows(start: int, stop: int) -> torch.Tensor:
        seen.append((start, stop))
        return table.rows(start, stop)

    checkpoint.stored = {**checkpoint.stored, "model.embed_tokens.weight": StoredWeight(table.shape, table.dtype, rows)}
    compute_reference_logits(checkpoint, [[5, 9, 5]])
    assert sorted(seen) == [(5, 6), (9, 10)]


def test_a_parameter_without_data_is_said_to_be_on_the_cpu(tmp_path: Path) -> None:
    """Models ask, to make position ids beside it."""
    checkpoint = load_checkpoint(str(save_checkpoint(make_llama(), tmp_path / "tiny")), stream=True)
    weight = checkpoint.model.get_input_embeddings().weight
    assert weight.device.type == "meta"
    with streaming.streamed(checkpoint.model, checkpoint.stored):
        assert weight.device.type == "cpu"


def test_a_model_that_is_run_elsewhere_says_that_it_has_no_data(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(make_llama(), tmp_path / "tiny")), stream=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        checkpoint.model(input_ids=torch.tensor([[1, 2]]))


def test_stand_ins_read_nothing_and_leave_nothing(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(make_llama(), tmp_path / "tiny")), stream=True)
    wanted = compute_reference_logits(checkpoint, SEQUENCES)
    real = checkpoint.stored
    refuse_to_read(checkpoint)
    with streaming.use_random_weights(checkpoint.model, checkpoint.stored), torch.no_grad():
        logits = checkpoint.model(input_ids=torch.tensor([SEQUENCES[0]])).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1  # no degenerate model: packed tokens are compared with these
    checkpoint.stored = real
    np.testing.assert_array_equal(compute_reference_logits(checkpoint, SEQUENCES)[0], wanted[0])


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_changes_meanwhile_is_noticed(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        path = source = tmp_path / "tiny.gguf"
        write_gguf(make_model("Qwen2", GROUPED), path)
    else:
        source = save_checkpoint(make_llama(), tmp_path / "tiny")
        path = source / "model.safetensors"
    checkpoint = load_checkpoint(str(source), stream=True)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=rf"changed while it was read \({path.name}\)"):
        compute_reference_logits(checkpoint, SEQUENCES)
    path.unlink()
    with pytest.raises(CheckpointError, match="changed while it was read"):
        compute_reference_logits(checkpoint, SEQUENCES)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(make_llama(), tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing, for example model\.layers\.0\.mlp\.up_proj"):
        load_checkpoint(str(folder), stream=True)


@pytest.mark.parametrize(
    "change", [lambda tag: tag, lambda tag: tag.T, lambda tag: tag[:2], lambda tag: tag[2:], lambda tag: tag + 0]
)
def test_a_weight_that_is_turned_cut_or_made_anew_is_no_stored_one(change: Callable[[Any], Any]) -> None:
    tags = Tags(torch.float32)
    tag = tags.make((4, 4), lambda start, stop: torch.ones(stop - start, 4))
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(change(tag), requires_grad=False)
    found = tags.resolve_tags(model)
    assert (found is None) == (change(tag) is not tag)
    assert model.weight.is_meta == (found is not None)


def cleared(tag: Any) -> Any:
    """A row is overwritten, as models do whose own initialization clears the padding token."""
    tag[1].zero_()
    return tag


def test_a_weight_that_was_given_other_values_is_no_stored_one() -> None:
    tags, model = Tags(torch.float32), torch.nn.Module()
    tag = tags.make((4, 4), lambda start, stop: torch.ones(stop - start, 4))
    model.weight = torch.nn.Parameter(cleared(tag), requires_grad=False)
    assert tags.resolve_tags(model) is None


def test_a_model_that_clears_a_row_as_it_loads_is_as_transformers_loads_it(tmp_path: Path) -> None:
    """Youtu clears the padding token's, even of a checkpoint: its LM head is tied, so that this token has no logit."""
    model = make_model("Youtu", GROUPED | YOUTU)
    assert not assert_same_model(save_checkpoint(model, tmp_path / "tiny")).stored


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_the_file_has_too_is_compared_with_the_embedding(same: bool, tmp_path: Path) -> None:
    """Transformers ties them where they are equal, whatever the configuration says."""
    folder = save_checkpoint(make_llama(tie_word_embeddings=True), tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not same:
        tensors["lm_head.weight"][-1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = assert_same_model(folder)
    head, table = checkpoint.model.get_output_embeddings().weight, checkpoint.model.get_input_embeddings().weight
    assert (head is table) == same
    assert checkpoint.stored


def test_matrices_of_one_row_or_column_are_stored_ones() -> None:
    tags, model = Tags(torch.float32), torch.nn.Module()
    for at, shape in enumerate([(1, 5), (5, 1), (1, 1)]):
        tag = tags.make(shape, lambda start, stop: torch.ones(stop - start, 1))
        model.register_parameter(f"w{at}", torch.nn.Parameter(tag, requires_grad=False))
    assert set(tags.resolve_tags(model) or ()) == {"w0", "w1", "w2"}

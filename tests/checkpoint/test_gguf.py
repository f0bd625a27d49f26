"""A GGUF file is read into the same model as its Hugging Face original."""

from pathlib import Path

import numpy as np
import pytest

from specexport.checkpoint.gguf_reader import open_reader
from specexport.checkpoint.gguf_shared import patch_gguf_readers
from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import hash_checkpoint, resolve_source
from specexport.trace.check import compute_reference_logits
from specexport.trace.prune import drop_layers
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model
from tests.support.references.engine_harness import make_checkpoint


def test_a_gguf_file_gives_the_original_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model("Qwen2", GROUPED)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    checkpoint = load_checkpoint(str(path))
    assert capfd.readouterr().err == ""  # no progress bar of the libraries beside our own
    assert checkpoint.source == "tiny.gguf"
    assert checkpoint.source_sha256 == hash_checkpoint(str(path))
    assert checkpoint.eos_token_ids == (2,)
    sequences = [[5, 9, 200, 31, 7]]
    found, wanted = (
        compute_reference_logits(checkpoint, sequences)[0],
        compute_reference_logits(make_checkpoint(model), sequences)[0],
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not hasattr(checkpoint.model, "hf_quantizer")
    checkpoint.model.save_pretrained(tmp_path / "again")  # fails while a quantizer's marks are left
    assert (tmp_path / "again" / "model.safetensors").is_file()


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        load_checkpoint(str(path))
    write_gguf(make_model("Qwen2", GROUPED), path)
    whole = path.read_bytes()
    for size in (len(whole) - 40, len(whole) // 3, 3000):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"broken\.gguf ends after {size:,} bytes"):
            load_checkpoint(str(path))


def test_a_folder_with_only_a_gguf_file_points_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        load_checkpoint(str(tmp_path))
    assert "model.gguf" in (caught.value.hint or "")


def test_the_header_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    write_gguf(make_model("Qwen2", GROUPED), path, kinds={"": "Q8_0"})
    parsed = []
    parse = gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda *args: parsed.append(1) or parse(*args))
    opens = gguf.GGUFReader
    checkpoint = load_checkpoint(str(path), keep=True)
    assert len(parsed) == 1
    assert gguf.GGUFReader is opens
    assert "model.lm_head.weight" in checkpoint.kept


def test_the_header_says_what_gguf_and_transformers_read_in_it(tmp_path: Path) -> None:
    import gguf
    from transformers.integrations.gguf import reader as by_hand

    path = tmp_path / "tiny.gguf"
    write_gguf(make_model("Qwen2", GROUPED), path, kinds={"": "Q8_0"})
    source = resolve_source(str(path))
    ours, theirs = open_reader(source), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        found = ours.fields[name]
        assert (found.offset, found.types, found.contents()) == (field.offset, field.types, field.contents()), name
        parts = [[bytes(each.parts[at]) for at in each.data] for each in (found, field)]
        assert parts[0] == parts[1], name
    assert [tensor.data_offset for tensor in ours.tensors] == [tensor.data_offset for tensor in theirs.tensors]
    tokens = "tokenizer.ggml.tokens"
    settings, names = by_hand.read_gguf_metadata(str(path), (tokens,))
    with patch_gguf_readers(source, ours):
        found, found_names = by_hand.read_gguf_metadata(str(path), (tokens,))
    assert found_names == names
    assert len(found[tokens]) > 1
    assert {key: found[key] for key in settings} == settings


def test_kept_weights_follow_their_layers(tmp_path: Path) -> None:
    path = tmp_path / "four.gguf"
    write_gguf(make_model("Qwen2", GROUPED | {"num_hidden_layers": 4}), path, kinds={"": "Q8_0"})
    checkpoint = load_checkpoint(str(path), keep=True)
    drop_layers(checkpoint, [0, 2])
    parameters = dict(checkpoint.model.named_parameters())
    assert {name for name in checkpoint.kept if ".layers." in name} == {
        f"model.{name}" for name, parameter in parameters.items() if ".layers." in name and parameter.ndim == 2
    }
    for name, weight in checkpoint.kept.items():
        np.testing.assert_array_equal(weight.floats(), parameters[name.removeprefix("model.")].numpy())


def test_a_file_that_is_a_link_is_named_by_the_link(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_model("Qwen2", GROUPED), path)
    expected = load_checkpoint(str(path)).model.state_dict()
    path.rename(tmp_path / "0f3a")
    path.symlink_to("0f3a")
    checkpoint = load_checkpoint(str(path))
    assert checkpoint.source == "tiny.gguf"
    found = checkpoint.model.state_dict()
    assert all((value == found[name]).all() for name, value in expected.items())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bias_that_the_model_has_no_place_for_is_refused(tmp_path: Path, stream: bool) -> None:
    """transformers gives a llama file no biases, and leaves out those that it has."""
    model = make_model("Llama", GROUPED)
    name, width = "blk.1.attn_q.bias", model.config.hidden_size
    write_gguf(model, tmp_path / "zero.gguf", architecture="llama", tensors={name: np.zeros(width, np.float32)})
    assert load_checkpoint(str(tmp_path / "zero.gguf"), stream=stream).model is not None
    bias = np.linspace(0, 1, width, dtype=np.float32)
    write_gguf(model, tmp_path / "one.gguf", architecture="llama", tensors={name: bias})
    with pytest.raises(CheckpointError, match=r"^one\.gguf has a bias that .* leaves out, blk\.1\.attn_q"):
        load_checkpoint(str(tmp_path / "one.gguf"), stream=stream)

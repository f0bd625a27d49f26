"""Loading: what is read, what is refused, and what the refusal says."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specexport.checkpoint.load import load_checkpoint
from specexport.checkpoint.source import hash_checkpoint
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models.tiny_models import make_llama, make_tokenizer, save_checkpoint


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_read_completely(folder: Path) -> None:
    checkpoint = load_checkpoint(str(folder))
    model = make_llama(tie_word_embeddings=True)
    assert checkpoint.source == "tiny"
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert (checkpoint.vocab_size, checkpoint.max_positions) == (320, 256)
    assert checkpoint.num_parameters == sum(p.numel() for p in model.parameters())  # the tied one once
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, (2,))
    assert checkpoint.special_tokens["eos_token"] == "</s>"
    found, wanted = checkpoint.model.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_bfloat16_weights_are_widened_without_loss(tmp_path: Path) -> None:
    import torch

    half = make_llama().to(torch.bfloat16)
    checkpoint = load_checkpoint(str(save_checkpoint(half, tmp_path / "half")))
    for name, weight in checkpoint.model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, half.state_dict()[name].float())


def test_the_hash_is_over_contents_not_places(original: Path, folder: Path) -> None:
    assert hash_checkpoint(str(folder)) == hash_checkpoint(str(original)) == load_checkpoint(str(folder)).source_sha256
    (folder / "notes.md").write_text("not part of the model")
    assert hash_checkpoint(str(folder)) == hash_checkpoint(str(original))
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert hash_checkpoint(str(folder)) != hash_checkpoint(str(original))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty": (empty, "is empty", "config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json", "config.json"),
    "no weights": (remove_weights, "no safetensors", "safetensors"),
    "pickle": (pickle_weights, "pickled weights only (pytorch_model.bin)", "convert the weights to safetensors"),
    "config not json": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read", "config.json"),
    "unknown type": (lambda f: edit_json(f / "config.json", model_type="xyzzy"), "xyzzy", "transformers knows"),
    "no type": (lambda f: (f / "config.json").write_text("{}"), "configuration cannot be read", "model_type"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded", "again"),
    "missing weight": (drop_a_weight, "layers.1.mlp.up_proj.weight", "complete"),
    "wrong shapes": (lambda f: edit_json(f / "config.json", hidden_size=32, head_dim=8), "[320, 64]", "belongs"),
    "no tokenizer": (drop_tokenizer, "tokenizer cannot be loaded", "tokenizer.json"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer", "tokenizer.json"),
    "quantized": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "quantized weights (bitsandbytes)",
        "quantized from",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_refused_with_the_way_out(name: str, folder: Path) -> None:
    damage, message, hint = BAD_FOLDERS[name]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(folder))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("source", ["/nonexistent/folder", "./nope", "~/nope", "a b", "a/b/c"])
def test_a_missing_folder_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        load_checkpoint(source)


@pytest.mark.parametrize(("name", "words"), [("model.bin", "pickled"), ("model.onnx", r"not a \.gguf")])
def test_a_file_that_is_no_checkpoint_is_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize("source", ["nobody/no-such-model", "no-such-model"])
def test_an_unreachable_hub_is_said_so(source: str) -> None:
    with pytest.raises(CheckpointError, match="not a local folder, and the model hub could not be reached") as caught:
        load_checkpoint(source)
    assert source in caught.value.message


def test_a_hub_id_is_read_from_the_hub_cache(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repo_id: str, **named: object) -> str:
        calls.append((repo_id, named))
        return str(original)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = load_checkpoint("someone/tiny", revision="v1")
    assert checkpoint.source == "someone/tiny"
    ((repo_id, named),) = calls
    assert (repo_id, named["revision"]) == ("someone/tiny", "v1")
    assert not any(str(p).endswith((".bin", ".py", ".pt")) for p in named["allow_patterns"])  # type: ignore[attr-defined]


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match="t5 cannot be exported: it is an encoder-decoder"):
        load_checkpoint(str(tmp_path))


def test_a_weight_beyond_float16_is_refused_and_bfloat16_takes_it(tmp_path: Path) -> None:
    import torch

    model = make_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    save_checkpoint(model, tmp_path / "large")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that float16 cannot"
    ) as found:
        load_checkpoint(str(tmp_path / "large"), dtype="float16")
    assert "--dtype bfloat16" in str(found.value.hint)
    assert load_checkpoint(str(tmp_path / "large"), dtype="bfloat16").dtype == "bfloat16"


def into_blobs(folder: Path, blobs: Path) -> None:
    """Leave relative links to files named by a number, as the hub's cache does."""
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / f"{number}")
        path.symlink_to(os.path.relpath(blobs / f"{number}", folder))


def test_a_folder_of_links_is_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    model, expected = load_checkpoint(str(folder)).model, hash_checkpoint(str(folder))
    into_blobs(folder, tmp_path / "blobs")
    (tmp_path / "named").symlink_to(folder)
    linked = load_checkpoint(str(tmp_path / "named"))
    assert linked.source == "named"
    assert hash_checkpoint(str(tmp_path / "named")) == expected
    found = linked.model.state_dict()
    assert all((value == found[name]).all() for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_is_no_file_is_never_read(name: str, folder: Path) -> None:
    for place, said in (("nowhere", "is a link that leads to no file"), ("/dev/zero", "is no regular file")):
        (folder / name).unlink()
        (folder / name).symlink_to(place)
        with pytest.raises(CheckpointError, match=f"{name} {said}"):
            load_checkpoint(str(folder))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        hash_checkpoint(str(folder))


def test_a_dangling_link_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gone").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="gone is a link that leads to nothing"):
        hash_checkpoint("gone")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bias_that_the_configuration_leaves_out_is_refused(folder: Path, stream: bool) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    weights = load_file(path)
    size = weights[name.replace("bias", "weight")].shape[0]
    save_file(weights | {name: torch.zeros(size)}, path, metadata={"format": "pt"})
    assert load_checkpoint(str(folder), stream=stream).model is not None
    save_file(weights | {name: torch.arange(float(size))}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tiny has a bias that its configuration leaves out, {name}"):
        load_checkpoint(str(folder), stream=stream)

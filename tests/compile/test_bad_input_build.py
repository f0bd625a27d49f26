"""What a build refuses: exit code 2, one line that says what, where and how to fix it, and nothing left behind."""

import errno
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from specexport.backends import ort
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import REFUSED, make_model, save_checkpoint

Refuse = Callable[..., str]
RunCli = Callable[..., Result]


@pytest.fixture
def copied(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A copy of the tiny draft, to be spoiled."""
    return Path(shutil.copytree(tiny_pair.draft, tmp_path / "model"))


def build_args(target: object, *more: object, out: Path) -> tuple[object, ...]:
    return ("build", target, *more, "-o", out, "-q")


def test_a_missing_checkpoint_folder(refuse_cli: Refuse, tmp_path: Path) -> None:
    line = refuse_cli(*build_args(tmp_path / "none", out=tmp_path / "out"))
    assert "none" in line
    assert "there is no such folder" in line


def test_an_empty_checkpoint_folder(refuse_cli: Refuse, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    line = refuse_cli(*build_args(tmp_path / "model", out=tmp_path / "out"))
    assert "checkpoint folder model is empty" in line
    assert "config.json" in line


def test_pickled_weights(refuse_cli: Refuse, copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    line = refuse_cli(*build_args(copied, out=tmp_path / "out"))
    assert "pickled weights only (pytorch_model.bin)" in line
    assert "convert the weights to safetensors" in line


def test_a_broken_configuration(refuse_cli: Refuse, copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").write_text("{")
    line = refuse_cli(*build_args(copied, out=tmp_path / "out"))
    assert "model" in line
    assert "config.json" in line


def rename_tokens(folder: Path) -> None:
    """Let a vocabulary have its special tokens in common with others, and nothing else."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    special = {each["content"] for each in data["added_tokens"]}
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {name if name in special else f"unheard {name}": token for name, token in vocab.items()}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


SHARED = "3 tokens, 1.2% of the draft's and 1.2% of the target's, which are 0.0% of text"


def test_vocabularies_that_share_too_little(
    refuse_cli: Refuse, copied: Path, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    rename_tokens(copied)
    line = refuse_cli(*build_args(tiny_pair.target, "--draft", copied, out=tmp_path / "out"))
    assert f"different vocabularies that share too little: {SHARED}" in line


def test_vocabularies_of_which_only_the_loaded_models_show_that_they_share_too_little(
    refuse_cli: Refuse, tiny_pair: TinyPair, tiny_bundle: Path, copied: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    # A hub id or a GGUF file has no tokenizer.json to look into beforehand.
    monkeypatch.setattr("specexport.compile.pipeline._check_tokenizer_files", lambda _plan: None)
    rename_tokens(copied)
    line = refuse_cli(*build_args(tiny_pair.target, "--draft", copied, "--no-check", out=tmp_path / "out"))
    assert SHARED in line


@pytest.mark.parametrize("name", ["falcon_alibi", "bert"])
def test_models_that_cannot_be_traced_exactly(refuse_cli: Refuse, tmp_path: Path, name: str) -> None:
    classes, config, reason = REFUSED[name]
    save_checkpoint(make_model(classes, config), tmp_path / "model")
    line = refuse_cli(*build_args(tmp_path / "model", out=tmp_path / "out"))
    assert reason in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lookahead", "0"], "lookahead (K) is 0, outside 1 to 64"),
        (["--num-speculative-tokens", "-3"], "lookahead (K) is -3"),
        (["--lookahead", "65"], "lookahead (K) is 65"),
        (["--lookahead", "many"], "'many' is not a valid integer"),
        (["--lokahead", "4"], "no such option '--lokahead': did you mean '--lookahead'?"),
        (["--max-model-len", "2"], "max_model_len is 2"),
        (["--max-model-len", "long"], "'long' is neither a whole number nor 'auto'"),
        (["--backend", "openvino"], "backend 'openvino' is not in this release"),
        (["--dtype", "int3"], "dtype 'int3' cannot be built for backend ort-cpu"),
        (["--draft-revision", "main"], "draft_revision is given and draft is not"),
        (["--head-revision", "main"], "head_revision is given and head is not"),
        (["surplus"], "unexpected extra argument (surplus)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, flags: list[str], words: str) -> None:
    assert words in refuse_cli(*build_args(tiny_pair.target, *flags, out=tmp_path / "out"))


def test_a_length_that_the_model_cannot_have(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    line = refuse_cli(*build_args(tiny_pair.target, "--max-model-len", "9999", "--no-cache", out=tmp_path / "out"))
    assert "max_model_len is 9999, but a model supports only 256 positions" in line
    assert "give at most 256, or auto" in line


def test_missing_arguments(refuse_cli: Refuse) -> None:
    assert "target is missing" in refuse_cli("build", "-o", "somewhere")
    assert "output is missing" in refuse_cli("build", "sometarget")


def test_an_unknown_command(refuse_cli: Refuse) -> None:
    assert "no such command 'biuld': did you mean 'build'?" in refuse_cli("biuld", "x")


def test_an_unknown_recipe_key(refuse_cli: Refuse, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('target = "t"\nlook_ahead = 3\n')
    line = refuse_cli("build", "--recipe", tmp_path / "recipe.toml", "-o", tmp_path / "out")
    assert "unknown key 'look_ahead'" in line
    assert "did you mean 'lookahead'?" in line


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
def test_an_output_folder_in_use(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, force: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    line = refuse_cli(*build_args(tiny_pair.target, *force, out=tmp_path / "out"))
    assert "not empty" in line
    assert str(tmp_path / "out") in line
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_output_that_is_a_file(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    assert "is not a folder" in refuse_cli(*build_args(tiny_pair.target, out=tmp_path / "out"))


def test_an_output_below_a_file(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refuse_cli(*build_args(tiny_pair.target, out=tmp_path / "file" / "out"))


def test_a_disk_that_is_too_small(
    refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specexport.atomic.free_space", lambda _path: 1000)
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "is too small" in line
    assert "1,000 bytes are free" in line


def test_a_disk_that_fills_up(
    refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(_ir_model: object, folder: Path) -> str:
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"0" * 4321)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.onnx.data"))

    monkeypatch.setattr("specexport.backends.ort.write_onnx", write_half)
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "is full" in line
    assert "4,321 bytes written so far" in line
    assert "free" in line


def test_a_weights_file_that_ends_too_early(
    refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ort.write_onnx

    def write_a_little(ir_model: Any, folder: Path) -> str:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # numpy then says what it says of a full disk
        try:
            return write(ir_model, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(ort, "write_onnx", write_a_little)
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "is full" in line
    assert "written so far" in line


def test_a_defect_of_ours_keeps_its_traceback(
    run_cli: RunCli, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("specexport.compile.pipeline.hash_sources", fail)
    result = run_cli(*build_args(tiny_pair.target, out=tmp_path / "out"))
    assert isinstance(result.exception, ZeroDivisionError)
    assert any("Please report it" in note for note in result.exception.__notes__)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_export_stack(
    refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specexport.compile.model._NEEDED", ("torch", "nosuchmodule"))
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "building needs nosuchmodule, which is not installed" in line
    assert "pip install -e '.[export,cpu]'" in line

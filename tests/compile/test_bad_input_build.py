"""What a build refuses: exit code 2, one line that says what, where and how to fix it, and nothing left behind."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from specexport.backends import ort
from tests.support.cases.refusals import Refuse
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import REFUSED, make_model, save_checkpoint


@pytest.fixture
def copied(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair.draft, tmp_path / "model"))


def build_args(target: object, *more: object, out: Path) -> tuple[object, ...]:
    return ("build", target, *more, "-o", out, "-q")


def test_a_broken_configuration(refuse_cli: Refuse, copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").write_text("{")
    assert "config.json" in refuse_cli(*build_args(copied, out=tmp_path / "out"))


def rename_tokens(folder: Path) -> None:
    """Let a vocabulary have its special tokens in common with others, and nothing else."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    special = {each["content"] for each in data["added_tokens"]}
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {name if name in special else f"unheard {name}": token for name, token in vocab.items()}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


SHARED = "3 tokens, 1.2% of the draft's and 1.2% of the target's, which are 0.0% of text"


def test_vocabularies_that_share_too_little(refuse_cli, copied, tiny_pair, tmp_path):
    rename_tokens(copied)
    line = refuse_cli(*build_args(tiny_pair.target, "--draft", copied, out=tmp_path / "out"))
    assert f"different vocabularies that share too little: {SHARED}" in line


def test_vocabularies_of_which_only_the_loaded_models_show_that_they_share_too_little(
    refuse_cli: Refuse, tiny_pair: TinyPair, tiny_bundle: Path, copied: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    # A hub id or a GGUF file has no tokenizer.json to look into beforehand.
    monkeypatch.setattr("specexport.compile.pipeline.check_tokenizer_files", lambda _plan: None)
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
    ("arguments", "words"),
    [
        (["build", "x", "-o", "y", "--lookahead", "0"], "lookahead (K) is 0, outside 1 to 64"),
        (["build", "x", "-o", "y", "--lokahead", "4"], "no such option '--lokahead': did you mean '--lookahead'?"),
        (["build", "x", "-o", "y", "--max-model-len", "long"], "'long' is neither a whole number nor 'auto'"),
        (["build", "-o", "y"], "target is missing"),
        (["build", "x"], "output is missing"),
        (["build", "./nowhere", "-o", "y", "-q"], "there is no such folder"),
        (["biuld", "x"], "no such command 'biuld': did you mean 'build'?"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) else "",
)
def test_arguments(refuse_cli, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refuse_cli(*arguments)


def test_a_length_that_the_model_cannot_have(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    line = refuse_cli(*build_args(tiny_pair.target, "--max-model-len", "9999", "--no-cache", out=tmp_path / "out"))
    assert "max_model_len is 9999, but a model supports only 256 positions" in line
    assert "give at most 256, or auto" in line


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
def test_an_output_folder_in_use(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path, force: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    line = refuse_cli(*build_args(tiny_pair.target, *force, out=tmp_path / "out"))
    assert "not empty" in line
    assert str(tmp_path / "out") in line
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_output_that_is_a_file_or_below_one(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refuse_cli(*build_args(tiny_pair.target, out=tmp_path / "file"))
    assert "cannot be written" in refuse_cli(*build_args(tiny_pair.target, out=tmp_path / "file" / "out"))


def test_a_disk_that_is_too_small(refuse_cli, tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("specexport.disk.free_space", lambda _path: 1000)
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "is too small" in line
    assert "1,000 bytes are free" in line


def test_a_weights_file_that_ends_too_early(refuse_cli, tiny_pair, tmp_path, monkeypatch):
    write, before = ort.write_onnx, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_a_little(ir_model: Any, folder: Path, **options: Any) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # numpy then says what it says of a full disk
        return write(ir_model, folder, **options)

    monkeypatch.setattr(ort, "write_onnx", write_a_little)
    try:
        line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in line


def test_a_defect_of_ours_keeps_its_traceback(run_cli, tiny_pair, tmp_path, monkeypatch):
    def fail(*_args: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("specexport.compile.plan.hash_sources", fail)
    result = run_cli(*build_args(tiny_pair.target, out=tmp_path / "out"))
    assert isinstance(result.exception, ZeroDivisionError)
    assert any("Please report it" in note for note in result.exception.__notes__)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_export_stack(refuse_cli, tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("specexport.compile.model._NEEDED", ("torch", "nosuchmodule"))
    line = refuse_cli(*build_args(tiny_pair.target, "--no-cache", out=tmp_path / "out"))
    assert "building needs nosuchmodule, which is not installed" in line
    assert "pip install -e '.[export,cpu]'" in line

"""A tokenizer that loads in the background is the same tokenizer, and its errors are not lost."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from specexport_runtime.bundle import tokenizer_load
from specexport_runtime.bundle.tokenizer_load import load_tokenizer, start_loading
from specexport_runtime.errors import BundleError
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.engine_of import engine_of


def test_it_loads_once_when_it_is_started_or_used(
    demo_pair: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = demo_pair / "target" / "tokenizer.json"
    expected = load_tokenizer(path).encode("def main():").ids
    loads: list[str] = []
    load = tokenizer_load._load

    def count(path: Path, data: bytes) -> object:
        loads.append(threading.current_thread().name)
        return load(path, data)

    monkeypatch.setattr(tokenizer_load, "_load", count)
    copy = Path(shutil.copy(path, tmp_path))
    tokenizer = load_tokenizer(copy, background=True)
    assert loads == []
    copy.unlink()  # the thread parses what was there when the bundle was checked
    start_loading(tokenizer)
    start_loading(tokenizer)
    assert tokenizer.encode("def main():").ids == expected
    assert tokenizer.decode(expected) == "def main():"
    assert len(loads) == 1
    assert loads[0] != threading.current_thread().name
    assert load_tokenizer(path, background=True).encode("def main():").ids == expected


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", background=True)
    start_loading(tokenizer)
    with pytest.raises(BundleError, match="cannot be read"):
        tokenizer.encode("a")


@pytest.mark.parametrize("background", [False, True])
def test_what_a_tokenizer_keeps_of_its_training_does_not_act(demo_pair: Path, tmp_path: Path, background: bool) -> None:
    """Bundles hold such blocks: texts were cut, filled up, or split at random."""
    plain = load_tokenizer(demo_pair / "target" / "tokenizer.json")
    text = "def main():\n    return [1, 2, 3]\n"
    wanted = plain.encode(text).ids
    data = json.loads(plain.to_str())
    data["model"]["dropout"] = 0.9
    damaged = Tokenizer.from_str(json.dumps(data))
    damaged.enable_truncation(4)
    damaged.enable_padding(length=64)
    damaged.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids) == 64
    found = load_tokenizer(tmp_path / "tokenizer.json", background=background)
    assert [each.ids for each in found.encode_batch([text, "", text])] == [wanted, [], wanted]


@pytest.mark.parametrize("setting", ["truncation", "padding", "dropout", "alpha", None])
def test_a_callers_tokenizer_reads_whole_texts_and_stays_as_it_is(setting: str | None) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5), ("aba", -2.0), ("ba", -1.4)]
    merges = [("a", "b"), ("ab", "a")]
    unigram, bpe = models.Unigram(pieces, unk_id=0), models.BPE({p: i for i, (p, _) in enumerate(pieces)}, merges)
    tokenizer = Tokenizer(unigram if setting == "alpha" else bpe)
    text = "abababaab" * 5
    wanted = tokenizer.encode(text).ids
    if setting == "truncation":
        tokenizer.enable_truncation(4)
    elif setting == "padding":
        tokenizer.enable_padding(length=256)
    elif setting is not None:
        setattr(tokenizer.model, setting, 0.9)
    engine = engine_of(FakeExecutor(6, 2, 80), tokenizer, max_model_len=64)
    assert engine.encode(text) == engine.encode(text) == wanted
    assert all(tokenizer.encode(text).ids == wanted for _ in range(50)) == (setting is None)
    assert (engine.tokenizer is tokenizer) == (setting is None)

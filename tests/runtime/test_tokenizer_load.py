"""A tokenizer that loads in the background is the same tokenizer, and its errors are not lost."""

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specexport_runtime.bundle import tokenizer_load
from specexport_runtime.bundle.tokenizer_load import load_tokenizer, start_loading
from specexport_runtime.errors import BundleError


def test_it_loads_once_when_it_is_started_or_used(demo_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo_pair / "target" / "tokenizer.json"
    expected = load_tokenizer(path).encode("def main():").ids
    loads: list[str] = []
    load = tokenizer_load._load

    def count(path: Path) -> object:
        loads.append(threading.current_thread().name)
        return load(path)

    monkeypatch.setattr(tokenizer_load, "_load", count)
    tokenizer = load_tokenizer(path, background=True)
    assert loads == []
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

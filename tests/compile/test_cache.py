import dataclasses
import json
import os
from pathlib import Path

import pytest

from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.bundle import write_bundle
from specexport.compile.cache import EngineCache, cache_folder
from specexport.recipe import BuildRecipe
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.manifest import load_manifest
from tests.support.cases.entries import make_entry

KEY = "a" * 64


def make_engine(folder: Path, weights: bytes = b"w" * 1000, check: EngineCheck | None = None) -> BuiltModel:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx.data").write_bytes(weights)
    entry = make_entry(
        vocab_size=8,
        layers=(LayerGeometry(2, 4, 4), LayerGeometry(1, 8, 4)),
        inputs=("input_ids", "positions"),
        passes=(("fold", 3),),
    )
    return BuiltModel(
        entry=entry,
        files=hash_files(folder, ["model.onnx", "model.onnx.data"]),
        tokenizer_json="{„}".encode(),
        chat_template=None,
        special_tokens={"eos_token": "</s>"},
        bos_token_id=None,
        eos_token_ids=(2, 3),
        check=check,
    )


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "cache")


@pytest.mark.parametrize(
    "check", [None, EngineCheck(1e-6), EngineCheck(4.5, 0.98, 0.02, 0.01), EngineCheck(4.5, None, 0.02, 0.01)]
)
def test_what_was_stored_comes_back_equal_whatever_became_of_the_bundles(
    cache: EngineCache, tmp_path: Path, check: EngineCheck | None
) -> None:
    built = make_engine(tmp_path / "one", check=check)
    assert cache.store(KEY, built, tmp_path / "one")
    for name in ("two", "three"):
        assert cache.restore(KEY, tmp_path / name) == built
        assert hash_files(tmp_path / name, built.files) == built.files
        for altered in ("one", name):
            with (tmp_path / altered / "model.onnx.data").open("r+b") as file:
                file.write(b"poison")
    assert cache.restore("b" * 64, tmp_path / "four") is None
    assert not (tmp_path / "four").exists()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "entry.json"])
@pytest.mark.parametrize("how", ["alter", "truncate", "remove"])
def test_a_damaged_entry_is_dropped(cache: EngineCache, tmp_path: Path, name: str, how: str) -> None:
    built = make_engine(tmp_path / "one")
    cache.store(KEY, built, tmp_path / "one")
    path = cache.folder / KEY / name
    data = path.read_bytes()
    path.unlink()
    if how != "remove":
        path.write_bytes(data[:-1] if how == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    assert cache.restore(KEY, tmp_path / "two") is None
    assert not (tmp_path / "two").exists()
    assert not (cache.folder / KEY).exists()
    assert cache.store(KEY, built, tmp_path / "one")
    assert cache.restore(KEY, tmp_path / "two") == built


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    built = make_engine(tmp_path / "one")
    keys = ["a" * 64, "b" * 64, "c" * 64]
    for age, key in enumerate(keys):
        cache.store(key, built, tmp_path / "one")
        os.utime(cache.folder / key / "entry.json", (1000 + age, 1000 + age))
    cache.restore(keys[0], tmp_path / "two")  # now the most recently used
    size = sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file()) // 3
    assert EngineCache(tmp_path / "cache", max_bytes=2 * size + 10).prune() == [keys[1]]
    assert sorted(path.name for path in cache.folder.iterdir()) == [keys[0], keys[2]]
    assert EngineCache(tmp_path / "cache", max_bytes=0).prune(keep=keys[0]) == [keys[2]]


def test_an_engine_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache", max_bytes=100)
    assert not cache.store(KEY, make_engine(tmp_path / "one"), tmp_path / "one")
    assert not (cache.folder / KEY).exists()


def test_a_cache_that_cannot_be_written_does_not_fail_a_build(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = EngineCache(tmp_path / "cache")
    assert not cache.store(KEY, make_engine(tmp_path / "one"), tmp_path / "one")
    assert cache.restore(KEY, tmp_path / "two") is None


def test_pruning_removes_what_a_killed_build_left(cache: EngineCache) -> None:
    leftover = cache.folder / f".{KEY}.tmp-{2**22 + 1}"  # beyond the largest process number
    leftover.mkdir(parents=True)
    cache.prune()
    assert not leftover.exists()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SPECEXPORT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b" / "specexport"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "specexport"


def test_a_folder_that_others_may_write_to_is_not_used(cache: EngineCache, tmp_path: Path) -> None:
    built = make_engine(tmp_path / "one")
    assert cache.store(KEY, built, tmp_path / "one")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    cache.folder.chmod(0o770)
    assert cache.restore(KEY, tmp_path / "two") is None
    assert not cache.store("b" * 64, built, tmp_path / "one")
    cache.folder.chmod(0o755)
    assert cache.restore(KEY, tmp_path / "two") == built


def test_ids_that_the_model_has_no_row_for_end_nothing(tmp_path: Path) -> None:
    built = make_engine(tmp_path / "bundle" / "target")
    tokenizer = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}).encode()
    built = dataclasses.replace(built, tokenizer_json=tokenizer, eos_token_ids=(2, -1, 8, 7))
    recipe = BuildRecipe(target="t", output="o", max_model_len=32)
    write_bundle(tmp_path / "bundle", recipe=recipe, build_key=KEY, tools={}, models={"target": built})
    assert load_manifest(tmp_path / "bundle").vocabulary.eos_token_ids == (2, 7)

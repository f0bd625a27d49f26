"""The cache of engines, and its keys: they follow from what decides an engine, its imports, not a list of names."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport.compile import fingerprint
from specexport.compile.built import BuiltModel, EngineCheck
from specexport.compile.bundle import write_bundle
from specexport.compile.cache import EngineCache, cache_folder
from specexport.compile.fingerprint import BUNDLE_ROOT, ENGINE_ROOT, find_needed_sources, hash_sources
from specexport.recipe import BuildRecipe, resolve_parts, resolve_settings
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import SpecexportError
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
        entry=entry, files=hash_files(folder, ["model.onnx", "model.onnx.data"]), tokenizer_json="{„}".encode(),
        chat_template=None, special_tokens={"eos_token": "</s>"}, bos_token_id=None, eos_token_ids=(2, 3), check=check,
    )  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "cache")


@pytest.mark.parametrize(
    "check", [None, EngineCheck(1e-6), EngineCheck(4.5, 0.98, 0.02, 0.01), EngineCheck(4.5, None, 0.02, 0.01)]
)
def test_what_was_stored_comes_back_equal_whatever_became_of_the_bundles(cache, tmp_path, check):
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
    leftover = cache.folder / f".{KEY}.tmp-{2**22 + 1}"  # of a killed build, beyond the largest process number
    leftover.mkdir()
    size = sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file()) // 3
    assert EngineCache(tmp_path / "cache", max_bytes=2 * size + 10).prune() == [keys[1]]
    assert sorted(path.name for path in cache.folder.iterdir()) == [keys[0], keys[2]]
    assert EngineCache(tmp_path / "cache", max_bytes=0).prune(keep=keys[0]) == [keys[2]]


def test_a_cache_that_is_too_small_or_cannot_be_written_does_not_fail_a_build(tmp_path: Path) -> None:
    built = make_engine(tmp_path / "one")
    assert not EngineCache(tmp_path / "small", max_bytes=100).store(KEY, built, tmp_path / "one")
    (tmp_path / "cache").write_text("a file where the folder should be")
    for cache in (EngineCache(tmp_path / "small"), EngineCache(tmp_path / "cache")):
        assert cache.restore(KEY, tmp_path / "two") is None
    assert not EngineCache(tmp_path / "cache").store(KEY, built, tmp_path / "one")


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
    settings = resolve_settings(recipe, resolve_parts(recipe, {"target": False}))
    write_bundle(tmp_path / "bundle", settings=settings, build_key=KEY, tools={}, models={"target": built})
    assert load_manifest(tmp_path / "bundle").vocabulary.eos_token_ids == (2, 7)


ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of both packages that the keys are made from, to be changed."""
    for name, place in (("specexport", ROOT), ("specexport_runtime", ROOT / "runtime")):
        shutil.copytree(place / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "static"))
    monkeypatch.setattr(fingerprint, "_package_folder", lambda name: tmp_path / name)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    fingerprint._find_source.cache_clear()
    fingerprint._find_imports.cache_clear()


def test_what_decides_an_engine_is_in_its_key() -> None:
    names = set(find_needed_sources(ENGINE_ROOT))
    for decides in (
        "specexport_runtime.abi",
        "specexport_runtime.executors.paged",  # the layout of ort-cuda's caches
        "specexport.ops.spec",
        "specexport.passes.quantize_ort_cpu",
        "specexport.lowering.trt_native",
        "specexport.kernels.ragged_attention",
        "specexport.backends.trt_worker",  # named in a string only: it is another process
    ):
        assert decides in names
    for shows in ("specexport.cli", "specexport.demo", "specexport.bench.command", "specexport_runtime.engine"):
        assert shows not in names
    assert names < set(find_needed_sources(BUNDLE_ROOT))


def test_every_pass_lowering_and_kernel_is_in_the_key() -> None:
    names = set(find_needed_sources(ENGINE_ROOT))
    for folder in ("passes", "lowering", "kernels", "plugin", "checkpoint", "trace"):
        for path in (ROOT / "specexport" / folder).glob("*.py"):
            # Named by nobody, or by tools alone: a reason is owed for each.
            if path.stem in {"__init__", *NOT_PART_OF_A_BUILD}:
                continue
            assert f"specexport.{folder}.{path.stem}" in names, path


NOT_PART_OF_A_BUILD = {
    "report",  # the kernels' report of `specexport doctor`
    "sampling",  # its PTX is data of the runtime, which a test compares
    "sampling_ptx",
}


def test_a_change_changes_the_key_where_it_decides_something(package: Path) -> None:
    keys = [hash_sources(ENGINE_ROOT)]
    for name in ("specexport_runtime/executors/paged.py", "specexport/kernels/tiles.py", "specexport/cli.py"):
        (package / name).write_text((package / name).read_text() + "\n# changed\n")
        forget()
        keys.append(hash_sources(ENGINE_ROOT))
    assert len(set(keys)) == 3
    assert keys[-1] == keys[-2], "the command line decides no engine"


def test_a_missing_module_is_an_error(package: Path) -> None:
    (package / "specexport" / "passes" / "linear_pack.py").unlink()
    with pytest.raises(SpecexportError, match=r"linear_pack .* no such module"):
        hash_sources(ENGINE_ROOT)


def test_imports_in_functions_count_and_those_for_type_checkers_do_not(package: Path) -> None:
    root = package / "specexport" / "model_build.py"
    root.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from specexport.bench import runner\n"
        "def build():\n    from specexport import host\n    import specexport.progress\n"
        "WORKER = 'specexport.backends.trt_worker'\nNOTE = 'specexport.gone'\n"
    )
    names = set(find_needed_sources(ENGINE_ROOT))
    assert {"specexport.host", "specexport.progress", "specexport.backends.trt_worker"} <= names
    assert "specexport.bench.runner" not in names

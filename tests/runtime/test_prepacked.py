"""Packed weights in the user's cache: mapped, the same numbers, and no damage or lack of space fails a load."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from specexport_runtime import user_cache
from specexport_runtime.bundle.opened import Bundle, load_bundle
from specexport_runtime.executors import prepacked
from specexport_runtime.executors.base import Executor
from specexport_runtime.executors.open import open_executor as open_engine
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.executors.prepacked import DATA_NAME, GRAPH_NAME, PrepackedEngine, UnprovenError, prune
from specexport_runtime.packing.batch import ModelRunner, RowWork

ENGINE = PrepackedEngine("a" * 64, 20_000_000, (1, 5))
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where prepacked files go in this test."""
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepacked"


class Files:
    """Writes, proves and reads small files in the place of an engine's."""

    def __init__(self) -> None:
        self.written = 0
        self.fail: Exception | None = None
        self.wrong: str | None = None
        self.proved: list[tuple[int, ...]] = []

    def write(self, folder: Path) -> None:
        self.written += 1
        (folder / GRAPH_NAME).write_text("graph")
        if self.fail is not None:
            raise self.fail
        (folder / DATA_NAME).write_text("weights")

    def prove(self, folder: Path, widths: tuple[int, ...]) -> None:
        assert self.read(folder) == "graphweights"
        self.proved.append(widths)
        if self.wrong is not None:
            raise UnprovenError(self.wrong)

    def read(self, folder: Path) -> str:
        return (folder / GRAPH_NAME).read_text() + (folder / DATA_NAME).read_text()

    def load(self, engine: PrepackedEngine = ENGINE) -> str | None:
        loaded: str | None = engine.load(write=self.write, prove=self.prove, read=self.read)
        return loaded


@pytest.fixture
def files() -> Files:
    return Files()


def kept(store: Path) -> list[str]:
    """Names of the folders in the store, unfinished ones too."""
    return sorted(path.name for path in store.iterdir() if path.is_dir()) if store.exists() else []


def test_a_file_is_written_once(files: Files, store: Path) -> None:
    assert [files.load(), files.load()] == ["graphweights"] * 2
    assert files.written == 1
    assert kept(store) == [ENGINE.key]
    assert (store / ENGINE.key / DATA_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", [GRAPH_NAME, DATA_NAME, "record.json"])
@pytest.mark.parametrize("damage", ["altered", "truncated", "removed"])
def test_a_damaged_file_is_made_again(name: str, damage: str, files: Files, store: Path) -> None:
    files.load()
    path = store / ENGINE.key / name
    if damage == "removed":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-3] if damage == "truncated" else b"X" + content[1:])
    assert files.load() == "graphweights"
    assert files.written == 2
    assert kept(store) == [ENGINE.key]


def test_a_file_that_cannot_be_opened_is_made_again(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.load()

    def refuse_once(folder: Path) -> str:
        if files.written == 1:
            raise RuntimeError("wrong magic")
        return files.read(folder)

    assert ENGINE.load(write=files.write, prove=files.prove, read=refuse_once) == "graphweights"
    assert files.written == 2
    assert "wrong magic" in caplog.text


def test_a_file_that_never_opens_leaves_the_ordinary_way(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: Path) -> str:
        raise RuntimeError("wrong magic")

    assert ENGINE.load(write=files.write, prove=files.prove, read=refuse) is None
    assert caplog.text.count("wrong magic") == 1


def test_a_file_that_computes_something_else_is_not_kept_nor_made_again(
    files: Files, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.wrong = "they give other logits in a step of 5 tokens"
    assert files.load() is None
    assert caplog.text.count(files.wrong) == 1
    assert str(store / ENGINE.key) in caplog.text
    assert [path.name for path in (store / ENGINE.key).iterdir()] == ["record.json"]
    user_cache._warned.clear()  # another process
    files.wrong = None
    assert [files.load(), files.load()] == [None, None]
    assert files.written == len(files.proved) == len(caplog.records) == 1
    shutil.rmtree(store / ENGINE.key)  # as the message says
    assert files.load() == "graphweights"


def test_a_processor_that_computes_right_is_not_refused_for_another(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.wrong = "they give other logits in a step of 5 tokens"
    files.load()
    files.wrong = None
    monkeypatch.setattr(prepacked, "packing_key", lambda: "the next onnxruntime")
    assert files.load() == "graphweights"


def test_a_proof_that_breaks_off_says_nothing_about_the_file(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    def break_off(*_: object) -> None:
        raise RuntimeError("out of memory")

    assert ENGINE.load(write=files.write, prove=break_off, read=files.read) is None
    assert "out of memory" in caplog.text
    assert files.load() == "graphweights"


def test_a_file_is_proved_at_the_widths_of_every_bundle_that_uses_it(files: Files) -> None:
    wider = PrepackedEngine(ENGINE.engine_hash, ENGINE.weight_bytes, (1, 9))
    assert wider.key == ENGINE.key
    for engine in (ENGINE, wider, ENGINE, wider):
        assert files.load(engine) == "graphweights"
    assert files.proved == [(1, 5), (1, 5, 9)]


@pytest.mark.parametrize("widths", [None, 5, ["one", {}], "15"])
def test_a_file_that_was_never_proved_is_made_again(widths: object, files: Files, store: Path) -> None:
    files.load()
    path = store / ENGINE.key / "record.json"
    record = json.loads(path.read_text())
    path.write_text(
        json.dumps({**record, "widths": widths} if widths else {k: record[k] for k in record if k != "widths"})
    )
    assert files.load() == "graphweights"
    assert files.proved == [(1, 5), (1, 5)]


def test_another_processor_or_version_never_gets_the_file(
    files: Files, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.load()
    old = store / ENGINE.key
    monkeypatch.setattr(prepacked, "packing_key", lambda: "another onnxruntime")
    assert ENGINE.key != old.name
    shutil.copytree(old, store / ENGINE.key)  # even under the right name
    files.load()
    assert files.written == 2
    assert json.loads((store / ENGINE.key / "record.json").read_text())["packing_key"] == "another onnxruntime"


def test_engines_do_not_share_a_file(files: Files, store: Path) -> None:
    files.load()
    files.load(PrepackedEngine("b" * 64, ENGINE.weight_bytes))
    assert files.written == len(kept(store)) == 2


@pytest.mark.parametrize(("name", "value"), [("SPECEXPORT_PREPACKED", "0"), ("SPECEXPORT_CACHE_GB", "0")])
def test_it_can_be_turned_off(
    name: str, value: str, files: Files, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert files.load() is None
    assert not store.exists()


def test_small_engines_get_no_file(files: Files, store: Path) -> None:
    assert files.load(PrepackedEngine("a" * 64, prepacked.MIN_WEIGHT_BYTES - 1)) is None
    assert not store.exists()


@pytest.mark.parametrize("value", ["many", "nan", "inf"])
def test_a_limit_that_is_no_number_is_said_once(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECEXPORT_CACHE_GB", value)
    assert prepacked.limit_bytes() == prepacked.limit_bytes() == 20 * 10**9
    assert caplog.text.count("SPECEXPORT_CACHE_GB") == 1


def test_a_file_beyond_the_limit_is_not_made(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECEXPORT_CACHE_GB", "0.04")  # 20 MB of weights make a file of 42 MB
    assert files.load() is None
    assert files.written == 0
    assert "SPECEXPORT_CACHE_GB" in caplog.text


def test_a_full_disk_is_said_once(
    files: Files, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**9, 10**9 - 10**6, 10**6))
    assert [files.load(), files.load()] == [None, None]
    assert files.written == 0
    assert len(caplog.records) == 1
    assert "free space" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("cannot save")])
def test_a_write_that_fails_leaves_nothing(
    error: Exception, files: Files, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.fail = error
    assert files.load() is None
    assert kept(store) == []
    assert len(caplog.records) == 1


def test_no_folder_no_file(files: Files, store: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.parent.write_text("a file where the folder should be")
    assert [files.load(), files.load()] == [None, None]
    assert files.written == 0
    assert len(caplog.records) == 1


def test_a_read_only_cache_still_serves(
    files: Files, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.load()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "utime", refuse)
    assert files.load() == "graphweights"
    assert files.written == 1


def test_the_least_recently_used_goes_first(files: Files, store: Path) -> None:
    engines = [PrepackedEngine(letter * 64, ENGINE.weight_bytes) for letter in "abc"]
    for age, engine in zip((30, 20, 10), engines, strict=True):
        files.load(engine)
        for path in (store / engine.key).iterdir():
            os.utime(path, (time.time() - age, time.time() - age))
    files.load(engines[0])  # used again: now the newest
    size = sum(path.stat().st_size for path in (store / engines[0].key).iterdir())
    assert prune(store, 2 * size) == [engines[1].key]
    assert prune(store, 2 * size) == []
    assert prune(store, 0) == [engines[2].key, engines[0].key]


def test_what_a_killed_process_left_is_removed(files: Files, store: Path) -> None:
    files.load()
    for name, age in ((".tmp-old", 7200), (".tmp-new", 60)):
        (store / name).mkdir()
        (store / name / DATA_NAME).write_text("half")
        os.utime(store / name / DATA_NAME, (time.time() - age, time.time() - age))
    prune(store, 10**9)
    assert kept(store) == sorted([".tmp-new", ENGINE.key])


def open_executor(bundle: Bundle, role: str = "target", *, unpad_kv: bool = True, prepacked: bool = True) -> Executor:
    return open_engine(bundle, role, num_threads=1, spin=False, unpad_kv=unpad_kv, prepacked=prepacked)


def run_steps(executor: Executor, *, unpad_kv: bool = True) -> list[np.ndarray]:
    """Logits of prefill, ragged verify and decode steps, then what the caches hold."""
    runner = ModelRunner(executor, unpad_kv=unpad_kv)
    logits = []
    for first_row, work in (
        (0, [RowWork([5, 6, 7, 8, 9], 5)]),
        (1, [RowWork([11, 12], 2)]),
        (0, [RowWork([3, 4, 5], 3), RowWork([1], 1)]),
        (0, [RowWork([9], 1), RowWork([8], 1)]),
    ):
        logits.append(runner.step(first_row, work).copy())
        for row, item in enumerate(work, start=first_row):
            runner.kv.commit(row, runner.kv.kv_len(row) + len(item.tokens))
    assert isinstance(executor, OrtExecutor)
    return [*logits, *(cache.copy() for cache in executor._caches.values())]


@pytest.fixture
def bundle(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """The demo bundle, with files for its small draft too."""
    monkeypatch.setattr(prepacked, "MIN_WEIGHT_BYTES", 0)
    return load_bundle(demo_bundle, max_num_seqs=2, max_model_len=128)


@pytest.mark.parametrize(("role", "unpad_kv"), [("target", True), ("draft", True), ("draft", False)])
def test_numbers_and_caches_are_the_ordinary_sessions(role: str, unpad_kv: bool, bundle: Bundle, store: Path) -> None:
    expected = run_steps(open_executor(bundle, role, unpad_kv=unpad_kv, prepacked=False), unpad_kv=unpad_kv)
    assert kept(store) == []
    for _ in range(2):  # made, then found
        found = run_steps(open_executor(bundle, role, unpad_kv=unpad_kv), unpad_kv=unpad_kv)
        for want, got in zip(expected, found, strict=True):
            np.testing.assert_array_equal(want, got)
        assert len(kept(store)) == 1


def test_caches_are_updated_in_place(bundle: Bundle) -> None:
    executor = open_executor(bundle)
    assert isinstance(executor, OrtExecutor)
    for cache in executor._caches.values():
        cache[:] = 7.0
    ModelRunner(executor).step(0, [RowWork([5, 6, 7], 1)])
    for cache in executor._caches.values():
        assert (cache[0, :, :, :3] != 7.0).any(axis=-1).all()
        assert (cache[0, :, :, 3:] == 7.0).all()
        assert (cache[1] == 7.0).all()


def test_the_weights_file_is_not_read_again(bundle: Bundle, store: Path, tmp_path: Path) -> None:
    open_executor(bundle)
    copy = tmp_path / "copy"
    (copy / "target").mkdir(parents=True)
    for name in ("model.onnx", "model.onnx.data"):
        size = (bundle.folder / "target" / name).stat().st_size
        with (copy / "target" / name).open("wb") as file:
            file.truncate(size)  # a hole: no engine
    executor = open_executor(bundle._replace(folder=copy))
    assert np.isfinite(run_steps(executor)[0]).all()
    assert len(kept(store)) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_packed_weights_are_mapped(bundle: Bundle, store: Path) -> None:
    executor = open_executor(bundle)
    run_steps(executor)
    maps = Path("/proc/self/maps").read_text()
    assert str(store / kept(store)[0] / DATA_NAME) in maps


@pytest.mark.parametrize("name", [GRAPH_NAME, DATA_NAME])
def test_a_real_file_that_was_altered_is_not_used(name: str, bundle: Bundle, store: Path) -> None:
    expected = run_steps(open_executor(bundle, "draft"))
    path = store / kept(store)[0] / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    for want, got in zip(expected, run_steps(open_executor(bundle, "draft")), strict=True):
        np.testing.assert_array_equal(want, got)
    assert path.read_bytes() != content


SCRIPT = """
import sys
from pathlib import Path
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors import prepacked
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork
bundle = load_bundle(Path(sys.argv[1]), max_num_seqs=1)
print("ready", flush=True)
sys.stdin.readline()
write = prepacked.PrepackedEngine._make
prepacked.PrepackedEngine._make = lambda *args: (print("made"), write(*args))[1]
executor = open_executor(bundle, "target", num_threads=1, spin=False)
print(ModelRunner(executor).step(0, [RowWork([5, 6, 7], 1)]).argmax())
"""


def test_processes_that_start_together_make_one_file(demo_bundle: Path, store: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(demo_bundle)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(len(output) for output in outputs) == [1, 2]  # one of them made it
    assert outputs[0][-1] == outputs[1][-1]
    assert len(kept(store)) == 1

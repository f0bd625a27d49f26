"""The user's cache: where it is, what it trusts, and that it never fails a load."""

import errno
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specexport.compile.cache import cache_folder as compiler_cache_folder
from specexport.compile.cache import open_cache
from specexport.doctor.command import _cache
from specexport_runtime import machine as machine_facts
from specexport_runtime.machine import machine_key
from specexport_runtime.user_cache import ROOT_VARIABLE, cache_folder, cache_root, read_json, write_json


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("system", "variables", "end"),
    [
        ("linux", {}, "/home/.cache/specexport"),
        ("darwin", {}, "/home/Library/Caches/specexport"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/specexport/Cache"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/specexport"),
        ("linux", {"XDG_CACHE_HOME": "~/x"}, "/home/x/specexport"),
        ("linux", {"XDG_CACHE_HOME": "~/x", ROOT_VARIABLE: "~/y"}, "/home/y"),
    ],
)
def test_where_it_is(system, variables, end, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ROOT_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path / "home"), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", system)
    assert cache_root() == compiler_cache_folder()
    assert cache_root().as_posix().endswith(end)


def test_folders_are_made_for_this_user_alone_and_not_to_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_folder("things", writable=False) is None
    assert not root.exists()
    assert not caplog.records
    folder = cache_folder("things")
    assert folder == root / "things"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert write_json(folder / "a.json", {"x": [1, 2]})
    assert (folder / "a.json").stat().st_mode & 0o777 == 0o600
    assert read_json(folder / "a.json") == {"x": [1, 2]}
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_a_cache_that_cannot_be_made_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("a file where the folder should be")
    assert cache_folder("one") is None
    assert cache_folder("two") is None
    assert len(caplog.records) == 1
    assert str(root) in caplog.text
    assert "Fix: set SPECEXPORT_CACHE_DIR" in caplog.text


def test_a_read_only_folder_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache_folder("things")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [cache_folder("things"), cache_folder("things")] == [None, None]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "read-only" in caplog.text
    assert cache_folder("things", writable=False) == folder


def test_a_folder_open_to_others_is_not_trusted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache_folder("things")
    assert folder is not None
    write_json(folder / "a.json", 1)
    folder.chmod(0o777)
    assert cache_folder("things") is None
    assert cache_folder("things", writable=False) is None
    assert "others may write" in caplog.text
    folder.chmod(0o700)
    (folder / "a.json").chmod(0o666)
    assert read_json(folder / "a.json") is None


def test_a_folder_of_somebody_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder("things")
    assert folder is not None
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cache_folder("things", writable=False) is None


@pytest.mark.parametrize("failing", ["replace", "fdopen"])
def test_a_full_disk_leaves_the_old_file(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache_folder("things")
    assert folder is not None
    assert write_json(folder / "a.json", "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        assert not write_json(folder / "a.json", "new")
        assert not write_json(folder / "b.json", "new")
    assert read_json(folder / "a.json") == "old"
    assert [path.name for path in folder.iterdir()] == ["a.json"]
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": ', b"[" * 100_000])
def test_damaged_json_is_as_good_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.json").chmod(0o600)
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "missing.json") is None


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = [[i] * 2000 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda value: write_json(path, value), values))
    assert json.loads(path.read_text()) in values
    assert list(tmp_path.iterdir()) == [path]


def test_the_machines_key_names_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_key()
    assert machine_key() == machine
    for name, value in (
        ("available_cores", lambda: 99),
        ("_version", lambda _: "0.0"),
        ("_cpu", lambda: ("other", "")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(machine_facts, name, value)
            machine_facts._processor_facts.cache_clear()
            assert machine_key() != machine
    machine_facts._processor_facts.cache_clear()
    assert machine_key() == machine


def test_timings_of_one_gpu_are_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_key()
    for number, model in enumerate(("NVIDIA L4", "NVIDIA A10")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    assert machine_facts.gpu_names(tmp_path / "none") == ()
    assert machine_facts.gpu_names(tmp_path) == ("NVIDIA A10", "NVIDIA L4")
    monkeypatch.setattr(machine_facts, "gpu_names", lambda: ("NVIDIA L4",))
    with_gpu = machine_key()
    monkeypatch.setattr(machine_facts, "gpu_names", lambda: ("NVIDIA A10",))
    assert len({before, with_gpu, machine_key()}) == 3


@pytest.mark.parametrize("xdg", ["relative", "./relative", "", "~nobody-has-this-name/x"])
def test_the_working_directory_is_no_cache(xdg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECEXPORT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.chdir(tmp_path)
    assert cache_folder("things") == tmp_path / "home" / ".cache" / "specexport" / "things"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("home", "stated"), [("relative", {}), (None, {}), ("", {"XDG_CACHE_HOME": "~/x"}), ("", {ROOT_VARIABLE: "~/x"})]
)
def test_without_a_home_folder_there_is_no_cache(home, stated, tmp_path, monkeypatch, caplog) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (ROOT_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    if home is None:
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setenv("HOME", home)
    assert cache_folder("things") is None
    assert open_cache() is None
    assert "SPECEXPORT_CACHE_DIR" in str(_cache().fix)
    assert not list(tmp_path.iterdir())
    assert len(caplog.records) == 1

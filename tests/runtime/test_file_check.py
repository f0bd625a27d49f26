"""Files are hashed once, and every change of one is still found."""

import os
import time
from pathlib import Path

import pytest

from specexport_runtime.bundle import files as file_check
from specexport_runtime.bundle.files import FileEntry, check_files, hash_files, sha256_file
from specexport_runtime.errors import BundleError


@pytest.fixture(autouse=True)
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in a cache of this test's own; files settle at once."""
    names: list[str] = []

    def count(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(file_check, "sha256_file", count)
    monkeypatch.setattr(file_check, "SETTLE_NS", -(10**9))
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bundle"
    (made / "target").mkdir(parents=True)
    (made / "target" / "weights").write_bytes(b"w" * 1000)
    (made / "text").write_bytes(b"t" * 10)
    return made


def entries(folder: Path) -> dict[str, FileEntry]:
    return {
        name: FileEntry(sha256_file(folder / name), (folder / name).stat().st_size)
        for name in ("target/weights", "text")
    }


def test_a_known_file_is_not_hashed_again(folder: Path, hashed: list[str]) -> None:
    files = entries(folder)
    assert not check_files(folder, files, remember=True)
    assert sorted(hashed) == ["text", "weights"]
    assert check_files(folder, files, remember=True)
    assert len(hashed) == 2
    assert not check_files(folder, files)  # who does not ask for the record gets every hash
    assert len(hashed) == 4


def alter_in_place(path: Path) -> None:
    time.sleep(0.02)  # clocks of file systems tick up to 10 ms apart
    with path.open("r+b") as file:
        file.write(b"x")


def alter_and_restore_time(path: Path) -> None:
    before = path.stat()
    alter_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("alter", [alter_in_place, alter_and_restore_time, replace])
def test_a_change_that_keeps_the_size_is_found(alter: "object", folder: Path) -> None:
    assert callable(alter)
    files = entries(folder)
    check_files(folder, files, remember=True)
    alter(folder / "target" / "weights")
    for _ in range(2):
        with pytest.raises(BundleError, match="target/weights was altered"):
            check_files(folder, files, remember=True)


def test_another_wanted_hash_is_not_served_from_the_record(folder: Path) -> None:
    files = entries(folder)
    check_files(folder, files, remember=True)
    with pytest.raises(BundleError, match="text was altered"):
        check_files(folder, {**files, "text": FileEntry("0" * 64, 10)}, remember=True)


def test_hashing_can_be_forced(folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = entries(folder)
    check_files(folder, files, remember=True)
    monkeypatch.setenv("SPECEXPORT_VERIFY_HASHES", "1")
    assert not check_files(folder, files, remember=True)
    assert len(hashed) == 4
    monkeypatch.setenv("SPECEXPORT_VERIFY_HASHES", "0")
    assert check_files(folder, files, remember=True)


def test_a_file_that_may_still_change_is_hashed_again(folder, hashed, monkeypatch):
    monkeypatch.setattr(file_check, "SETTLE_NS", 3600 * 10**9)
    for _ in range(2):
        assert not check_files(folder, entries(folder), remember=True)
    assert len(hashed) == 4


def test_a_file_that_changes_while_it_is_hashed_is_not_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = entries(folder)

    def slow(path: Path) -> str:
        digest = sha256_file(path)
        if path.name == "weights":
            alter_in_place(path)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(file_check, "sha256_file", slow)
        check_files(folder, files, remember=True)
    with pytest.raises(BundleError, match="was altered"):
        check_files(folder, files, remember=True)


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b'{"folder": 1}', b'{"folder": "/", "files": {"text": []}}', "others may write", "no cache"]
)
def test_a_record_that_cannot_be_trusted_costs_a_hash(damage, folder, hashed, tmp_path):
    files, cache = entries(folder), tmp_path / "cache"
    check_files(folder, files, remember=True)
    (record,) = (cache / "checked").iterdir()
    if isinstance(damage, bytes):
        record.write_bytes(damage)
    elif damage == "no cache":
        cache.rename(tmp_path / "away")
        cache.write_text("no folder")
    else:
        record.chmod(0o666)
    assert not check_files(folder, files, remember=True)
    assert len(hashed) == 4


def test_missing_and_resized_files_are_refused(folder: Path) -> None:
    files = entries(folder)
    check_files(folder, files, remember=True)
    (folder / "text").write_bytes(b"t" * 11)
    with pytest.raises(BundleError, match="text has 11 bytes, not 10"):
        check_files(folder, files, remember=True)
    (folder / "text").unlink()
    with pytest.raises(BundleError, match="text is missing"):
        check_files(folder, files, remember=True)


def test_what_a_link_leads_to_is_what_is_known(folder: Path, hashed: list[str]) -> None:
    place = folder / "text"
    place.rename(folder.parent / "blob")
    place.symlink_to("../blob")
    files = entries(folder)
    assert not check_files(folder, files, remember=True)
    assert check_files(folder, files, remember=True)
    alter_in_place(folder.parent / "blob")
    with pytest.raises(BundleError, match="text was altered"):
        check_files(folder, files, remember=True)
    (folder.parent / "other").write_bytes(b"t" * 10)
    place.unlink()
    place.symlink_to("../other")
    assert not check_files(folder, files, remember=True)
    assert len(hashed) == 4


def test_old_records_are_dropped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_check, "MAX_RECORDS", 2)
    for i in range(4):
        copy = tmp_path / f"copy{i}"
        copy.mkdir()
        (copy / "text").write_bytes(b"t")
        check_files(copy, hash_files(copy, ["text"]), remember=True)
    assert len(list((tmp_path / "cache" / "checked").iterdir())) == 2

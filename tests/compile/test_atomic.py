import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specexport import atomic
from specexport.compile.bundle import check_output
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle import held
from specexport_runtime.errors import OutputExistsError, UserInputError

GONE = 2**22 + 1
"""A mark whose lock nobody has."""


FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
TOO_LARGE = OSError(errno.EFBIG, "File too large")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_half_way(path: Path, error: BaseException) -> None:
    with atomic.new_folder(path) as folder:
        (folder / "a").write_bytes(b"0" * 1234)
        raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(1, "no"), "no"), (KeyboardInterrupt(), None), (SystemExit(1), "1"),
        (FULL, "full.* 1,234 .*free"), (READ_ONLY, "read-only"), (TOO_LARGE, "larger.*ulimit"),
    ],
    ids=repr,
)  # fmt: skip
def test_nothing_is_left_when_the_work_raises(tmp_path: Path, error: BaseException, said: str | None) -> None:
    with pytest.raises(UserInputError if error in (FULL, READ_ONLY, TOO_LARGE) else type(error), match=said):
        fail_half_way(tmp_path / "out", error)
    assert names(tmp_path) == []


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("1")
    return tmp_path / "out"


def test_a_folder_appears_complete_and_the_old_one_stays_until_then(old: Path) -> None:
    with pytest.raises(ValueError, match="no"), atomic.new_folder(old, replace=True):
        raise ValueError("no")
    assert names(old) == ["old"]
    with atomic.new_folder(old, replace=True) as folder, atomic.new_folder(old / "deep" / "other") as another:
        (folder / "new").write_text("2")
        (another / "a").write_text("3")
        assert [name for name in names(old) if not name.startswith(".")] == ["deep", "old"]
        assert not (old / "deep" / "other").exists()
    assert names(old) == ["new"]
    assert names(old.parent) == ["out"]


def test_a_failed_second_rename_puts_the_old_folder_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def fail(source: Path, destination: Path) -> None:
        if ".tmp-" in str(source):
            raise FULL
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserInputError, match="is full"), atomic.new_folder(old, replace=True):
        pass
    assert names(old.parent) == ["out"]
    assert names(old) == ["old"]


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def build_beside_another() -> None:
        with atomic.new_folder(out) as folder:
            (folder / "mine").write_text("1")
            out.mkdir()
            (out / "theirs").write_text("2")

    with pytest.raises(OutputExistsError, match="appeared while"):
        build_beside_another()
    assert names(tmp_path) == ["out"]
    assert names(out) == ["theirs"]


@pytest.mark.parametrize("name", ["out", "a[1]*"])
def test_leftovers_go_when_nobody_has_their_lock(tmp_path: Path, name: str) -> None:
    gone = {f".{name}.tmp-{GONE}", f".{name}.tmp-1", f".{name}.old-2"}
    keep = {
        f".{name}.tmp-x",
        f".{name}er.tmp-{GONE}",
        f"{name}.tmp-{GONE}",
        f".a1x.tmp-{GONE}",
    }  # names are no patterns
    for each in gone | keep | {name}:
        (tmp_path / each).mkdir()
    (tmp_path / f".{name}.lock-{GONE}").touch()
    with atomic.new_folder(tmp_path / name, replace=True) as written:  # as a build in another container
        (written / "half").write_text("1")
        assert not gone & set(names(tmp_path))
        for each in gone:
            (tmp_path / each).mkdir()
        assert {path.name for path in atomic.remove_leftovers(tmp_path / name)} == gone
        assert (written / "half").exists()
    assert set(names(tmp_path)) == keep | {name}


def test_a_replacement_that_was_killed_between_its_renames_is_undone(tmp_path: Path) -> None:
    old = tmp_path / f".out.old-{GONE}"
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    assert atomic.remove_leftovers(tmp_path / "out") == []
    assert names(tmp_path) == ["out"]
    # and if the second rename had happened, the old folder is only in the way
    (tmp_path / f".out.old-{GONE}").mkdir()
    assert len(atomic.remove_leftovers(tmp_path / "out")) == 1
    assert names(tmp_path / "out") == ["manifest.json"]


@pytest.mark.parametrize("locks", [True, False])
def test_several_replace_a_folder_at_once(old: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        monkeypatch.setattr(held, "try_lock", lambda *_args, **_options: None)

    def put(number: int) -> None:
        for _ in range(60):
            with atomic.new_folder(old, replace=True, sync=False) as folder:
                (folder / f"by-{number}").touch()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(4)))
    assert names(old.parent) == ["out"]
    assert [name[:3] for name in names(old)] == ["by-"]


def test_a_cloned_file_shares_nothing_with_its_source(tmp_path: Path) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"0123" * 5000)
    atomic.clone_file(source, copy)
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_ino != source.stat().st_ino
    with copy.open("r+b") as file:
        file.write(b"x")
    assert source.read_bytes() == b"0123" * 5000


def test_a_link_stays_and_the_folder_it_leads_to_is_replaced(tmp_path: Path) -> None:
    link, place = tmp_path / "link", tmp_path / "disk" / "bundle"
    link.symlink_to(place)
    for text in ("first", "second"):
        with atomic.new_folder(link, replace=True) as folder:
            (folder / "file").write_text(text)
        assert link.is_symlink()
        assert (place / "file").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert [path.name for path in place.parent.iterdir()] == ["bundle"]


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("again")
    (tmp_path / "again").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "bundle"):
        with pytest.raises(OutputExistsError, match=r"(loop|again) is a link that leads to itself"):
            check_output(path, force=True)
        assert BuildRecipe(target="x", output=str(path)).bundle_name == path.name, "by the link that was given"

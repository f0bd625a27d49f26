import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specexport import atomic
from specexport.compile.bundle import check_output
from specexport.recipe import BuildRecipe
from specexport_runtime.errors import OutputExistsError, UserInputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    with atomic.new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep") == ["out"]
    assert (tmp_path / "deep" / "out" / "a").read_text() == "1"


def fail_half_way(path: Path, error: BaseException) -> None:
    with atomic.new_folder(path) as folder:
        (folder / "a").write_bytes(b"0" * 1234)
        raise error


@pytest.mark.parametrize("error", [PermissionError(1, "no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_nothing_is_left_when_the_work_raises(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        fail_half_way(tmp_path / "out", error)
    assert names(tmp_path) == []


def test_a_full_disk_is_a_users_error_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        fail_half_way(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert "is full" in caught.value.message
    assert "1,234 bytes" in caught.value.message
    assert "free" in caught.value.message
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserInputError, match="cannot be written"), atomic.new_folder(tmp_path / "file" / "out"):
        pytest.fail("must not be entered")


def test_replacing_keeps_the_old_folder_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("1")
    with pytest.raises(ValueError, match="no"), atomic.new_folder(out, replace=True):
        raise ValueError("no")
    assert names(out) == ["old"]
    with atomic.new_folder(out, replace=True) as folder:
        (folder / "new").write_text("2")
        assert names(out) == ["old"]
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_a_failed_second_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("1")
    rename = os.rename

    def fail(source: Path, destination: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserInputError, match="is full"), atomic.new_folder(out, replace=True):
        pass
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


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


def test_leftovers_go_when_their_process_is_gone(tmp_path: Path) -> None:
    gone, alive, mine = dead_pid(), os.getppid(), os.getpid()
    keep = {f".out.tmp-{alive}", ".out.tmp-x", f".outer.tmp-{gone}", f"out.tmp-{gone}"}
    for name in {f".out.tmp-{gone}", f".out.tmp-{mine}", *keep}:
        (tmp_path / name).mkdir()
    removed = atomic.remove_leftovers(tmp_path / "out")
    assert {path.name for path in removed} == {f".out.tmp-{gone}", f".out.tmp-{mine}"}
    assert set(names(tmp_path)) == keep


def test_a_replacement_that_was_killed_between_its_renames_is_undone(tmp_path: Path) -> None:
    old = tmp_path / f".out.old-{dead_pid()}"
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    assert atomic.remove_leftovers(tmp_path / "out") == []
    assert names(tmp_path) == ["out"]
    # and if the second rename had happened, the old folder is only in the way
    (tmp_path / f".out.old-{dead_pid()}").mkdir()
    assert len(atomic.remove_leftovers(tmp_path / "out")) == 1
    assert names(tmp_path / "out") == ["manifest.json"]


def test_names_with_wildcards_are_taken_literally(tmp_path: Path) -> None:
    gone = dead_pid()
    (tmp_path / f".a[1]*.tmp-{gone}").mkdir()
    (tmp_path / f".a1x.tmp-{gone}").mkdir()
    assert [path.name for path in atomic.remove_leftovers(tmp_path / "a[1]*")] == [f".a[1]*.tmp-{gone}"]


def test_a_disk_that_is_too_small_is_refused_beforehand(tmp_path: Path) -> None:
    atomic.require_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(UserInputError) as caught:
        atomic.require_space(tmp_path, 10**18)
    assert "1,000,000,000,000,000,000 bytes" in caught.value.message
    assert f"{atomic.free_space(tmp_path):,}"[:4] in caught.value.message


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

"""Kept texts on disk: the next engine goes on from them with the same bits, and nobody else's engine does."""

import errno
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specexport_runtime import SamplingParams, SpecEngine, engine_load
from specexport_runtime.decoding import prefix_files, prefix_store
from specexport_runtime.decoding.prefix_files import PrefixFolder, StoredText
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.open import find_engine_backend
from specexport_runtime.executors.ort_arena import ArenaRows
from specexport_runtime.packing.batch import RowCopy
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.fakes.rounds import opened

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 3
OTHER = "class Numbers:\n    def __init__(self, numbers):\n        self.numbers = numbers\n\n    def total(self):\n" * 3
SCOPE = ("", None)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def ask(engine: SpecEngine, prompt: Any, *, drafter: str = "none", count: int = 12, **options: Any) -> Any:
    if drafter not in ("none", "lookup"):
        options["num_speculative_tokens"] = 3
    params = SamplingParams(max_tokens=count, logprobs=2, ignore_eos=True)
    return engine.generate([prompt], params, drafter=drafter, **options)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def filled(demo_bundle: Path, folder: Path) -> Path:
    """A folder in which an engine left two texts; of the second its salt is ``other``."""
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        ask(engine, TEXT)
        ask(engine, OTHER, cache_salt="other")
    assert len(files(folder)) == 2
    return folder


@pytest.mark.parametrize(("drafter", "budget"), [("none", True), ("draft-model", False), ("self", False)])
def test_the_next_engine_goes_on_with_the_same_bits(
    demo_bundle: Path, folder: Path, drafter: str, budget: bool
) -> None:
    options = {"kv_cache_memory_bytes": "8MiB", "max_model_len": 400} if budget else {}
    with opened(demo_bundle, prefix_cache_dir=folder, **options) as engine:
        first = ask(engine, TEXT, drafter=drafter)
    history = [*engine.encode(TEXT), *first.token_ids, *engine.encode(OTHER)[1:20]]
    with opened(demo_bundle, enable_prefix_caching=False, **options) as engine:
        wanted = [ask(engine, prompt, drafter=drafter) for prompt in (TEXT, history)]
        plain = ask(engine, history)
    with opened(demo_bundle, prefix_cache_dir=folder, **options) as engine:
        same, longer = (ask(engine, prompt, drafter=drafter) for prompt in (TEXT, history))
    assert first.stats.cached_tokens == 0
    whole = len(engine.encode(TEXT)) if drafter != "self" else 1  # layers are chosen by the prompt: it is read
    assert same.stats.cached_tokens == whole - 1
    assert longer.stats.cached_tokens >= whole + 8 or drafter == "self"
    for found, known in zip((same, longer), wanted, strict=True):
        assert (found.token_ids, found.logprobs) == (known.token_ids, known.logprobs)
        assert found.stats.accepted_lengths == known.stats.accepted_lengths  # what drafts was restored, or read, too
    assert longer.token_ids == plain.token_ids


def test_a_draft_model_reads_nothing_again(demo_bundle: Path, folder: Path) -> None:
    read = []
    for _ in range(2):
        with opened(demo_bundle, prefix_cache_dir=folder) as engine:
            ask(engine, TEXT, drafter="draft-model")
            read.append(engine._loop.decoder.drafter.drafters["draft-model"].prefill_seconds > 0)
    assert read == [True, False]


def test_owners_see_nothing_of_each_other(demo_bundle: Path, filled: Path) -> None:
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        for prompt, options, found in (
            (TEXT, {"cache_salt": "other"}, False), (TEXT, {"cache_salt": "Other"}, False), (OTHER, {}, False),
            (OTHER, {"cache_salt": "other\0"}, False), (TEXT, {"remember": False}, False),
            (OTHER, {"cache_salt": "other"}, True), (TEXT, {}, True),
        ):  # fmt: skip
            assert bool(ask(engine, prompt, count=1, **options).stats.cached_tokens) == found, (prompt[:9], options)
    names = b"".join(path.name.encode() for path in filled.iterdir())
    assert b"other" not in names + b"".join(path.read_bytes() for path in filled.iterdir())


def test_what_is_not_to_be_remembered_is_not_written(demo_bundle: Path, folder: Path) -> None:
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        ask(engine, TEXT, remember=False)
        ask(engine, TEXT[:40])  # too short to be worth a file
    assert files(folder) == []


@pytest.mark.parametrize("other", [{"num_threads": 2}, {"prefix_rows": 1}])
def test_engines_of_other_bits_see_nothing(demo_bundle: Path, filled: Path, other: dict[str, Any]) -> None:
    """Another number of threads counts as such; more rows do not."""
    with opened(demo_bundle, prefix_cache_dir=filled, **other) as engine:
        assert bool(ask(engine, TEXT, count=1).stats.cached_tokens) == ("prefix_rows" in other)


def test_another_bundle_sees_nothing(demo_bundle: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine_load.load_bundle

    def other(*args: Any, **options: Any) -> Any:
        bundle = load(*args, **options)
        name, file = next(each for each in bundle.manifest.files.items() if each[0].startswith("target/"))
        bundle.manifest.files[name] = type(file)(sha256="0" * 64, size=file.size)
        return bundle

    monkeypatch.setattr(engine_load, "load_bundle", other)
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        assert ask(engine, TEXT, count=1).stats.cached_tokens == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickle(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, np.array([{}], object), np.arange(70))


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(9000))


def other_numbers(path: Path) -> None:
    """Whole for zip, and with a value that nobody computed."""
    with np.load(path) as data:
        arrays = [data[name] for name in data.files]
    arrays[5] = arrays[5] + 1
    with path.open("wb") as file:
        np.savez(file, *arrays)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("damage", [cut, flip, empty, pickle, garbage, other_numbers, open_to_others])
def test_a_damaged_file_is_removed_and_hurts_nobody(demo_bundle, filled, caplog, damage) -> None:
    damaged = files(filled)
    for path in damaged:
        damage(path)
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        found = ask(engine, TEXT, count=1)
        assert found.stats.cached_tokens == 0
        assert sum(path.exists() for path in damaged) == 1  # the other one's turn has not come
        assert "A kept prefix is damaged" in caplog.text
        assert found.token_ids == ask(engine, TEXT, count=1, remember=False).token_ids
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        assert ask(engine, TEXT, count=1).stats.cached_tokens > 0


def test_a_file_under_the_name_of_another_is_refused(demo_bundle: Path, folder: Path) -> None:
    """Two owners have the same text; what is of one is not given to the other by a rename."""
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        for salt in ("one", "other"):
            ask(engine, TEXT, cache_salt=salt)
    one, other = files(folder)
    one.replace(other)
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        cached = [ask(engine, TEXT, count=1, cache_salt=salt).stats.cached_tokens for salt in ("one", "other")]
    assert cached == [0, 0]


def test_a_folder_of_another_secret_is_of_no_use(demo_bundle: Path, filled: Path) -> None:
    (filled / "secret").unlink()
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        assert ask(engine, TEXT, count=1).stats.cached_tokens == 0


def stored(folder: PrefixFolder, start: int, count: int = 64, kilobytes: int = 100, scope: Any = SCOPE) -> Any:
    tokens = np.arange(start, start + count)
    folder.write(scope, StoredText(tokens, [RowCopy(count, 0, 0, [np.full(256 * kilobytes, start, np.float32)])]))
    return tokens


def test_the_bound_holds_and_what_was_used_least_recently_goes(folder: Path) -> None:
    limit = 450_000
    kept = PrefixFolder(folder, limit, "engine")
    texts = []
    for i in range(4):
        texts.append(stored(kept, 1000 * i))
        for age, path in enumerate(sorted(files(folder), key=lambda each: each.stat().st_mtime_ns, reverse=True)):
            os.utime(path, ns=(0, time.time_ns() - 10**9 * (age + 1)))
    assert len(kept.compare(kept.names(SCOPE, texts[0]), texts[0])) == 1  # used: now the newest
    texts.append(stored(kept, 9000))
    assert [bool(kept.names(SCOPE, tokens)) for tokens in texts] == [True, False, True, True, True]
    assert sum(path.stat().st_size for path in files(folder)) <= limit
    stored(kept, 5000, kilobytes=1000)  # larger than all together: not kept, and nothing goes for it
    assert len(files(folder)) == 4
    smaller = PrefixFolder(folder, 250_000, "other engine")  # a smaller bound counts at once, whosever the files are
    assert len(files(folder)) == 2
    assert kept.compare(kept.names(SCOPE, texts[1]), texts[1]) == []
    assert smaller.names(SCOPE, texts[0]) == []


def test_texts_come_back_as_they_were(folder: Path) -> None:
    kept, tokens = PrefixFolder(folder, 10**7, "engine"), np.arange(80)
    rng = np.random.default_rng(2)
    arrays = [
        rng.integers(-9, 9, (2, 80, 3), np.int8),
        rng.random((2, 0, 3), np.float32),
        rng.random((1, 7), np.float32),
    ]
    kept.write(("a", 2), StoredText(tokens, [RowCopy(80, 3, 5, arrays), RowCopy(0, 0, 0, [])]))
    again = PrefixFolder(folder, 10**7, "engine")
    (name,) = again.names(("a", 2), np.arange(200))
    assert again.compare([name], np.arange(200)) == [(80, name)]
    found = again.read(name)
    assert found is not None
    assert [row[:3] for row in found.rows] == [(80, 3, 5), (0, 0, 0)]
    for array, wanted in zip(found.rows[0].arrays, arrays, strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)
    assert again.compare([name, name[:-5] + "0.npz"], np.array([0, 1, 2, 3, 9])) == []  # its state is behind 5 tokens
    assert [again.names(scope, tokens) for scope in (("a", None), ("a", 1), ("", 2), ("b", 2))] == [[]] * 4


def test_half_written_files_go_when_they_are_old(folder: Path) -> None:
    PrefixFolder(folder, 10**6, "engine")
    half = f".{'0' * 32}-70-{'1' * 32}.npz."
    for name, age in ((f"{half}a.tmp", 7200), (f"{half}b.tmp", 60), (".secret.c.tmp", 7200), ("notes.tmp", 7200)):
        (folder / name).write_text("x")
        os.utime(folder / name, (time.time() - age,) * 2)
    PrefixFolder(folder, 10**6, "engine")
    assert sorted(path.name for path in folder.iterdir()) == [f"{half}b.tmp", "notes.tmp", "secret"]


def test_the_folder_is_this_users_alone(demo_bundle: Path, folder: Path) -> None:
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        ask(engine, TEXT, count=1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_engines_that_open_a_new_folder_at_once_have_one_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, exists = threading.Barrier(2), Path.exists

    def seen(path: Path) -> bool:
        found = exists(path)
        both.wait(HANG_S)
        return found

    monkeypatch.setattr(Path, "exists", seen)
    names: list[str] = []
    make = lambda: names.append(PrefixFolder(folder, 2**20, "engine")._beginning(SCOPE, np.arange(99)))  # noqa: E731
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    monkeypatch.undo()
    assert {*names, PrefixFolder(folder, 2**20, "engine")._beginning(SCOPE, np.arange(99))} == {names[1]}
    assert [path.name for path in folder.iterdir()] == ["secret"]


@pytest.mark.parametrize("trouble", ["open", "file", "secret", "short secret", "stranger"])
def test_a_folder_that_is_not_safe_is_refused(demo_bundle, folder, monkeypatch, trouble) -> None:
    folder.mkdir(mode=0o700)
    words = "belongs to somebody else, or others may write to it"
    given: Any = folder
    if trouble == "open":
        folder.chmod(0o777)
    elif trouble == "file":
        given, words = folder / "file", "cannot be used: File exists"
        given.write_text("")
    elif "secret" in trouble:
        (folder / "secret").write_bytes(bytes(32 if trouble == "secret" else 31))
        (folder / "secret").chmod(0o644 if trouble == "secret" else 0o600)
        words = "'secret' is damaged, or others may read it"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(Path, "stat", lambda _, **__: SimpleNamespace(st_uid=54321, st_mode=0o40700))
    load = SpecEngine.load if trouble != "stranger" else lambda *_, **__: PrefixFolder(folder, 10**6, "engine")
    with pytest.raises(InvalidRequestError, match=words):
        load(demo_bundle, prefix_cache_dir=given)


@pytest.mark.parametrize("option", ["enable_prefix_caching", "unpad_kv"])
def test_an_engine_that_keeps_no_prefixes_refuses(demo_bundle: Path, folder: Path, option: str) -> None:
    with pytest.raises(InvalidRequestError, match="and this engine keeps no prefixes in files"):
        SpecEngine.load(demo_bundle, prefix_cache_dir=folder, **{option: False})
    assert not folder.exists()


@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt", "tensorrt-rtx"])
def test_other_backends_refuse(backend: str) -> None:
    with pytest.raises(InvalidRequestError, match="prefix_cache_dir is x, and this engine") as caught:
        engine_load._check_backend(find_engine_backend(backend), EngineOptions(prefix_cache_dir="x"))
    assert "backend ort-cpu," in caught.value.hint


@pytest.mark.parametrize("trouble", ["full", "removed"])
def test_trouble_with_the_disk_is_said_once(demo_bundle, folder, monkeypatch, caplog, trouble) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        wanted = ask(engine, TEXT)
        wait_until(lambda: files(folder))
        if trouble == "full":
            monkeypatch.setattr(prefix_files, "replace_file", full)
        else:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        for salt in ("a", "b"):
            assert ask(engine, TEXT, cache_salt=salt).token_ids == wanted.token_ids
        found = ask(engine, TEXT)
        assert (found.token_ids, found.stats.cached_tokens > 0) == (wanted.token_ids, True)
    reason = "No space left on device" if trouble == "full" else "No such file or directory"
    assert [record.message for record in caplog.records if "Kept prefixes" in record.message] == [
        f"Kept prefixes cannot be written ({reason}): prompts are read again after a restart. Fix: see to "
        "prefix_cache_dir."
    ]
    assert not folder.exists() or len(list(folder.iterdir())) == 2


def test_engines_share_a_folder(demo_bundle: Path, folder: Path) -> None:
    """Two write at once, a third finds what either left; a small bound lets them remove each other's files."""
    wanted = {}
    for bound in ("4GiB", "1MiB"):
        with (
            opened(demo_bundle, 5, prefix_cache_dir=folder, prefix_cache_bytes=bound) as one,
            opened(demo_bundle, 5, prefix_cache_dir=folder, prefix_cache_bytes=bound) as two,
        ):
            handles = [
                engine.submit(text, SamplingParams(max_tokens=4), cache_salt=salt)
                for salt in ("a", "b") for text in (TEXT, OTHER) for engine in (one, two)
            ]  # fmt: skip
            found = [handle.result().token_ids for handle in handles]
            wanted[bound] = found
        assert all(path.suffix == ".npz" or path.name == "secret" for path in folder.iterdir())
        assert sum(path.stat().st_size for path in files(folder)) <= (1 << 20 if bound == "1MiB" else 1 << 30)
        with opened(demo_bundle, prefix_cache_dir=folder) as engine:
            cached = [ask(engine, text, count=1, cache_salt="a").stats.cached_tokens for text in (TEXT, OTHER)]
            assert all(cached) or bound == "1MiB"
    assert wanted["4GiB"] == wanted["1MiB"]


def test_a_text_is_written_once_and_not_at_every_turn(demo_bundle: Path, folder: Path) -> None:
    """Turns that add little are written at the end, in the place of the beginning that was there."""
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        history = engine.encode(TEXT)
        history += ask(engine, history, count=4).token_ids
        wait_until(lambda: files(folder))
        before = files(folder)
        store: Any = engine._loop.decoder.slots.stored
        for _ in range(3):
            history += ask(engine, history, count=7).token_ids
            wait_until(lambda: not store._writer.is_alive())
        assert files(folder) == before
    (after,) = files(folder)
    assert [after] != before
    status = after.stat()
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        assert ask(engine, history, count=1).stats.cached_tokens == len(history) - 1
    assert files(folder) == [after]
    assert after.stat().st_ino == status.st_ino


def test_closing_takes_no_longer_than_it_may(demo_bundle, folder, monkeypatch) -> None:
    monkeypatch.setattr(prefix_store.PrefixStore, "note_kept", lambda *_: None)
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        ask(engine, TEXT, count=1)
        engine.flush_s = 0
    assert files(folder) == []


def test_who_is_in_a_hurry_ends_a_closing_that_has_begun(demo_bundle, folder, monkeypatch) -> None:
    monkeypatch.setattr(prefix_store.PrefixStore, "note_kept", lambda *_: None)
    write, engines = PrefixFolder.write, []

    def hurried(*args: Any) -> int:
        engines[0].flush_s = 0
        return write(*args)

    monkeypatch.setattr(PrefixFolder, "write", hurried)
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        engines.append(engine)
        ask(engine, TEXT, count=1)
        ask(engine, OTHER, count=1)
    assert len(files(folder)) == 1


def test_a_writer_that_comes_late_writes_nothing_of_a_closed_engine(demo_bundle, folder, monkeypatch) -> None:
    asked, closed = threading.Event(), threading.Event()
    compare = PrefixFolder.compare

    def slow(*args: Any) -> Any:
        asked.set()
        assert closed.wait(HANG_S)
        return compare(*args)

    monkeypatch.setattr(PrefixFolder, "compare", slow)
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        wanted = ask(engine, TEXT).token_ids
        assert asked.wait(HANG_S)
        store, engine.flush_s = engine._loop.decoder.slots.stored, 0
    closed.set()
    wait_until(lambda: not store._writer.is_alive())
    assert files(folder) == []
    with opened(demo_bundle, prefix_cache_dir=folder) as engine:
        assert ask(engine, TEXT).token_ids == wanted


def test_others_are_decoded_while_a_file_is_read(demo_bundle, filled, monkeypatch) -> None:
    """And who goes away while it is waited for leaves nothing after."""
    may_read, asked = threading.Event(), threading.Event()
    read = PrefixFolder.read

    def slow(self: PrefixFolder, name: str) -> Any:
        asked.set()
        assert may_read.wait(30)
        return read(self, name)

    monkeypatch.setattr(PrefixFolder, "read", slow)
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        gone = engine.submit(OTHER, SamplingParams(max_tokens=4), cache_salt="other", owner="c")
        assert asked.wait(30)
        gone.cancel()
        assert gone.result().finish_reason == "cancelled"
        waiting = engine.submit(TEXT, SamplingParams(max_tokens=4), owner="a")
        other = engine.submit("x = 1\n", SamplingParams(max_tokens=40, ignore_eos=True), owner="b").result()
        assert other.stats.num_generated_tokens == 40
        assert not waiting.done
        may_read.set()
        assert waiting.result().stats.cached_tokens == len(engine.encode(TEXT)) - 1
        assert engine._loop.decoder.slots.stored._text is None  # type: ignore[union-attr]


def test_a_disk_that_hangs_holds_nobody(demo_bundle, filled, monkeypatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(prefix_store, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(PrefixFolder, "read", lambda *_: may_end.wait(30) and None)
    with opened(demo_bundle, prefix_cache_dir=filled) as engine:
        for prompt, salt in ((TEXT, None), (OTHER, "other")):
            assert ask(engine, prompt, count=1, cache_salt=salt).stats.cached_tokens == 0
        may_end.set()


def test_a_row_that_is_moved_while_it_is_copied_is_copied_again(demo_bundle, folder, monkeypatch) -> None:
    """Another text is in the row when its copy is made: what the file has is right all the same."""
    views, begun, moved = ArenaRows.row_views, threading.Event(), threading.Event()

    def meanwhile(*args: Any) -> Any:
        found = views(*args)
        if threading.current_thread().name == "specexport-prefixes" and not begun.is_set():
            begun.set()
            assert moved.wait(30)
        return found

    monkeypatch.setattr(ArenaRows, "row_views", meanwhile)
    with opened(demo_bundle, 1, prefix_rows=1, prefix_cache_dir=folder) as engine:
        wanted = ask(engine, TEXT)
        assert begun.wait(30)
        ask(engine, OTHER)
        assert len(engine._loop.decoder.slots.kept) == 2
        moved.set()
        wait_until(lambda: len(files(folder)) == 2)
    with opened(demo_bundle, 1, prefix_cache_dir=folder) as engine:
        found = ask(engine, TEXT)
    assert found.stats.cached_tokens > 0
    assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)

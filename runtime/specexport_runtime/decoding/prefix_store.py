"""Kept texts between rows and files: written and read in threads of their own, beside the one that decodes.

A text is copied out of its row while others are decoded. If it was moved or forgotten meanwhile, the copy is nothing.
A request of which a file has more than the rows waits for that file; one is read at a time.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

import numpy as np

from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.prefix_files import MIN_STORED, PrefixFolder, StoredText, num_tokens
from specexport_runtime.decoding.prefixes import MIN_REUSED, KeptText, KeptTexts
from specexport_runtime.executors.base import Int64Array
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.request import Request
from specexport_runtime.user_cache import warn_once

WRITE_RATE = 100_000_000
"""Bytes a second that are written while others are decoded."""
WORTH_WRITING = 1 / 4
"""Part of a text that no file has, for which it is written before the engine closes: most turns of a talk are not."""
MAX_WAIT_S = 10.0
"""For a file; a disk that takes longer is of no use, and requests go on without it."""
_IDLE_WAIT_S = 0.01
_CLOSING_WAIT_S = 0.1


class PrefixStore:
    """Writes what ``kept`` has into a folder, and reads it back."""

    def __init__(self, folder: PrefixFolder, memory: MemoryBudget, kept: KeptTexts) -> None:
        self._folder, self._memory, self._kept = folder, memory, kept
        self._writer = self._reader = threading.Thread()  # one that never began
        self._asker: Request | None = None  # for whom something is read, or was
        self._text: StoredText | None = None
        self._began = 0.0
        self._closing = threading.Event()
        self._copying, self._has_rows = threading.Lock(), True  # the lock is held while rows are read

    def note_kept(self, count: int) -> None:
        """A text of so many tokens is kept, and may be written (decoding thread)."""
        if count >= MIN_STORED and not self._closing.is_set() and not self._writer.is_alive():
            self._writer = _start(self._write_due)

    def is_reading(self, req: Request, reused: Callable[[], int], *, is_idle: bool) -> bool:
        """Whether a request waits for a file that may have more than rows do, ``reused`` tokens (decoding thread)."""
        if self._asker is not req:
            names = self._folder.names(req.row_scope, np.asarray(req.tokens[:MIN_STORED], np.int64))
            least = MIN_STORED + reused() if names else 0
            names = [name for name in names if num_tokens(name) >= least < len(req.tokens)]
            if not names:
                return False
            if not self._reader.is_alive():
                self._asker, self._text, self._began = req, None, monotonic()
                self._reader = _start(partial(self._read, req, names, np.asarray(req.tokens, np.int64), least))
        if is_idle and self._reader.is_alive():
            self._reader.join(_IDLE_WAIT_S)
        is_over = not self._reader.is_alive() or monotonic() - self._began > MAX_WAIT_S
        return not is_over or (self._asker is not req and not self._reader.is_alive())

    def text_of(self, req: Request) -> StoredText | None:
        """What was read for a request (decoding thread)."""
        return None if self._asker is not req or self._reader.is_alive() else self._text

    def entries(self, req: Request, text: StoredText) -> dict[ModelRunner, int]:
        """Entries of a text that each model may have in the request's row."""
        each = zip(self._memory.runners, text.rows, self._memory.need(req).entries, strict=True)
        return {runner: min(row.entries, most) for runner, row, most in each}

    def put(self, req: Request) -> None:
        """Put what was read for a request into its row (decoding thread)."""
        if (text := self.text_of(req)) is not None:
            for (runner, count), row in zip(self.entries(req, text).items(), text.rows, strict=True):
                runner.put_copy(req.row, row, count)

    def forget(self, req: Request) -> None:
        """A request has begun, or never will (decoding thread)."""
        if self._asker is req:
            self._asker = self._text = None

    def flush(self, seconds: Callable[[], float]) -> None:
        """Write whatever is not written yet, the newest first, while there is time; nothing is decoded any more.

        ``seconds`` are asked for again before each text: they may become fewer. Rows are not read any more after this.
        """
        began = monotonic()
        self._closing.set()
        while self._writer.is_alive() and (left := began + seconds() - monotonic()) > 0:
            self._writer.join(min(left, _CLOSING_WAIT_S))
        for kept in sorted(self._kept.values(), key=lambda each: each.used, reverse=True):
            if kept.unwritten != 0 and monotonic() < began + seconds():
                self._write(kept, MIN_REUSED)
        with self._copying:
            self._has_rows = False

    def _read(self, req: Request, names: list[str], tokens: Int64Array, least: int) -> None:
        try:
            for count, name in self._folder.compare(names, tokens)[:1]:
                text = self._folder.read(name) if count >= least else None
                if self._asker is req:
                    self._text = text
        except Exception as error:  # whatever it is, the prompt can be read
            _warn("read", error)

    def _write_due(self) -> None:
        """Write what nobody has looked at. What comes while this ends is written with the next, or at the end."""
        while due := [each for each in tuple(self._kept.values()) if each.unwritten is None]:
            for kept in due:
                if self._closing.is_set():
                    return
                self._write(kept, max(MIN_REUSED, int(len(kept.tokens) * WORTH_WRITING)))

    def _write(self, kept: KeptText, least: int) -> None:
        """Write a text, if it has ``least`` tokens or more that no file has."""
        kept.unwritten = len(kept.tokens)
        if len(kept.tokens) < MIN_STORED:
            return
        try:
            files = self._folder.compare(self._folder.names(kept.scope, kept.tokens), kept.tokens)
            kept.unwritten -= files[0][0] if files else 0
            if kept.unwritten < least:
                return
            if (text := self._copy(kept)) is None:
                kept.unwritten = None  # it was moved, or forgotten
                return
            size = self._folder.write(kept.scope, text)
            kept.unwritten = 0
            for count, name in files:
                if size and text.rows[0].min_reusable_len <= count == num_tokens(name):  # a beginning of this one
                    self._folder.remove(name)
            self._closing.wait(size / WRITE_RATE)
        except Exception as error:
            _warn("written", error)

    def _copy(self, kept: KeptText) -> StoredText | None:
        """A text with what its row has; None if it is not there, or was moved meanwhile."""
        placed, row = kept.placed, next((row for row, each in tuple(self._kept.items()) if each is kept), None)
        if row is None:
            return None
        with self._copying:
            if not self._has_rows:  # the engine is closed, and the writer has waited for the disk
                return None
            models = zip(self._memory.runners, self._memory.entries_of(row), strict=True)
            text = StoredText(kept.tokens, [runner.take_copy(row, count) for runner, count in models])
        return text if kept.placed == placed and self._kept.get(row) is kept else None


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="specexport-prefixes", daemon=True)
    with suppress(RuntimeError):  # there can be no more threads
        thread.start()
    return thread


def _warn(what: str, error: Exception) -> None:
    warn_once(
        "prefix cache",
        "Kept prefixes cannot be %s (%s): prompts are read again after a restart. Fix: see to prefix_cache_dir.",
        what,
        getattr(error, "strerror", None) or error,
    )

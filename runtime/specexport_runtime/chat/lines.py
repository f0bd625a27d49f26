"""Where the lines of a conversation come from, a terminal or a pipe, and which of them are one message."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.user_cache import cache_folder, is_private

PROMPT, MORE = "> ", ". "
COMMAND = "/"
_BLOCK = '"""'
_HISTORY_LINES = 1000

ReadLine = Callable[[str], str]
"""Gives the next line, without its end, for what to show before it. ``EOFError`` at the end."""


class Entry(NamedTuple):
    """What was entered: a message for the model, or a command."""

    text: str  # the message, or the command without its slash
    is_command: bool = False


def read_entry(read_line: ReadLine) -> Entry:
    r"""The next entry; ``\`` at an end or three quotes continue one, ``//`` begins a message; EOFError at the end."""
    line = read_line(PROMPT)
    if line.lstrip().startswith(_BLOCK):
        return Entry(_read_block(line.lstrip().removeprefix(_BLOCK), read_line))
    while line.endswith("\\"):
        try:
            line = f"{line[:-1]}\n{read_line(MORE)}"
        except EOFError:
            line = line[:-1]
    text = line.strip()
    if text.startswith(COMMAND) and not text.startswith(2 * COMMAND):
        return Entry(text.removeprefix(COMMAND), is_command=True)
    return Entry(text.removeprefix(COMMAND) if text.startswith(2 * COMMAND) else text)


def _read_block(text: str, read_line: ReadLine) -> str:
    while not text.rstrip().endswith(_BLOCK):
        try:
            text = f"{text}\n{read_line(MORE)}"
        except EOFError:
            return text.strip("\n")
    return text.rstrip().removesuffix(_BLOCK).strip("\n")


def piped_lines() -> ReadLine:
    """Lines of standard input that is no terminal; nothing is shown before them."""
    number = 0

    def read_line(_: str) -> str:
        nonlocal number
        number += 1
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidRequestError(f"line {number} of standard input is not UTF-8.", "send UTF-8.") from None

    return read_line


@contextlib.contextmanager
def terminal_lines(*, keep_history: bool) -> Iterator[ReadLine]:
    """Lines of a terminal, edited by ``readline`` where Python has it; ``keep_history`` begins with earlier ones."""
    with _use_history_file(_import_readline() if sys.stdout.isatty() else None, keep_history):
        yield _read_terminal


def _read_terminal(prompt: str) -> str:
    try:
        if sys.stdout.isatty():
            return input(prompt)
        click.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise InvalidRequestError("this line is not UTF-8.", "set the terminal to UTF-8.") from None
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _import_readline() -> Any | None:
    try:
        import readline
    except ImportError:  # Windows, and some builds of Python
        return None
    return readline


@contextlib.contextmanager
def _use_history_file(readline: Any | None, keep: bool) -> Iterator[None]:
    folder = cache_folder("chat") if keep and readline is not None else None
    if readline is None or folder is None:
        yield
        return
    file = folder / "history"
    with contextlib.suppress(OSError):
        if is_private(file.stat()):
            readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with contextlib.suppress(OSError):  # a full disk: the conversation matters more
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
            file.chmod(0o600)
            readline.write_history_file(file)
            file.chmod(0o600)

"""Reading prompts for a command: an argument, a text file, JSON lines, or standard input."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.cli.any_text import decode_argument
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_text

_FORM = 'write one object a line: {"prompt": "…"}.'


class PromptItem(NamedTuple):
    """One prompt of a command."""

    text: str
    reference: str | None = None  # text that lookup drafting may copy from


def read_prompts(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> Iterator[PromptItem]:
    """Prompts of one command: the argument (``-`` or None: standard input), a UTF-8 text file, or JSON lines."""
    given = [
        name for name, value in (("PROMPT", prompt), ("--prompt-file", prompt_file), ("--prompts", prompts)) if value
    ]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} were both given.", "give one source of prompts.")
    if prompts is not None:
        yield from _read_jsonl(prompts)
    elif prompt_file is not None:
        yield PromptItem(read_text(prompt_file))
    elif prompt is not None and prompt != "-":
        yield PromptItem(decode_argument(prompt))
    else:
        if prompt is None and sys.stdin.isatty():
            raise InvalidRequestError(
                "no prompt was given.", "give it as an argument, with --prompt-file, or on stdin."
            )
        yield PromptItem(_decode(sys.stdin.buffer.read(), "standard input"))


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file; ``InvalidRequestError`` if it cannot be read, or is not UTF-8."""
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.", "give a readable UTF-8 file.") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a UTF-8 file of JSON objects; blank lines are left out."""
    empty = True
    # Not splitlines: it also breaks at characters that JSON allows inside a string.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            empty = False
            yield number, _parse(line, f"{path}, line {number}")
    if empty:
        raise InvalidRequestError(f"{path} has no prompts.", _FORM)


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except RecursionError:
        raise InvalidRequestError(f"{where}: this is nested too deeply.", _FORM) from None
    except ValueError:
        raise InvalidRequestError(f"{where}: this is not JSON.", _FORM) from None
    if not isinstance(record, dict):
        raise InvalidRequestError(f"{where}: this is no JSON object.", _FORM)
    for name, value in record.items():
        if isinstance(value, str):
            check_text(value, f"{where}: `{name}`")
    return record


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{where} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}.", "save it as UTF-8."
        ) from None


def _read_jsonl(path: Path) -> Iterator[PromptItem]:
    for number, record in json_lines(path):
        where = f"{path}, line {number}"
        text, reference = record.get("prompt"), record.get("reference")
        if "prompt" not in record:
            raise InvalidRequestError(f"{where}: there is no field `prompt`.", _FORM)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}: `prompt` is not a text.", "write it as a JSON string.")
        if not isinstance(reference, str | None):
            raise InvalidRequestError(f"{where}: `reference` is not a text.", "write it as a JSON string.")
        yield PromptItem(text, reference)

"""A conversation as a file: ``{"messages": […]}`` in OpenAI's form, so that it is also a request's body."""

import json
from pathlib import Path
from typing import Any

from specexport_runtime.cli.prompts import read_text
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.conversation import FINISH_REASON, Message
from specexport_runtime.user_cache import replace_file

_FORM = 'give a file that /save wrote, or one with {"messages": [{"role": "user", "content": "…"}, …]}.'
_CUT = ("length", "cancelled")


def save_messages(path: Path, messages: list[Message]) -> None:
    """Write a conversation to a file that only this user can read. Another conversation may be replaced.

    ``InvalidRequestError`` if the file cannot be written, or holds something else.
    """
    if path.exists():
        try:
            load_messages(path)
        except InvalidRequestError:
            raise InvalidRequestError(f"{path} is there, and no conversation.", "choose another name.") from None
    text = json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n"
    try:
        replace_file(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}.", "choose another place.") from error


def load_messages(path: Path) -> list[Message]:
    """Read a conversation: roles, texts, and which answers were cut off. Other fields are left out; calls are refused.

    ``InvalidRequestError`` if the file cannot be read, or is no conversation.
    """
    try:
        data = json.loads(read_text(path))
    except RecursionError:
        raise InvalidRequestError(f"{path} is nested too deeply.", _FORM) from None
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{path} is not JSON.", _FORM) from None
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{path} has no messages.", _FORM)
    return [_message(item, f"{path}, message {i}") for i, item in enumerate(messages, start=1)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("role", "content")):
        raise InvalidRequestError(f"{where} has no role and content that are texts.", _FORM)
    if item.get("tool_calls"):
        raise InvalidRequestError(f"{where} has calls of functions, which a chat here does not tell.", "leave it out.")
    cut = item.get(FINISH_REASON)
    message = {"role": item["role"], "content": item["content"]}
    return {**message, FINISH_REASON: cut} if cut in _CUT else message

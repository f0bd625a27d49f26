"""JSON of what may be long, piece by piece: one call of ``json.dumps`` keeps all other threads waiting to its end."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PIECE = 64


@dataclass(frozen=True)
class LongList:
    """A long list that is made while it is written."""

    count: int
    make: Callable[[int, int], list[Any]]  # the items from one place up to another


@dataclass(frozen=True)
class JsonText:
    """A value that is JSON already."""

    text: str


def json_text(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    """As ``json.dumps``, of a value whose dicts, and lists of dicts, are short; a ``LongList`` is a list."""
    if isinstance(value, JsonText):
        return value.text
    comma, colon = separators
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}{colon}{json_text(item, separators)}" for key, item in value.items()]
        return "{" + comma.join(items) + "}"
    if isinstance(value, list) and len(value) > _PIECE and not isinstance(value[0], dict):
        value = LongList(len(value), lambda begin, end, items=value: items[begin:end])  # type: ignore[misc]
    if isinstance(value, LongList):
        starts = range(0, value.count, _PIECE)
        texts = [json.dumps(value.make(at, at + _PIECE), separators=separators)[1:-1] for at in starts]
        return "[" + comma.join(texts) + "]"
    if isinstance(value, list):
        return "[" + comma.join([json_text(item, separators) for item in value]) + "]"
    return json.dumps(value)

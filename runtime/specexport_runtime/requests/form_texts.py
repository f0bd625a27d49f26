"""What a form says to the letter: texts that it asks for, and tokens that it names."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from specexport_runtime.sampling.structured import StructuredOutputs

_FEW = 64  # of a longer range, some end no text
_PART = re.compile(
    r"%json\s*(?P<schema>\{)"
    r'|(?P<text>"(?:[^"\\]|\\.)*")'
    r"|/(?:[^/\\\n]|\\.)+/"
    r"|(?://|#)[^\n]*"
    r"|<(?P<token>[^<>\s]+)>"
)


def literals(form: StructuredOutputs) -> Iterator[str]:
    """Texts that an answer may have to have: choices, those of a grammar, and keys and values of a schema as JSON."""
    if form.choice is not None:
        yield from form.choice
    elif form.kind == "json":
        yield from _as_json(json.loads(form.text))
    elif form.kind == "grammar":
        for kind, text in _parts(form.text):
            try:
                if kind == "text":
                    yield json.loads(text)
                elif kind == "schema":
                    yield from _as_json(json.loads(text))
            except ValueError:
                continue  # it has an escape that JSON has not


def _as_json(schema: Any) -> Iterator[str]:
    return (json.dumps(value, ensure_ascii=False) for value in _values(schema))


def _values(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key == "properties" and isinstance(value, dict):
                    yield from value
                    waiting += value.values()
                elif key == "const":
                    yield value
                elif key == "enum" and isinstance(value, list):
                    yield from value
                elif key not in ("default", "examples"):
                    waiting.append(value)


def named_tokens(lark: str, token_of: Callable[[str], int | None]) -> Iterator[set[int]]:
    """Token ids of each ``<name>`` and ``<[1,3-5]>`` of a Lark grammar; tokens that it only leaves out are none."""
    for kind, name in _parts(lark):
        if kind != "token":
            continue
        ids: set[int] = set()
        if (token := token_of(f"<{name}>")) is not None:
            ids.add(token)
        elif ranges := re.fullmatch(r"\[([\d,-]+)\]", name):
            for part in ranges[1].split(","):
                first, _, last = part.partition("-")
                if first.isdecimal() and (not last or last.isdecimal()) and len(part) < 20:
                    ids |= set(range(int(first), min(int(last or first), int(first) + _FEW) + 1))
        yield ids


def _parts(lark: str) -> Iterator[tuple[str, str]]:
    """The texts, schemas and tokens of a grammar; expressions and comments are left out."""
    at = 0
    while (found := _PART.search(lark, at)) is not None:
        at, kind = found.end(), found.lastgroup
        if kind == "schema":
            try:
                _, at = json.JSONDecoder().raw_decode(lark, found.start(kind))
            except (ValueError, RecursionError):
                continue
            yield kind, lark[found.start(kind) : at]
        elif kind is not None:
            yield kind, found[kind]

"""What a form says to the letter: texts that it asks for, and tokens that it names."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from specexport_runtime.sampling.structured import StructuredOutputs

_FEW = 64  # of a longer range, some end no text
_NAMED = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # texts, expressions and comments name none
    r"|/(?:[^/\\\n]|\\.)+/"
    r"|(?://|#)[^\n]*"
    r"|<([^<>\s]+)>"
)


def literals(form: StructuredOutputs) -> Iterator[str]:
    """Texts of which an answer may have to have one: choices, and keys and values of a JSON schema as JSON."""
    if form.choice is not None:
        yield from form.choice
    elif form.kind == "json":
        yield from (json.dumps(value, ensure_ascii=False) for value in _values(json.loads(form.text)))


def _values(schema: Any) -> Iterator[Any]:
    if isinstance(schema, list):
        for each in schema:
            yield from _values(each)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield from schema["properties"]
        yield from (schema["const"],) if "const" in schema else ()
        yield from schema["enum"] if isinstance(schema.get("enum"), list) else ()
        for key, value in schema.items():
            if key not in ("const", "enum", "default", "examples"):
                yield from _values(value)


def named_tokens(lark: str, token_of: Callable[[str], int | None]) -> Iterator[set[int]]:
    """Token ids of each ``<name>`` and ``<[1,3-5]>`` of a grammar; those that it only leaves out are none.

    Args:
        lark: the grammar.
        token_of: the id of a token's text.
    """
    for found in _NAMED.finditer(lark):
        name = found[1]
        if name is None:
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

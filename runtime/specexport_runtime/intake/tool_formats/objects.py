"""Calls that are JSON objects, or a list of them, read while they come: the name first, then arguments in pieces."""

import json
import re
from typing import Any, NoReturn

from specexport_runtime.intake.tool_formats.base import Arguments, Broken, CallBegin, CallEnd, Feed, Reading, Style

_SPECIAL = re.compile(r'["\\{}\[\]]')
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"|[^\s"])')
_KEYS = ("name", "arguments", "parameters", "type", "id")


def read_object(feed: Feed, names: frozenset[str]) -> Reading:
    """A call like ``{"name": …, "arguments": {…}}``, from its first brace to its last; False if it is none."""
    start, whole = feed.at, _EndFinder(feed.at)
    while not feed.ended or whole.find(feed.text) is not None:
        head = _HEAD.match(feed.text, start)
        if head is not None and head[1] in names:
            yield CallBegin(head[1])
            return (yield from _stream_arguments(feed, whole, _EndFinder(head.end()), head[1]))
        first = _FIRST_KEY.match(feed.text, start)
        if feed.next != "{" or (first is not None and first[1] not in _KEYS):
            return False
        end = whole.find(feed.text)
        if end is not None:
            return (yield from _read_complete_call(feed, end, names))
        yield None
    return False


def read_arguments(feed: Feed, name: str) -> Reading:
    """The arguments of a call whose name was read; ``feed`` stands before their first brace."""
    yield CallBegin(name)
    return (yield from _stream_arguments(feed, _EndFinder(feed.at), _EndFinder(feed.at), name))


def _read_complete_call(feed: Feed, end: int, names: frozenset[str]) -> Reading:
    """A call of which all is there: keys in any order, arguments as an object or as its text."""
    value = _loads(feed.text[feed.at : end])
    if not isinstance(value, dict) or value.get("name") not in tuple(names):
        return False
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        return False
    feed.at = end
    yield CallBegin(value["name"])
    yield Arguments(json.dumps(arguments, ensure_ascii=False))
    yield CallEnd()
    return True


def _stream_arguments(feed: Feed, whole: "_EndFinder", inner: "_EndFinder", name: str) -> Reading:
    """The arguments that ``inner`` ends, in pieces; then the end of the object around them."""
    begin, sent = whole.begin, inner.begin
    while True:
        inner_end, end = inner.find(feed.text), whole.find(feed.text)
        known = len(feed.text) if inner_end is None else inner_end
        if known > sent:
            yield Arguments(feed.text[sent:known])
            sent = known
        if end is not None or feed.ended:
            break
        yield None
    feed.at = len(feed.text) if end is None else end
    if end is None and feed.is_cut:
        return True
    value = None if end is None else _loads(feed.text[begin:end])
    if isinstance(value, dict) and (begin == inner.begin or value.get("name") == name):
        yield CallEnd()
    else:
        yield Broken(feed.text[feed.mark : feed.at])
    return True


class _EndFinder:
    """Finds where the JSON object or list ends that begins at ``begin``; looks at each character once."""

    def __init__(self, begin: int) -> None:
        self.begin = self._at = begin
        self._depth, self._in_string = 0, False
        self._end: int | None = None

    def find(self, text: str) -> int | None:
        """The place after its last character; None if that has not come yet."""
        while self._end is None:
            match = _SPECIAL.search(text, self._at)
            if match is None:
                self._at = len(text)
                return None
            sign, self._at = match[0], match.end()
            if sign == "\\" and self._in_string:
                if self._at == len(text):
                    self._at -= 1  # what it escapes has not come yet
                    return None
                self._at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string and sign != "\\":
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self._end = self._at
        return self._end


def _loads(text: str) -> Any:
    """JSON as the standard has it; None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def read_objects(feed: Feed, names: frozenset[str], separator: str) -> Reading:
    """Calls with a separator between them, at least one; what is after the last good one is left."""
    while True:
        yield from feed.skip_space()
        if not (yield from read_object(feed, names)):
            return False
        feed.mark = feed.at
        yield from feed.skip_space()
        if not (yield from feed.consume(separator)):
            return True


def read_list(feed: Feed, names: frozenset[str]) -> Reading:
    """A list of calls, or one; ``feed`` stands before it. What is after the last good one is left."""
    if feed.next == "{":
        return (yield from read_object(feed, names))
    if not (yield from feed.consume("[")):
        return False
    if not (yield from read_objects(feed, names, ",")):
        return False
    yield from feed.consume("]")
    return True


def list_rule(style: Style, *, several: bool) -> str:
    """The rule ``list`` of a grammar: objects, at least one."""
    more = f" ({json.dumps(style.item)} object)*" if several else ""
    return f'list: "[" object{more} "]"\n'

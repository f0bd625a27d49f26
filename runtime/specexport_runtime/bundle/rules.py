"""Rules for values that come from JSON: of which type and in which range. Imports the standard library only.

A rule is called with a value and the name of its place, and raises :class:`MisfitError` for what does not fit. Rules of
lists, tables and records are made of rules.
"""

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from reprlib import Repr
from typing import Any

Rule = Callable[[Any, str], None]

LONGEST_TEXT = 1 << 20
LONGEST_NAME = 255  # bytes: what file systems take
_short = Repr()
_short.maxstring = _short.maxother = 60


class MisfitError(ValueError):
    """A value does not fit its rule; says which, and what it is instead."""

    def __init__(self, where: str, value: object, wanted: str) -> None:
        super().__init__(f"{where} is {_short.repr(value)}, not {wanted}")


def anything(value: Any, where: str) -> None:
    """Whatever JSON can say."""


def whole(low: int, high: int) -> Rule:
    """A whole number in a range, both ends included."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise MisfitError(where, value, f"a whole number from {low} to {high}")

    return check


def number(low: float, high: float) -> Rule:
    """A number in a range, both ends included."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise MisfitError(where, value, f"a number from {low} to {high}")

    return check


def text(value: Any, where: str) -> None:
    """A string that can be encoded."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not _is_unicode(value):
        raise MisfitError(where, value, "a text")


def inner_path(value: Any, where: str) -> None:
    """A file's path, relative to a folder and inside it, whatever the system."""
    text(value, where)
    parts = PurePosixPath(value).parts
    absolute = value.startswith("/") or PureWindowsPath(value).drive or "\\" in value
    if absolute or ".." in parts:
        raise MisfitError(where, value, "the path of a file: it lies outside the bundle")
    if not parts or "\0" in value or any(len(part.encode()) > LONGEST_NAME for part in parts):
        raise MisfitError(where, value, "the path of a file")


def one_of(*words: str) -> Rule:
    """One of some words."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in words:
            raise MisfitError(where, value, f"one of {', '.join(words)}")

    return check


def optional(rule: Rule) -> Rule:
    """None, or what another rule wants."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            rule(value, where)

    return check


def list_of(rule: Rule) -> Rule:
    """A list in which every item fits one rule."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise MisfitError(where, value, "a list")
        for i, item in enumerate(value):
            rule(item, f"{where}[{i}]")

    return check


def tuple_of(*rules: Rule, optional: int = 0) -> Rule:
    """A list of fixed length, each item with its own rule; the last ``optional`` ones may be lacking."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or not len(rules) - optional <= len(value) <= len(rules):
            raise MisfitError(where, value, f"a list of {len(rules)}")
        for i, (item, rule) in enumerate(zip(value, rules, strict=False)):
            rule(item, f"{where}[{i}]")

    return check


def table_of(rule: Rule, keys: Rule = text) -> Rule:
    """An object with any keys that fit a rule, and values that fit another."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise MisfitError(where, value, "an object")
        for key, item in value.items():
            keys(key, f"a name in {where}" if where else "a name")
            rule(item, f"{where}.{key}" if where else key)

    return check


def record(rules: Mapping[str, Rule], *, may_lack: frozenset[str] = frozenset(), more: bool = False) -> Rule:
    """An object with known fields, of which ``may_lack`` may be lacking; ``more`` allows other fields."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise MisfitError(where or "the whole", value, "an object")
        lacking = sorted(rules.keys() - value.keys() - may_lack)
        unknown = [] if more else sorted(value.keys() - rules.keys())
        if lacking or unknown:
            which = f"it lacks {lacking[0]!r}" if lacking else f"{_short.repr(unknown[0])} is not known"
            raise MisfitError(where or "the whole", value, f"an object of the fields that belong there: {which}")
        for name, rule in rules.items():
            if name in value:
                rule(value[name], f"{where}.{name}" if where else name)

    return check


def _is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

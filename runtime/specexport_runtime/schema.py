"""Records (frozen dataclasses and named tuples) to JSON and back: the types of their fields say what may stand there.

``Annotated[int, whole(1, 64)]`` narrows a type. A bare ``int`` is a count. Imports the standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from itertools import repeat
from pathlib import PurePosixPath, PureWindowsPath
from reprlib import Repr
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Rule = Callable[[Any], str | None]
"""What is wanted in the place of a value; None where the value fits."""
Record = TypeVar("Record")

LONGEST_TEXT = 1 << 20
LONGEST_NAME = 255  # bytes: what file systems take
_short = Repr()
_short.maxstring = _short.maxother = 60


class MisfitError(ValueError):
    """A value does not fit its rule; says which, and what it is instead."""

    def __init__(self, where: str, value: object, wanted: str) -> None:
        super().__init__(f"{where or 'the whole'} is {_short.repr(value)}, not {wanted}")


def whole(low: int, high: int) -> Rule:
    """A whole number in a range, both ends included."""
    return lambda value: None if type(value) is int and low <= value <= high else f"a whole number from {low} to {high}"


def number(low: float, high: float) -> Rule:
    """A number in a range, both ends included."""
    wanted = f"a number from {low} to {high}"
    return lambda value: None if type(value) in (int, float) and low <= value <= high else wanted


def one_of(*words: str) -> Rule:
    """One of some words."""
    return lambda value: None if isinstance(value, str) and value in words else f"one of {', '.join(words)}"


def text(value: Any) -> str | None:
    """A string that can be encoded."""
    return None if isinstance(value, str) and len(value) <= LONGEST_TEXT and _is_unicode(value) else "a text"


def inner_path(value: Any) -> str | None:
    """A file's path, relative to a folder and inside it, whatever the system."""
    if text(value) is not None:
        return "a text"
    parts = PurePosixPath(value).parts
    if value.startswith("/") or PureWindowsPath(value).drive or "\\" in value or ".." in parts:
        return "the path of a file: it lies outside the bundle"
    fits = parts and "\0" not in value and all(len(part.encode()) <= LONGEST_NAME for part in parts)
    return None if fits else "the path of a file"


InnerPath = Annotated[str, inner_path]
_RULES: Mapping[Any, Rule] = {
    int: whole(0, 1 << 62),
    float: lambda value: None if type(value) in (int, float) else "a number",
    str: text,
    bool: lambda value: None if isinstance(value, bool) else "true or false",
    bytes: lambda value: None if isinstance(value, bytes) else "bytes",  # given beside the JSON
    Any: lambda _: None,
}


def to_json(value: Any) -> Any:
    """A record as objects, lists and plain values."""
    if _is_record(value):
        return {name: to_json(getattr(value, name)) for name in _kinds(value.__class__)}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_json(kind: type[Record], value: Any) -> Record:
    """The record that :func:`to_json` made ``value`` of; MisfitError names the place of what does not fit."""
    record: Record = _read(kind, value, "")
    return record


def map_paths(record: Record, change: Callable[[str], str]) -> Record:
    """The record with each :data:`InnerPath` in its fields, and in those of records inside it, changed."""
    mapped: Record = _map(type(record), record, change)
    return mapped


def _map(kind: Any, value: Any, change: Callable[[str], str]) -> Any:
    args = get_args(kind)
    if value is None or kind == InnerPath:
        return None if value is None else change(value)
    if get_origin(kind) in (Union, UnionType):
        return _map(args[0], value, change)
    if get_origin(kind) is tuple:
        return tuple(_map(args[0], item, change) for item in value) if args[-1] is Ellipsis else value
    if not _is_record(kind):
        return value
    return kind(**{name: _map(each, getattr(value, name), change) for name, each in _kinds(kind).items()})


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    rule = args[1] if origin is Annotated else one_of(*args) if origin is Literal else _RULES.get(kind)
    if rule is not None:
        _require(rule(value), value, where)
        return value
    if origin in (Union, UnionType):  # X | None is the one there is
        return None if value is None else _read(args[0], value, where)
    if origin is tuple:
        return _read_tuple(args, value, where)
    kinds = None if origin is Mapping else _kinds(kind)
    _require(None if isinstance(value, dict) else "an object", value, where)
    if kinds is None:
        for name in value:
            _read(args[0], name, f"a name in {where}")
        return {name: _read(args[1], item, _inside(where, name)) for name, item in value.items()}
    faults = [f"it lacks {name!r}" for name in sorted(kinds.keys() - value.keys())]
    faults += [f"{_short.repr(name)} is not known" for name in sorted(value.keys() - kinds.keys())]
    if faults:
        raise MisfitError(where, value, f"an object of the fields that belong there: {faults[0]}")
    return kind(**{name: _read(each, value[name], _inside(where, name)) for name, each in kinds.items()})


def _read_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    any_length = kinds[-1] is Ellipsis
    if not isinstance(value, list) or not (any_length or len(value) == len(kinds)):
        raise MisfitError(where, value, "a list" if any_length else f"a list of {len(kinds)}")
    each = repeat(kinds[0]) if any_length else kinds
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(each, value, strict=False)))


def _is_record(value: Any) -> bool:
    return is_dataclass(value) or hasattr(value, "_fields")


@cache
def _kinds(record: Any) -> dict[str, Any]:
    """The type of each field of a class."""
    if not _is_record(record):
        raise TypeError(f"there is no rule for {record!r}")
    return get_type_hints(record, include_extras=True)


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _require(wanted: str | None, value: Any, where: str) -> None:
    if wanted is not None:
        raise MisfitError(where, value, wanted)


def _is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

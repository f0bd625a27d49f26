"""``oneOf`` of a schema, where no value can follow two of its alternatives: then it says what ``anyOf`` does.

What tells alternatives apart are their JSON types, their constants, or the constants of a property that all of them
require: Pydantic's discriminator, say.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specexport_runtime.sampling.schema_rules import anchors_of, list_under, schemas_of, target_of

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_OF_PYTHON = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
_MAX_DEPTH, _MAX_KEYS = 16, 64
"""What is looked at of a schema; what is not may be anything."""
_OTHER_RULES = ("/oneOf", '"$id"', "draft-03", "draft-04")
"""References through the keyword, or from another base; drafts without constants."""

_Values = frozenset[tuple[str, Any]]


class _Shape(NamedTuple):
    """What is known of all values of a schema."""

    types: frozenset[str] = _TYPES
    values: _Values | None = None  # they are among these; None: perhaps not
    keys: tuple[tuple[str, _Values], ...] = ()  # of an object: values that required properties are among


def with_any_of(text: str) -> str:
    """A schema, as JSON, with each ``oneOf`` as ``anyOf`` whose alternatives exclude each other."""
    if '"oneOf"' not in text or any(mark in text for mark in _OTHER_RULES):
        return text
    schema = json.loads(text)
    anchors, known = anchors_of(schema), dict[int, _Shape]()

    def shape_of(part: Any, depth: int = 0) -> _Shape:
        if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
            return _Shape()
        if "$ref" in part:  # of some drafts nothing beside it counts
            return shape_of(target_of(part["$ref"], schema, anchors), depth + 1)
        if id(part) not in known:
            known[id(part)] = _Shape()  # for what comes back to it
            parts = [shape_of(each, depth + 1) for each in list_under(part, "allOf")]
            properties = part["properties"] if isinstance(part.get("properties"), Mapping) else {}
            names = [each for each in list_under(part, "required") if isinstance(each, str) and each in properties]
            found = [(name, shape_of(properties[name], depth + 1).values) for name in names]
            keys = tuple((name, values) for name, values in found if values is not None)
            known[id(part)] = _all_of([_own_shape(part)._replace(keys=keys), *parts])
        return known[id(part)]

    for each in schemas_of(schema, anchors):
        parts = list_under(each, "oneOf")
        if not parts or "anyOf" in each or not _are_exclusive([shape_of(part) for part in parts]):
            continue
        each["anyOf"] = each.pop("oneOf")
        each.pop("discriminator", None)  # OpenAPI's hint; beside it the matcher takes no reference that comes back
    return json.dumps(schema)


def _own_shape(schema: Mapping[str, Any]) -> _Shape:
    """What its type and its constants say."""
    types = [schema["type"]] if isinstance(schema.get("type"), str) else list_under(schema, "type")
    named = frozenset("number" if each == "integer" else each for each in types if isinstance(each, str)) or _TYPES
    values = [schema["const"]] if "const" in schema else list_under(schema, "enum")
    if not values or not all(type(each) in _OF_PYTHON for each in values):
        return _Shape(named)
    known = frozenset((_OF_PYTHON[type(each)], each) for each in values)
    return _Shape(named & {kind for kind, _ in known}, known)


def _all_of(shapes: list[_Shape]) -> _Shape:
    values = next((shape.values for shape in shapes if shape.values is not None), None)
    keys = tuple(key for shape in shapes for key in shape.keys)[:_MAX_KEYS]
    return _Shape(_TYPES.intersection(*(shape.types for shape in shapes)), values, keys)


def _are_exclusive(shapes: list[_Shape]) -> bool:
    """Whether no value can have two of the shapes."""
    for kind in _TYPES:
        group = [shape for shape in shapes if kind in shape.types]
        if len(group) < 2 or _are_disjoint(shape.values for shape in group):
            continue
        keys = [dict(shape.keys) for shape in group]
        names = set(keys[0]).intersection(*keys[1:])
        if kind != "object" or not any(_are_disjoint(each[name] for each in keys) for name in names):
            return False
    return True


def _are_disjoint(each: Iterable[_Values | None]) -> bool:
    """Whether values are known, and no two have one in common."""
    seen: set[tuple[str, Any]] = set()
    for values in each:
        if values is None or not seen.isdisjoint(values):
            return False
        seen |= values
    return True

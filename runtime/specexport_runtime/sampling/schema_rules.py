"""What no schema of a request may have: settings of the matcher, and references that come back to themselves.

The matcher reads settings out of a schema (``x-guidance``), with which a text would be no JSON; and it stops in the
middle of a text where a value is nothing but a reference to itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

MATCHER_KEYS = frozenset({"x-guidance"})
_SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "if", "then", "else", "not", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
)
"""Keywords whose value is a schema, or a list of them."""
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_MAPS = _DEFINITIONS | {"properties", "patternProperties", "dependentSchemas"}
"""Keywords that give schemas by names. Everything else is data: a key in it is no keyword."""
_DIGITS = 10  # no index in a list has more


class SchemaPath(NamedTuple):
    """Where a part of a schema is: a place, and the key after it; the places of a schema share their beginnings."""

    outer: "SchemaPath | None"
    key: str

    def __str__(self) -> str:
        keys, place = [self.key], self.outer
        while place is not None:
            keys.append(place.key)
            place = place.outer
        return ".".join(reversed(keys))[:200]


class _Part(NamedTuple):
    """A schema within a schema: where it is (None: the whole), and what its reference is to."""

    where: SchemaPath | None
    schema: Mapping[str, Any]
    target: Any

    @property
    def name(self) -> str:
        return "the schema" if self.where is None else f"its part {self.where}"


def find_fault(schema: Any) -> str | None:
    """What is wrong with a JSON schema, as a sentence without its full stop; None if nothing is.

    The work grows as the schema does, whatever refers to what in it.
    """
    named = [each for each in _iter_objects(schema) if isinstance(each.get("$anchor"), str)]
    anchors = {each["$anchor"]: each for each in reversed(named)}  # the first of a name
    for part in _iter_parts(schema, anchors):
        if found := MATCHER_KEYS & part.schema.keys():
            return f"{part.name} has {min(found)!r}, a setting of the matcher and no keyword"
    used = list(_iter_parts(schema, anchors, only_used=True))
    begun = _find_satisfiable(used)
    for part in used:
        if id(part.schema) not in begun and "$ref" in part.schema:
            return f"{part.name} refers to {part.schema['$ref']!r}, which comes back to itself with nothing of a value"
    return None


def _iter_parts(schema: Any, anchors: Mapping[str, Any], *, only_used: bool = False) -> Iterator[_Part]:
    """All schemas within a schema that are objects; ``only_used``: without unused definitions."""
    todo: list[tuple[SchemaPath | None, Any]] = [(None, schema)]
    seen: set[int] = set()
    while todo:
        where, part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        target = _resolve_reference(part["$ref"], schema, anchors) if "$ref" in part else None
        yield _Part(where, part, target)
        todo.append((SchemaPath(where, "$ref"), target))
        for key, value in part.items():
            if only_used and key in _DEFINITIONS:
                continue
            place = SchemaPath(where, key)
            if key in _LISTS and isinstance(value, list):
                todo += [(SchemaPath(place, str(i)), each) for i, each in enumerate(value)]
            elif key in _MAPS and isinstance(value, Mapping):
                todo += [(SchemaPath(place, name), each) for name, each in value.items()]
            elif key in _SCHEMAS:
                todo.append((place, value))


def _find_satisfiable(parts: list[_Part]) -> set[int]:
    """Ids of the schemas of which a value can begin: the least fixed point, by what waits for each.

    A schema begins when one has of each group that stands in its place. What is not among ``parts`` is the matcher's
    to say.
    """
    waiting: dict[int, list[int]] = {id(part.schema): [] for part in parts}  # groups that each schema is in
    owners: list[int] = []  # the schema whose value each group is
    left = dict.fromkeys(waiting, 0)  # groups of each schema in which none has begun
    for part in parts:
        groups = [[part.target]] if "$ref" in part.schema else []
        groups += [[each] for each in _read_list(part.schema, "allOf")]
        groups += [_read_list(part.schema, "anyOf"), _read_list(part.schema, "oneOf")]
        for group in groups:
            if group and all(id(each) in waiting for each in group):
                left[id(part.schema)] += 1
                for each in group:
                    waiting[id(each)].append(len(owners))
                owners.append(id(part.schema))
    begun = [schema for schema, count in left.items() if not count]
    met: set[int] = set()
    for schema in begun:  # which grows
        for number in waiting[schema]:
            if number not in met:
                met.add(number)
                left[owners[number]] -= 1
                begun += [] if left[owners[number]] else [owners[number]]
    return set(begun)


def _read_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _resolve_reference(reference: Any, root: Any, anchors: Mapping[str, Any]) -> Any:
    """The schema that a reference within the document is to; None for any other."""
    if not isinstance(reference, str) or not isinstance(root, Mapping):
        return None
    base = root.get("$id")
    document, _, fragment = reference.partition("#")
    if document and document != (base.partition("#")[0] if isinstance(base, str) else None):
        return None
    if not fragment:
        return root
    if not fragment.startswith("/"):
        return anchors.get(fragment)
    found = root
    for name in unquote(fragment)[1:].split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < _DIGITS and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _iter_objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects within a value."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, Mapping):
            yield found
            todo += found.values()
        elif isinstance(found, list):
            todo += found

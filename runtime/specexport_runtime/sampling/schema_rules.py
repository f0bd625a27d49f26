"""What no schema of a request may have: settings of the matcher, and references that come back to themselves.

The matcher reads settings out of a schema (``x-guidance``), with which a text would be no JSON; and it stops in the
middle of a text where a value is nothing but a reference to itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any
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


def fault_of(schema: Any) -> str | None:
    """What is wrong with a JSON schema, as a sentence without its full stop; None if nothing is."""
    for where, part in _parts(schema):
        if found := MATCHER_KEYS & part.keys():
            return f"{_name(where)} has {min(found)!r}, a setting of the matcher and no keyword"
    places = dict(_parts(schema, only_used=True))
    known = {id(part): where for where, part in places.items()}
    begun: set[int] = set()
    while True:  # the least fixed point: a value begins where something of it does
        more = {id(part) for part in places.values() if id(part) not in begun and _begins(part, schema, begun, known)}
        if not more:
            break
        begun |= more
    for where, part in places.items():
        if id(part) not in begun and "$ref" in part:
            return f"{_name(where)} refers to {part['$ref']!r}, which comes back to itself with nothing of a value"
    return None


def _parts(schema: Any, *, only_used: bool = False) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """All schemas within a schema that are objects, and where they are; ``only_used``: without unused definitions."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    seen: set[int] = set()
    while todo:
        where, part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield where, part
        if "$ref" in part:
            todo.append(((*where, "$ref"), _target(part["$ref"], schema)))
        for key, value in part.items():
            if only_used and key in _DEFINITIONS:
                continue
            if key in _LISTS and isinstance(value, list):
                todo += [((*where, key, str(i)), each) for i, each in enumerate(value)]
            elif key in _MAPS and isinstance(value, Mapping):
                todo += [((*where, key, name), each) for name, each in value.items()]
            elif key in _SCHEMAS:
                todo.append(((*where, key), value))


def _begins(part: Mapping[str, Any], root: Any, begun: set[int], known: Mapping[int, Any]) -> bool:
    """Whether a value of a schema can begin, as far as is known of the schemas that stand in its place."""
    wanted = [_target(part["$ref"], root)] if "$ref" in part else []
    wanted += part["allOf"] if isinstance(part.get("allOf"), list) else []
    choices = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list) and part[key]]

    def has_begun(schema: Any) -> bool:
        return id(schema) in begun or id(schema) not in known  # what cannot be found is the matcher's to say

    return all(map(has_begun, wanted)) and all(any(map(has_begun, each)) for each in choices)


def _target(reference: Any, root: Any) -> Any:
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
        return next((part for part in _objects(root) if part.get("$anchor") == fragment), None)
    found = root
    for name in unquote(fragment)[1:].split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects within a value."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, Mapping):
            yield found
            todo += found.values()
        elif isinstance(found, list):
            todo += found


def _name(where: tuple[str, ...]) -> str:
    return "the schema" if not where else f"its part {'.'.join(where)[:200]}"

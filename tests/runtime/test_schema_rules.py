"""Schemas that no text can follow, or that set the matcher, are refused before anything runs; data in them is data."""

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake import functions
from specexport_runtime.intake.functions import FunctionError, read_functions
from specexport_runtime.sampling import structured
from specexport_runtime.sampling.schema_rules import find_fault
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.structured import check_strict
from tests.support.cases import chance

SETTING = {"item_separator": ";"}
NULL = {"type": "null"}
LIST = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, NULL]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}

SETTINGS: dict[str, Any] = {
    "at the top": {"type": "object", "x-guidance": SETTING},
    "in a property": {"properties": {"a": {"type": "array", "x-guidance": SETTING}}},
    "in a definition": {"$defs": {"const": {"x-guidance": SETTING}}, "type": "null"},
    "in a choice": {"anyOf": [NULL, {"type": "array", "x-guidance": SETTING}]},
    "in items": {"items": {"items": {"x-guidance": SETTING}}},
    "in a tuple": {"prefixItems": [{"x-guidance": SETTING}]},
    "in a property named const": {"properties": {"const": {"x-guidance": SETTING}}},
    "in additional properties": {"additionalProperties": {"x-guidance": SETTING}},
    "with nothing in it": {"x-guidance": None},
    "where a reference leads": {"$ref": "#/x/y", "x": {"y": {"type": "array", "x-guidance": SETTING}}},
}
DATA: dict[str, Any] = {
    "a property's name": {"properties": {"x-guidance": NULL}, "required": ["x-guidance"]},
    "a definition's name": {"$defs": {"x-guidance": NULL}, "$ref": "#/$defs/x-guidance"},
    "a constant": {"const": {"x-guidance": SETTING}},
    "one of an enum": {"enum": [{"x-guidance": SETTING}, "x-guidance"]},
    "a default": {"type": "object", "default": {"x-guidance": SETTING}},
    "an example": {"type": "object", "examples": [{"x-guidance": SETTING}]},
    "a description": {"type": "object", "description": "x-guidance"},
    "a property named $ref": {"properties": {"$ref": NULL}, "required": ["$ref"]},
    "a constant with a reference": {"const": {"$ref": "#"}},
}
LOOPS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "the empty reference": {"$ref": ""},
    "by its name": {"$id": "https://x.invalid/y", "$ref": "https://x.invalid/y"},
    "by an anchor": {"$defs": {"a": {"$anchor": "q", "$ref": "#q"}}, "$ref": "#/$defs/a"},
    "escaped": {"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"},
    "in percents": {"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"},
    "inside a property": {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    "inside items": {"type": "array", "items": {"$ref": "#/items"}},
    "inside what is data elsewhere": {"$ref": "#/default", "default": {"$ref": "#/default"}},
    "inside an unknown keyword": {"$ref": "#/x/y", "x": {"y": {"$ref": "#/x/y"}}},
}
RECURSIONS: dict[str, Any] = {
    "a list": LIST,
    "a loop that nothing refers to": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "null"},
    "through definitions": {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    "additional properties": {"type": "object", "additionalProperties": {"$ref": "#"}},
    "an unknown place": {"$ref": "#/nowhere"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_the_matcher_are_refused(case: str) -> None:
    escaped = json.dumps(SETTINGS[case]).replace("x-guidance", r"x\u002dguidance")
    for schema in (SETTINGS[case], escaped):
        with pytest.raises(InvalidRequestError, match="'x-guidance', a setting of the matcher"):
            StructuredOutputs(json=schema)


@pytest.mark.parametrize("case", LOOPS)
def test_references_that_come_back_to_themselves_are_refused(case: str) -> None:
    with pytest.raises(InvalidRequestError, match="comes back to itself"):
        StructuredOutputs(json=LOOPS[case])


@pytest.mark.parametrize("case", DATA | RECURSIONS)
def test_data_and_recursion_stay(case: str) -> None:
    assert find_fault((DATA | RECURSIONS)[case]) is None


@pytest.mark.parametrize("schema", [SETTINGS["in a property"], LOOPS["inside a property"]])
def test_functions_are_held_to_the_same(schema: Any) -> None:
    good = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bad = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"} | schema}}
    with pytest.raises(FunctionError, match=r"setting of the matcher|comes back to itself") as caught:
        read_functions([good, bad])
    assert caught.value.param == "tools[1].function.parameters"


def test_what_is_deep_is_looked_through_without_recursion() -> None:
    deep: Any = {"x-guidance": SETTING}
    for _ in range(5000):
        deep = {"items": deep}
    assert "setting of the matcher" in str(find_fault(deep))


class Watched(dict[str, Any]):
    """An object that counts how often any is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)

    def __getitem__(self, key: str) -> Any:
        Watched.looks += 1
        return super().__getitem__(key)


CHAINS: dict[str, Callable[[int], dict[str, Any]]] = {
    "to the one before": lambda i: {"$ref": f"#/allOf/{i - 1}"} if i else {},
    "to the next": lambda i: {"$ref": f"#/allOf/{i + 1}"},
    "by anchors": lambda i: {"$anchor": f"a{i}", "$ref": f"#a{i + 1}"},
}


@pytest.mark.parametrize("case", CHAINS)
def test_work_grows_as_the_schema_does(case: str) -> None:
    looks = []
    for count in (50, 200):
        parts = [Watched(CHAINS[case](i)) for i in range(count)]
        before = Watched.looks
        find_fault({"allOf": parts})
        looks.append(Watched.looks - before)
    assert looks[1] < 5 * looks[0]


def test_places_of_a_strict_schema_are_not_written_out() -> None:
    """Each of many properties within one of a long name."""
    inner = {"type": "object", "properties": {str(i): NULL for i in range(2000)}, "additionalProperties": False}
    tracemalloc.start()
    with pytest.raises(ApiError, match=r"schema\.properties\.nnn"):
        check_strict({**inner, "properties": {"n" * 20_000: inner}, "required": ["n" * 20_000]}, "schema")
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_what_is_too_large_or_too_deep_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (structured, functions):
        monkeypatch.setattr(module, "find_fault", Mock(side_effect=AssertionError("it was looked through")))
    large = {"type": "object", "description": "x" * structured.MAX_GRAMMAR_CHARS}
    for given in (large, json.dumps(large), '{"items":' * 20_000):
        with pytest.raises(InvalidRequestError, match=r"characters|recursion"):
            StructuredOutputs(json=given)
    with pytest.raises(FunctionError, match="characters"):
        read_functions([{"type": "function", "function": {"name": "f", "parameters": large}}])


# Drawn schemas, against the matcher and another reading of what can begin.


def drawn(dice: random.Random, names: list[str], depth: int = 0) -> Any:
    kind = dice.choice(["ref", "ref", "null", "array", "object", "anyOf", "allOf"] if depth < 3 else ["ref", "null"])
    if kind == "ref":
        return {"$ref": f"#/$defs/{dice.choice(names)}"}
    if kind == "null":
        return NULL
    if kind == "array":
        return {"type": "array", "items": drawn(dice, names, depth + 1), "maxItems": 1}
    if kind == "object":
        inner = {"p": drawn(dice, names, depth + 1)}
        return {"type": "object", "properties": inner, "additionalProperties": False}
    count = 1 if kind == "allOf" else dice.randint(1, 2)
    return {kind: [drawn(dice, names, depth + 1) for _ in range(count)]}


def begins(schema: Any, defs: Any, left: int) -> bool:
    """Whether a value begins when at most ``left`` references are followed in its place: by plain expansion."""
    if "$ref" in schema:
        return left > 0 and begins(defs[schema["$ref"].rpartition("/")[2]], defs, left - 1)
    if "anyOf" in schema:
        return any(begins(each, defs, left) for each in schema["anyOf"])
    return all(begins(each, defs, left) for each in schema.get("allOf", ()))


def all_of(schema: Any) -> list[Any]:
    inner = [*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("properties", {}).values()]
    inner += [schema["items"]] if "items" in schema else []
    return [schema, *(each for part in inner for each in all_of(part))]


@pytest.mark.fuzz
def test_drawn_references_are_judged_as_by_expansion_and_the_matcher_takes_the_rest() -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    dice, verdicts = random.Random(chance.seed(7)), set()
    for _ in range(chance.many(600)):
        names = ["a", "b", "c"][: dice.randint(1, 3)]
        defs = {name: drawn(dice, names) for name in names}
        schema = {"$defs": defs, **drawn(dice, names)}
        used, todo = {}, [schema]
        while todo:  # what the schema is made of, and what that refers to
            for part in all_of(todo.pop()):
                used[id(part)] = part
                target = defs[part["$ref"].rpartition("/")[2]] if "$ref" in part else None
                if target is not None and id(target) not in used:
                    used[id(target)] = target
                    todo.append(target)
        places = used.values()
        wanted = all(begins(part, defs, len(names) + 1) for part in places if "$ref" in part)
        found = find_fault(schema)
        assert (found is None) == wanted, schema
        verdicts.add(wanted)
        if wanted:
            text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
            if not matcher.is_error():  # it may refuse what it does not know
                matcher.compute_bitmask()
                assert not matcher.is_error(), schema
    assert verdicts == {True, False}

"""``oneOf`` is taken where no value can follow two alternatives, and then means exactly what ``anyOf`` does."""

import json
import time
from typing import Annotated, Any, Literal, Union

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.sampling.one_of import with_any_of
from specexport_runtime.sampling.structured import MAX_SCHEMA_CHARS, StructuredOutputs
from tests.support.cases.chance import examples
from tests.support.models.tokenizers import byte_level


def one_of(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"oneOf": list(parts), **more}


def thing(*kinds: Any, key: str = "kind", **more: Any) -> dict[str, Any]:
    values = {"const": kinds[0]} if len(kinds) == 1 else {"enum": list(kinds)}
    return {"type": "object", "properties": {key: values, **more}, "required": [key, *more]}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


LINKED = one_of(ref("N"), ref("E"), **{"$defs": {"N": thing("n", next=one_of(ref("N"), ref("E"))), "E": thing("e")}})
APART: dict[str, Any] = {
    "constants of a property": one_of(thing("a"), thing("b")),
    "enums of it": one_of(thing("a", "b"), thing("c"), thing("d", "e")),
    "numbers of it": one_of(thing(1), thing(2), thing(2.5), thing(True), thing(None)),
    "a second property": one_of(thing("x", b={"const": 1}), thing("x", b={"const": 2})),
    "types": one_of({"type": "string"}, {"type": ["integer", "null"]}, thing("a"), {"type": "array"}),
    "constants": one_of({"const": 1}, {"const": 2}, {"enum": ["a", None]}),
    "in a list that comes back": LINKED,
    "a part of all": one_of({"allOf": [thing("a"), {"properties": {"x": {}}}]}, thing("b")),
    "one alternative": one_of({"type": "number"}),
    "by anchors": one_of({"$ref": "#p"}, {"$ref": "#q"}, **{"$defs": {
        "P": {"$anchor": "p", **thing("a")}, "Q": {"$anchor": "q", **thing("b")},
    }}),
}  # fmt: skip
TOGETHER: dict[str, Any] = {
    "the same constant": one_of(thing("a"), thing("a", "b")),
    "one and 1.0": one_of(thing(1), thing(1.0)),
    "a property that may be left out": one_of(thing("a"), {**thing("b"), "required": []}),
    "other properties": one_of(thing("a"), thing("b", key="sort")),
    "no type": one_of(*({**thing(kind), "type": ["object", "null"]} for kind in "ab")),
    "an integer is a number": one_of({"type": "integer"}, {"type": "number"}),
    "twice the same": one_of(ref("A"), ref("A"), **{"$defs": {"A": thing("a")}}),
    "lists as constants": one_of({"const": [1]}, {"const": [1.0]}),
    "anything": one_of({}, {"type": "null"}),
    "what a reference has beside it": one_of(
        {**ref("A"), "const": 1}, {**ref("A"), "const": 2}, **{"$defs": {"A": {}}}
    ),
    "a reference to nothing": one_of({"$ref": "#/x"}, {"type": "null"}),
    "a loop": one_of(ref("A"), {"type": "null"}, **{"$defs": {"A": {"allOf": [ref("A")]}}}),
    "a reference through the keyword": one_of(thing("a"), {"$ref": "#/oneOf/0"}),
    "references from another base": one_of(
        {"$id": "https://x.invalid/a", "$defs": {"K": {"const": "b"}}, **thing("a", b=ref("K"))},
        {"type": "object", "properties": {"b": {"const": "b"}}, "required": ["b"]},
        **{"$defs": {"K": {"const": "a"}}},
    ),
    "a draft without constants": one_of(
        thing("a"), thing("b"), **{"$schema": "http://json-schema.org/draft-04/schema#"}
    ),
    "beside anyOf": one_of(thing("a"), thing("b"), anyOf=[{}]),
    "no types at all": one_of({"type": 5, "required": 5, "enum": 5}, {"type": [5], "properties": 5}),
    "no list": {"oneOf": 5},
    "data": {"const": one_of(thing("a"), thing("b"))},
}


@pytest.mark.parametrize("name", APART)
def test_alternatives_that_are_told_apart(name):
    assert "oneOf" not in with_any_of(json.dumps(APART[name]))


@pytest.mark.parametrize("name", TOGETHER)
def test_alternatives_that_may_be_true_together_stay(name):
    text = json.dumps(TOGETHER[name])
    assert json.loads(with_any_of(text)) == TOGETHER[name]


CONSTANTS = st.sampled_from([None, True, 1, 1.0, 2, "a", "b", [1], {"kind": 1}])
SHAPES = st.recursive(
    st.one_of(
        st.builds(lambda value: {"const": value}, CONSTANTS),
        st.builds(lambda values: {"enum": values}, st.lists(CONSTANTS, min_size=1, max_size=3)),
        st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "integer", "number", "object", "string"])),
        st.just({}),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda parts, needed, kind: {"properties": parts, "required": needed, **kind},
            st.dictionaries(st.sampled_from(["kind", "x"]), inner, max_size=2),
            st.lists(st.sampled_from(["kind", "x"]), max_size=2, unique=True),
            st.sampled_from([{}, {"type": "object"}]),
        ),
        st.builds(
            lambda key, parts: {key: parts},
            st.sampled_from(["anyOf", "allOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=6,
)
VALUES = [None, True, False, 1, 2, 1.5, "a", "b", [], [1], {}] + [
    {name: value for name, value in (("kind", kind), ("x", x)) if value is not ...}
    for kind in (..., None, True, 1, 2, "a", "b", [1])
    for x in (..., None, 1, "a")
]


@examples(50)
@given(st.lists(SHAPES, min_size=2, max_size=3))
def test_nothing_changes_but_the_keyword(parts):
    schema = one_of(*parts)
    changed = json.loads(with_any_of(json.dumps(schema)))
    if changed != schema:
        before, after = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(changed)
        assert [before.is_valid(value) for value in VALUES] == [after.is_valid(value) for value in VALUES]


def compiled(schema: Any) -> Any:
    pytest.importorskip("llguidance")
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<|end|>")])
    try:
        return tokenizer, compiler.compile(StructuredOutputs(json=schema))
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "text", ['{"kind":"n","next":{"kind":"n","next":{"kind":"e"}}}', '{"kind":"n","next":{"kind":"x']
)
def test_texts_of_a_list_that_comes_back(text):
    tokenizer, grammar = compiled(LINKED)
    tokens = [tokenizer.token_to_id(letter) for letter in text]
    assert grammar.cut(tokens) == (len(tokens) if text.endswith("}}}") else len(tokens) - 1)


def test_what_pydantic_makes_of_a_discriminator_is_taken():
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int

    class Dog(BaseModel):
        kind: Literal["dog", "puppy"]
        friends: list["Pet"]

    Pet = Annotated[Union[Cat, Dog], Field(discriminator="kind")]  # noqa: UP007

    class Home(BaseModel):
        pets: list[Pet]

    Home.model_rebuild(_types_namespace={"Pet": Pet})
    schema = Home.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    compiled(schema)


@pytest.mark.parametrize("name", ["the same constant", "anything", "a loop"])
def test_what_cannot_be_told_apart_is_refused(name):
    with pytest.raises(InvalidRequestError, match=r"nothing tells the alternatives .* apart|comes back to itself"):
        compiled({"type": "object", "properties": {"a": TOGETHER[name]}, "$defs": TOGETHER[name].get("$defs", {})})


def test_hostile_unions_take_no_time():
    wide = {f"k{i}": {"const": i} for i in range(2000)}
    whole = {"properties": wide, "required": list(wide), "type": "object"}
    deep: Any = {}
    for _ in range(400):
        deep = {"oneOf": [deep, {"type": "null"}]}
    for schema in (
        one_of(*[{"allOf": [ref("W"), {}]} for _ in range(2000)], **{"$defs": {"W": whole}}),
        one_of(
            *[{"anyOf": [ref("E"), ref("E")]} for _ in range(2000)], **{"$defs": {"E": {"enum": list(range(1000))}}}
        ),
        deep,
    ):
        text = json.dumps(schema)
        assert len(text) < MAX_SCHEMA_CHARS
        begin = time.process_time()
        with_any_of(text)
        assert time.process_time() - begin < 2

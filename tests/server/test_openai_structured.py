"""Answers of a given form, and prompts that were read before, with the official client on a real engine."""

import json

import pytest
from openai import BadRequestError

from tests.support.servers.openai_help import client_of

pytest.importorskip("llguidance")

PROMPT = "def add(a, b):\n    return a + b\n\n\n# As JSON:\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "inner": {
            "type": "object",
            "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["size"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "inner"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(demo_served):
    with client_of(demo_served) as client:
        yield client


def complete(client, **parameters):
    parameters = {"max_tokens": 100, "seed": 4} | parameters
    asked = ("response_format", "structured_outputs", "speculative", "cache_salt", "ignore_eos")
    extra = {name: parameters.pop(name) for name in asked if name in parameters}
    return client.completions.create(model="demo", prompt=PROMPT, extra_body=extra, **parameters)


def formatted(schema, *, strict=True, name="answer"):
    return {"type": "json_schema", "json_schema": {"name": name, "strict": strict, "schema": schema}}


@pytest.mark.parametrize(("drafter", "temperature"), [("none", 1), ("draft-model", 1), ("auto", 0)])
def test_an_answer_follows_its_schema(client, drafter, temperature):
    answer = complete(
        client, temperature=temperature, n=3, response_format=formatted(SCHEMA), speculative={"drafter": drafter}
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.text)
        assert list(found) == ["name", "inner"]
        assert 0 <= found["inner"]["size"] <= 9


def test_a_stream_and_log_probabilities_are_of_the_same_text(client):
    whole = complete(client, temperature=0, response_format=formatted(SCHEMA), logprobs=1)
    chunks = list(complete(client, temperature=0, response_format=formatted(SCHEMA), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert "".join(whole.choices[0].logprobs.tokens).startswith(whole.choices[0].text)


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, ["red", "green"]),
        ({"structured_outputs": {"regex": "(a|b)c"}}, ["ac", "bc"]),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, ["1", "2"]),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, ["x", "y"]),
        ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["x"]}}, ["x"]),
    ],
)
def test_the_forms_of_vllm(client, form, allowed):
    assert complete(client, **form).choices[0].text in allowed


def test_an_answer_that_is_cut_off_says_so(client):
    answer = complete(client, max_tokens=5, response_format={"type": "json_object"}, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    long = complete(client, max_tokens=5, response_format=formatted(SCHEMA), temperature=0)
    assert long.choices[0].finish_reason == "length"


def told_apart(kind, **more):
    return SCHEMA | {"properties": {"kind": {"const": kind}, **more}, "required": ["kind", *more]}


PETS = {
    "$defs": {"Cat": told_apart(1, lives={"oneOf": [{"const": 7}, {"const": 9}]}), "Dog": told_apart(2)},
    "discriminator": {"propertyName": "kind", "mapping": {"1": "#/$defs/Cat", "2": "#/$defs/Dog"}},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
"""As Pydantic has a union with a discriminator."""


def test_alternatives_that_a_constant_tells_apart(client):
    inner = {name: PETS[name] for name in ("discriminator", "oneOf")}
    schema = SCHEMA | {"$defs": PETS["$defs"], "properties": {"pet": inner}, "required": ["pet"]}
    asked = {"response_format": formatted(schema), "n": 4}
    greedy = [
        complete(client, temperature=0, speculative={"drafter": drafter}, **asked).choices[0].text
        for drafter in ("none", "draft-model", "auto")
    ]
    assert len(set(greedy)) == 1
    pets = [json.loads(choice.text)["pet"] for choice in complete(client, **asked).choices]
    pets.append(json.loads(greedy[0])["pet"])
    pets += [json.loads(choice.text) for choice in complete(client, n=4, structured_outputs={"json": PETS}).choices]
    assert all(pet in ({"kind": 2}, {"kind": 1, "lives": 7}, {"kind": 1, "lives": 9}) for pet in pets)


def test_as_many_properties_as_openai_documents_are_compiled(client):
    part = {"type": ["string", "null"], "description": "what it is for"}
    names = [f"{number:04}_{'property' * 2}_name"[:24] for number in range(5000)]
    schema = SCHEMA | {"properties": dict.fromkeys(names, part), "required": names}
    answer = complete(client, max_tokens=4, temperature=0, response_format=formatted(schema))
    assert answer.choices[0].finish_reason == "length"
    assert '{"0000_property'.startswith(answer.choices[0].text)


def nested(depth):
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


STRICT = [
    ({"type": "string"}, "the root"),
    ({"type": "object", "properties": {"a": {"type": "string"}}}, "'additionalProperties' must be false"),
    (SCHEMA | {"required": ["name"]}, "'inner' is missing"),
    (SCHEMA | {"required": 5}, "'required' a list"),
    (SCHEMA | {"properties": [1]}, "'properties' must be an object"),
    (nested(12), "at most 10 levels"),
]
LOOSE = [
    ({"type": "object", "not": {}}, "not"),
    ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "the alternatives of a oneOf"),
    ({"type": "object", "x-guidance": {"item_separator": ";"}}, "a setting of the matcher"),
]
OF_VLLM = [
    ({"json": {"$ref": "#"}}, "comes back to itself"),
    ({"grammar": 'start: "x" <|endoftext|> "y"'}, "names a token that ends the text"),
    ({}, "nothing is given"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "a", "choice": ["b"]}, "regex, choice"),
]
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a"}}
REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format", ""),
    ({"response_format": formatted(SCHEMA, name="a name")}, "response_format.json_schema.name", ""),
    ({"response_format": NO_SCHEMA}, "response_format.json_schema.schema", "is missing"),
    *(({"response_format": formatted(schema)}, "response_format.json_schema.schema", said) for schema, said in STRICT),
    *(
        ({"response_format": formatted(schema, strict=False)}, "response_format.json_schema.schema", said)
        for schema, said in LOOSE
    ),
    *(({"structured_outputs": form}, "structured_outputs", said) for form, said in OF_VLLM),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "both"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", ""),
]


@pytest.mark.parametrize(("form", "param", "said"), REFUSED)
def test_what_cannot_be_honoured_is_named(client, demo_served, form, param, said):
    with pytest.raises(BadRequestError) as error:
        complete(client, **form)
    assert error.value.body["param"].startswith(param)
    assert said in error.value.body["message"]
    demo_served.wait_until_idle()


def test_a_prompt_that_was_read_is_not_read_again(client):
    def cached(n=1, **extra):
        answer = client.completions.create(
            model="demo", prompt=PROMPT * 3, max_tokens=4, temperature=0, n=n, extra_body=extra
        )
        return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens, answer.choices[0].text

    first, again = cached(cache_salt="one"), cached(cache_salt="one")
    assert first[0] == 0
    assert again == (first[1] - 1, first[1], first[2])
    assert cached(cache_salt="two")[0] == 0
    assert cached(cache_salt="one", speculative={"remember": False})[0] == 0
    assert cached(cache_salt="three", n=3)[0] == 0  # one of the three reads it

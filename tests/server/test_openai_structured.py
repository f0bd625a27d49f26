"""Answers of a given form, and prompts that were read before, with the official client on a real engine."""

import json

import httpx
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
    extra = {
        name: parameters.pop(name) for name in ("response_format", "structured_outputs", "speculative", "cache_salt")
        if name in parameters
    }  # fmt: skip
    return client.completions.create(model="demo", prompt=PROMPT, extra_body=extra, **parameters)


def formatted(schema, *, strict=True, name="answer"):
    return {"type": "json_schema", "json_schema": {"name": name, "strict": strict, "schema": schema}}


@pytest.mark.parametrize(("drafter", "temperature"), [("none", 1), ("draft-model", 1), ("auto", 0)])
def test_an_answer_follows_its_schema(client, drafter, temperature):
    answer = complete(
        client,
        temperature=temperature,
        n=3,
        response_format=formatted(SCHEMA),
        speculative={"drafter": drafter},
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


def nested(depth):
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


@pytest.mark.parametrize(
    ("form", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        ({"response_format": formatted(SCHEMA, name="a name")}, "response_format.json_schema.name", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        ({"response_format": formatted({"type": "string"})}, "response_format.json_schema.schema", "the root"),
        (
            {"response_format": formatted({"type": "object", "properties": {"a": {"type": "string"}}})},
            "response_format.json_schema.schema",
            "'additionalProperties' must be false",
        ),
        (
            {"response_format": formatted(SCHEMA | {"required": ["name"]})},
            "response_format.json_schema.schema",
            "'inner' is missing",
        ),
        (
            {"response_format": formatted(SCHEMA | {"required": 5})},
            "response_format.json_schema.schema",
            "'required' a list",
        ),
        (
            {"response_format": formatted(SCHEMA | {"properties": [1]})},
            "response_format.json_schema.schema",
            "'properties' must be an object",
        ),
        ({"response_format": formatted(nested(12))}, "response_format.json_schema.schema", "at most 10 levels"),
        (
            {"response_format": formatted({"type": "object", "not": {}}, strict=False)},
            "response_format.json_schema.schema",
            "not",
        ),
        (
            {"response_format": formatted({"type": "object", "x-guidance": {"item_separator": ";"}}, strict=False)},
            "response_format.json_schema.schema",
            "a setting of the matcher",
        ),
        (
            {"structured_outputs": {"json": '{"items": {"x\\u002dguidance": {}}}'}},
            "structured_outputs",
            "a setting of the matcher",
        ),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "comes back to itself"),
        (
            {"response_format": formatted({"properties": {"a": {"$ref": "#/properties/a"}}}, strict=False)},
            "response_format.json_schema.schema",
            "comes back to itself",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "nothing is given"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both given",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(client, demo_served, form, param, said):
    with pytest.raises(BadRequestError) as error:
        complete(client, **form)
    assert error.value.body["param"].startswith(param)
    assert said in error.value.body["message"]
    demo_served.wait_until_idle()


def test_a_form_beside_ignore_eos_is_refused(demo_served):
    body = {"model": "demo", "prompt": PROMPT, "structured_outputs": {"regex": "a"}, "ignore_eos": True}
    answer = httpx.post(f"{demo_served.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ignore_eos")


def test_a_prompt_that_was_read_is_not_read_again(client):
    long = PROMPT * 3

    def cached(**parameters):
        extra = {name: parameters.pop(name) for name in ("cache_salt", "speculative") if name in parameters}
        answer = client.completions.create(
            model="demo", prompt=long, max_tokens=4, temperature=0, extra_body=extra, **parameters
        )
        return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens, answer.choices[0].text

    first, again = cached(cache_salt="one"), cached(cache_salt="one")
    assert first[0] == 0
    assert again == (first[1] - 1, first[1], first[2])
    assert cached(cache_salt="two")[0] == 0
    assert cached(cache_salt="one", speculative={"remember": False})[0] == 0
    assert cached(cache_salt="three", n=3)[0] == 0  # one of the three reads it


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup", "self", "auto"])
@pytest.mark.parametrize("end", ["<|endoftext|>", "a<|endoftext|>b"])
def test_the_name_of_a_special_token_is_spelled(client, end, drafter):
    """It neither ends the text nor is left out of it."""
    schema = {"type": "object", "properties": {end: {"const": end}}, "required": [end], "additionalProperties": False}
    forms = {
        end: {"choice": [end]},
        f'{{"{end}":"{end}"}}': {"json": schema},
        f"({end})": {"regex": rf"\({end.replace('|', '[|]')}\)"},
        f"{end}!": {"grammar": f'start: "{end}" "!"'},
    }
    for text, form in forms.items():
        answer = complete(client, temperature=0, structured_outputs=form, speculative={"drafter": drafter})
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")


def test_a_grammar_that_names_the_end_of_the_text_is_refused(client):
    for name in ("<|endoftext|>", "<[0]>"):
        with pytest.raises(BadRequestError, match="names a token that ends the text"):
            complete(client, structured_outputs={"grammar": f'start: "x" {name} "y"'})


def test_a_key_of_the_matcher_as_a_name_is_data(client):
    properties = {"x-guidance": {"type": "null"}, "y": {"const": {"x-guidance": {"item_separator": ";"}}}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    (choice,) = complete(client, temperature=0, structured_outputs={"json": schema}).choices
    assert json.loads(choice.text) == {"x-guidance": None, "y": {"x-guidance": {"item_separator": ";"}}}

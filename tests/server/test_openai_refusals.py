"""What is refused, with which status, code and parameter; and that the official client raises its typed errors."""

import json
import sys

import httpx
import openai
import pytest
from pydantic import ValidationError

from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import _read_tool_call
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.parsing import parse_body
from specexport_runtime.server.protocol import CalledFunction, ChatRequest, CompletionRequest, ToolCall
from tests.support.cases.patience import HANG_S
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served, fake_engine

MESSAGES = [{"role": "user", "content": "w1"}]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LEAST = {COMPLETIONS: {"prompt": "w1"}, CHAT: {"messages": MESSAGES}, RESPONSES: {"input": "w1"}}

IN_BOTH = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"": 1}, "", "unknown_parameter"),
    ({"speculative": {"k": 1}}, "speculative.k", "unknown_parameter"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"min_tokens": 3}, "min_tokens", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 400}, "max_tokens", "context_length_exceeded"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": 10**400}, "temperature", "invalid_type"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 17}, "n", "limit_exceeded"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", None),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "a" * 257}, "stop", "invalid_value"),
    ({"stop_token_ids": [17]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 1.0}, "seed", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"17": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"speculative": 5}, "speculative", "invalid_type"),
    ({"speculative": {"num_speculative_tokens": 0}}, "speculative.num_speculative_tokens", "invalid_value"),
    ({"speculative": {"num_speculative_tokens": 9}}, "speculative", "invalid_value"),
    ({"speculative": {"num_speculative_tokens": "auto"}}, "speculative", "invalid_value"),
    ({"speculative": {"tree_size": 64}}, "speculative.tree_size", "invalid_value"),
    ({"speculative": {"tree_size": 8}}, "speculative", "invalid_value"),  # its target takes none
    ({"speculative": {"drafter": "oracle"}}, "speculative.drafter", "invalid_value"),
    ({"speculative": {"drafter": "self"}}, "speculative", "invalid_value"),
    ({"speculative": {"drafter": "none", "num_speculative_tokens": 2}}, "speculative", "invalid_value"),
    ({"speculative": {"drafter": "draft-model", "reference": "w1"}}, "speculative", "invalid_value"),
    ({"speculative": {"reference": "w1 " * 401}}, "speculative.reference", "limit_exceeded"),
    ({"speculative": {"acceptance": "blok"}}, "speculative.acceptance", "invalid_value"),
    ({"speculative": {"token_origins": "yes"}}, "speculative.token_origins", "invalid_type"),
]
IN_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": " "}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["w1", 1]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [17]}, "prompt", "invalid_value"),
    ({"prompt": [17], "echo": True}, "prompt", "invalid_value"),
    ({"prompt": ["w1"] * 33}, "prompt", "limit_exceeded"),
    ({"prompt": ["w1"] * 32, "n": 16}, "n", "limit_exceeded"),
    ({"prompt": [1] * 400}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 399, "max_tokens": 2}, "max_tokens", "context_length_exceeded"),
    ({"suffix": "w1"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"best_of": 1, "n": 2}, "best_of", "unsupported_parameter"),
    ({"echo": True, "logprobs": 0, "stream": True}, "echo", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"messages": MESSAGES}, "messages", "unknown_parameter"),
]
W1 = {"type": "content", "content": "w1"}
IN_CHAT = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "w1"}, "messages", "invalid_type"),
    ({"messages": [{"role": "judge", "content": "w1"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "w1", "x": 1}]}, "messages[0].x", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "w1 " * 400}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages", "invalid_value"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "invalid_value"),  # tokens that are words
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"continue_final_message": True}, "messages[0]", "invalid_value"),
    ({"thinking_token_budget": 9}, "thinking_token_budget", "unsupported_parameter"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "invalid_value"),
    ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
    ({"prediction": W1, "speculative": {"reference": "w1"}}, "prediction", "invalid_value"),
    ({"prediction": W1, "speculative": {"drafter": "none"}}, "speculative", "invalid_value"),
    ({"prediction": W1 | {"content": "w1 " * 401}}, "prediction", "limit_exceeded"),
    ({"prompt": "w1"}, "prompt", "unknown_parameter"),
]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON | {"required": ["name"]}}
IN_RESPONSES = [
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "w1"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user", "content": "w1", "x": 1}]}, "input[0].x", "unknown_parameter"),
    ({"input": [{"role": "user", "content": "w1"}, {"type": "item_reference", "id": "a"}]}, "input[1].type", None),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", None),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]}, "input[0].content[0].type", None),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "unsupported_parameter"),  # by the chat template
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing_required_parameter"),
    ({"text": {"format": FORMAT | {"name": "a b"}}}, "text.format.name", "invalid_value"),
    ({"text": {"format": FORMAT | {"schema": {"type": "string"}}}}, "text.format.schema", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unknown_parameter"),
    ({"include": ["file_search_call.results"]}, "include[0]", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
    ({"metadata": {"a" * 65: "x"}}, "metadata." + "a" * 65, "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", None),
]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
TEXT = {"type": "text", "text": "w1"}


def said(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}
OF_CLIENTS = [
    *((path, {"service_tier": "flex"}, "service_tier") for path in LEAST),
    *((path, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex") for path in LEAST),
    (COMPLETIONS, {"response_format": {}}, "response_format.type"),
    (CHAT, {"response_format": FORM}, "response_format.json_schema.schema"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"reasoning_effort": "little"}, "reasoning_effort"),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "w1"}}]}, "messages[0].content"),
    (CHAT, said("w1"), "messages[0].content[0]"),
    (CHAT, said({"text": "w1"}), "messages[0].content[0].type"),
    (CHAT, said({"type": "text"}), "messages[0].content[0].text"),
    (CHAT, said(TEXT | {"text": 5}), "messages[0].content[0].text"),
    (CHAT, said(TEXT, {"type": "image_url", "image_url": {"url": "data:,"}}), "messages[0].content[1].type"),
    (CHAT, said(TEXT | {"image_url": "x"}), "messages[0].content[0].image_url"),
    (CHAT, {"messages": [CALLS]}, "messages[0].tool_calls[0].function.arguments"),
    (CHAT, {"prediction": {"type": "content", "content": [TEXT | {"text": 5}]}}, "prediction.content[0].text"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
    (CHAT, {"tool_choice": 5}, "tool_choice"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (RESPONSES, {"text": {"format": {}}}, "text.format.type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
]
CASES = [
    *((path, *case) for path, cases in (
        (COMPLETIONS, IN_BOTH + IN_COMPLETIONS), (CHAT, IN_BOTH + IN_CHAT), (RESPONSES, IN_RESPONSES)
    ) for case in cases),
    *((*case, None) for case in OF_CLIENTS),
]  # fmt: skip
BODIES = {
    "empty": (b"", "invalid_json"),
    "no object": (b"[]", "invalid_json"),
    "not UTF-8": (b'{"prompt": "\xff"}', "invalid_json"),
    "NaN": (b'{"prompt": "w1", "temperature": NaN}', "invalid_json"),
    "overflow": (b'{"prompt": "w1", "temperature": 1e999}', "invalid_value"),
    "digits": (b'{"prompt": "w1", "seed": ' + b"1" * 5000 + b"}", "invalid_json"),
    "deep lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    "not quite as deep": (b'{"prompt": ' + b"[" * 500 + b'"\\ud800"' + b"]" * 500 + b"}", "invalid_unicode"),
    "twice": (b'{"prompt": "w1", "prompt": "w2"}', "duplicate_key"),
    "twice within": (b'{"prompt": "w1", "speculative": {"drafter": "none", "drafter": "self"}}', "duplicate_key"),
    "surrogate": (b'{"prompt": "w1 \\ud800"}', "invalid_unicode"),
    "surrogate in a key within": (b'{"prompt": "w1", "logit_bias": {"\\udfff": 1}}', "invalid_unicode"),
    "thousands of keys": (b"{" + b",".join(b'"k%d": 1' % i for i in range(8193)) + b"}", "invalid_json"),
    "thousands of objects": (b'{"prompt": "w1", "metadata": [' + b"{}," * 2**14 + b"{}]}", "invalid_json"),
    "thousands of lists": (b'{"prompt": "w1", "metadata": [' + b"[]," * 2**14 + b"[]]}", "invalid_json"),
}


def refusal(answer, status=400):
    """The error of an answer; its form is OpenAI's."""
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 400
    assert not error["message"][0].islower(), error
    assert error["message"].endswith("."), error
    return error


@pytest.fixture(scope="module")
def http(fake_served):
    with httpx.Client(base_url=fake_served.url, timeout=HANG_S) as http:
        yield http
    fake_served.wait_until_idle()


def test_brackets_in_texts_are_no_objects():
    body = {"prompt": '[{"' * 20_000 + "\\", "metadata": {"a": [{}, "\\"]}}
    assert parse_body(json.dumps(body).encode(), CompletionRequest).prompt == body["prompt"]


def test_depth_is_refused_whatever_the_recursion_limit():
    """From Python 3.12 on the parser of JSON has a limit of its own, ten times that of what reads its values."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for depth in (513, 3000):
            for begin, end in ((b"[", b"]"), (b'{"a":', b"}")):
                deep = begin * depth + b'"\\u0041"' + end * depth
                with pytest.raises(ApiError, match="nested too deeply"):
                    parse_body(b'{"prompt": "w1", "metadata": ' + deep + b"}", CompletionRequest)
                call = CalledFunction(name="f", arguments='{"a": ' + deep.decode() + "}")
                with pytest.raises(ApiError, match="nested too deeply"):
                    _read_tool_call(ToolCall(id="1", type="function", function=call), "x")
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(("path", "body", "param", "code"), CASES, ids=lambda v: str(v)[:60])
def test_a_parameter_is_refused(http, path, body, param, code):
    whole = LEAST[path] | body
    error = refusal(http.post(path, content=json.dumps(whole), headers={"content-type": "application/json"}))
    assert error["param"] == param
    assert error["code"] == (code or error["code"])
    assert (param if code is None else str(param).split(".")[0].split("[")[0]) in error["message"]
    assert "Input tag" not in error["message"]
    for name in ("messages", "response_format", "max_completion_tokens") if path == RESPONSES else ():
        assert name in body or name not in error["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"foo": 1}, "There is no parameter foo."),
        (
            {"foo": 1, "logit_bias": 3, "speculative": {"k": 1}, "bar": 2},
            "There are no parameters speculative.k, foo, bar.",
        ),
        ({f"p{i}": 1 for i in range(9)}, f"There are no parameters {', '.join(f'p{i}' for i in range(8))} and 1 more."),
    ],
)
def test_all_unknown_parameters_are_named(http, body, said):
    error = refusal(http.post(COMPLETIONS, json={"prompt": "w1"} | body))
    assert error["message"] == said
    assert error["param"] == next(name for name in body if name in said and name != "speculative")


@pytest.mark.parametrize(
    ("param", "message", "said"),
    [
        (None, "there is nothing at '/x'.", "There is nothing at '/x'."),
        ("n", "no answer", "No answer."),
        ("n", "n is 0.", "Parameter n is 0."),
        ("messages[0]", "messages[0] is empty.", "Parameter messages[0] is empty."),
        ("stop", "What is it?", "What is it?"),
    ],
)
def test_messages_are_sentences(param, message, said):
    assert ApiError(400, message, param=param).body()["error"]["message"] == said


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_refused(http, path, name):
    body, code = BODIES[name]
    if path == CHAT:
        body = body.replace(b'"prompt": "w1"', b'"messages": [{"role": "user", "content": "w1"}]')
    error = refusal(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert path == CHAT or error["code"] == code
    assert error["code"] in {code, "unknown_parameter"}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [[]] * 1000}),
        (CompletionRequest, {"prompt": [1] * 1000 + [True] * 1000}),
        (CompletionRequest, {"prompt": "w1", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "w1", "stop_token_ids": ["1"] * 1000}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatRequest, {"messages": MESSAGES, "tools": [{}] * 1000}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_wrong_is_not_looked_for_to_the_end(model, body):
    with pytest.raises(ValidationError) as error:  # a megabyte of it would keep everybody waiting for seconds
        model.model_validate(body)
    assert error.value.error_count() < 10


def test_the_official_client_raises_its_own_errors(fake_served):
    with client_of(fake_served) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="fake", prompt="w1", extra_body={"foo": 1})
        assert (bad.value.code, bad.value.param) == ("unknown_parameter", "foo")
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt", messages=MESSAGES)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="fake", prompt="w1 " * 400, stream=True)


def test_limits_of_the_server():
    config = ServerConfig(model_name="small", max_prompts=2, max_n=2, max_prompt_tokens=5, max_tokens=7, max_waiting=0)
    with Served(lambda: fake_engine(3), config) as served, httpx.Client(base_url=served.url, timeout=HANG_S) as http:
        for body, param, limit in [
            ({"prompt": ["w1"] * 3}, "prompt", "2"),
            ({"prompt": "w1", "n": 3}, "n", "2"),
            ({"prompt": "w1 " * 6}, "prompt", "5"),
            ({"prompt": "w1", "max_tokens": 8}, "max_tokens", "7"),
            ({"prompt": ["w1"] * 2, "n": 2}, "n", "4"),  # four rows are never free
        ]:
            error = refusal(http.post(COMPLETIONS, json=body))
            assert (error["param"], error["code"]) == (param, "limit_exceeded")
            assert limit in error["message"]
        assert (
            refusal(http.post(CHAT, json={"messages": [{"role": "user", "content": "w1 " * 6}]}))["param"] == "messages"
        )
        assert http.post(COMPLETIONS, json={"prompt": "w1"}).json()["usage"]["completion_tokens"] == 7
        assert http.post(CHAT, json={"messages": MESSAGES}).json()["usage"]["completion_tokens"] == 7
        served.wait_until_idle()


def test_what_is_taken_and_refused_is_in_openapi(http):
    paths = http.get("/openapi.json").json()["paths"]
    for path, needed in ((COMPLETIONS, "prompt"), (CHAT, "messages"), (RESPONSES, "input")):
        missing = refusal(http.post(path, json={}))
        assert (missing["param"], missing["code"]) == (needed, "missing_required_parameter")
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == [needed]
        assert schema["additionalProperties"] is False
        assert "$ref" not in json.dumps(schema)
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert {"400", "404", "429", "500", "503", "504"} <= set(paths[path]["post"]["responses"])

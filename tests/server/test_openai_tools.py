"""Calls of functions and thinking with the official client: every format, whole and streamed."""

import contextlib
import json

import httpx
import pytest
from openai import BadRequestError, LengthFinishReasonError, pydantic_function_tool
from pydantic import BaseModel

from specexport_runtime.server.answer_schema import ChatAnswer
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.fakes.chat_fakes import MARKERS, PLAIN, TEMPLATES, THINKS, echo_engine
from tests.support.servers.odd_bodies import check_odd_bodies
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served

llguidance = pytest.importorskip("llguidance")


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}, TOOLS[1]]
ARGUMENTS = '{"city": "Paris", "days": 3}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "mistral named": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "json": f'{{"name": "weather", "arguments": {ARGUMENTS}}}',
}
TWO = {
    "hermes": f"{CALLS['hermes']}\n" + '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "mistral": CALLS["mistral"].removesuffix("]") + ', {"name": "stop", "arguments": {}}]',
    "mistral named": f"{CALLS['mistral named']}[TOOL_CALLS]stop[ARGS]{{}}",
    "json": f'[{CALLS["json"]}, {{"name": "stop", "arguments": {{}}}}]',
}
SERVERS = {
    **{name: (template, MARKERS, {}) for name, template in TEMPLATES.items()},
    "json": (PLAIN, (), {"tool_call_parser": "json"}),
    "text markers": (TEMPLATES["hermes"], (), {}),
    "plain": (PLAIN, (), {}),
    "thinks": (THINKS, MARKERS, {}),
}


@pytest.fixture(scope="module")
def clients():
    """The clients of servers, each of which begins when it is first asked for; and the servers."""
    with contextlib.ExitStack() as stack:
        known = {}

        def client(name):
            if name not in known:
                template, markers, config = SERVERS[name]
                served = Served(lambda: echo_engine(template, *markers), ServerConfig(model_name="echo", **config))
                stack.enter_context(served)
                known[name] = stack.enter_context(client_of(served)), served
            return known[name][0]

        client.served = lambda name: (client(name), known[name][1])[1]
        yield client
        for _, served in known.values():
            served.wait_until_idle()


def said(client, answer, **more):
    """The choice that says ``answer``; greedy."""
    more = {"tools": TOOLS, "temperature": 0, "max_tokens": 300} | more
    messages = more.pop("messages", [{"role": "user", "content": answer}])
    return client.chat.completions.create(model="echo", messages=messages, **more)


def streamed(client, answer, **more):
    """The same choice out of a stream: message, calls and why it ended; every delta is checked."""
    content, reasoning, calls, finish = "", "", [], None
    for chunk in said(client, answer, stream=True, **more):
        (choice,) = chunk.choices
        assert finish is None
        delta, finish = choice.delta, choice.finish_reason
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                assert (call.type, call.function.arguments) == ("function", "")
                calls.append([call.function.name, "", call.id])
            else:
                assert call.index == len(calls) - 1
                assert call.function.arguments
                calls[-1][1] += call.function.arguments
    return content, reasoning, [call[:2] for call in calls], finish


def parts(choice):
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason


ONE_CALL = [["weather", ARGUMENTS]]
TWO_CALLS = [["weather", ARGUMENTS], ["stop", "{}"]]


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["loose", "strict"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_whole_and_streamed(clients, name, tools, drafter):
    more = {"tools": tools, "extra_body": {"speculative": {"drafter": drafter}}}
    choice = said(clients(name), CALLS[name], **more).choices[0]
    assert parts(choice) == ("", "", ONE_CALL, "tool_calls")
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert streamed(clients(name), CALLS[name], **more) == ("", "", ONE_CALL, "tool_calls")


@pytest.mark.parametrize("name", [*CALLS, "text markers"])
def test_an_answer_without_calls_is_text(clients, name):
    for text in ("Hello.\n\n", "", "{1: [2}]", "a <tool_", "[TOOL"):
        for tools in (TOOLS, STRICT):
            choice = said(clients(name), text, tools=tools).choices[0]
            assert parts(choice) == (text, "", [], "stop"), text
            assert choice.message.content == text
            assert streamed(clients(name), text, tools=tools) == (text, "", [], "stop")


@pytest.mark.parametrize("name", TWO)
def test_parallel_calls(clients, name):
    client = clients(name)
    for choice in ("auto", "required"):
        assert parts(said(client, TWO[name], tool_choice=choice).choices[0])[2] == TWO_CALLS
        assert streamed(client, TWO[name], tool_choice=choice)[2] == TWO_CALLS
        single = said(client, TWO[name], tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert len(single.message.tool_calls) == 1
        assert len(streamed(client, TWO[name], tool_choice=choice, parallel_tool_calls=False)[2]) == 1


@pytest.mark.parametrize("name", [*CALLS, "text markers"])
def test_a_required_call_comes_whatever_the_model_wants(clients, name):
    client = clients(name)
    for choice, names in (
        ("required", {"weather", "stop"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "stop"}}, {"stop"}),
    ):
        more = {"tool_choice": choice, "parallel_tool_calls": False}
        content, _, calls, finish = parts(said(client, "Hello", **more).choices[0])
        assert (content, finish) == ("", "tool_calls")
        assert {call[0] for call in calls} <= names
        for called, arguments in calls:
            found = json.loads(arguments)
            if called == "weather":
                assert list(found) == ["city", "days"]
                assert len(found["city"]) <= 9 and found["days"] <= 9  # noqa: PT018
            else:
                assert found == {}
        assert streamed(client, "Hello", **more)[2] == calls


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral named", "text markers"])
def test_from_the_marker_on_strict_arguments_follow_their_schema(clients, name):
    """The model wants another type, in the middle of its answer; without strict it gets its way."""
    client = clients(name)
    wanted = "Well.\n" + CALLS["hermes" if name == "text markers" else name].replace('"Paris"', "12345")
    content, _, calls, _ = parts(said(client, wanted, tools=STRICT).choices[0])
    assert content == "Well."
    assert isinstance(json.loads(calls[0][1])["city"], str)
    loose = parts(said(client, wanted).choices[0])
    assert loose == ("Well.", "", [["weather", ARGUMENTS.replace('"Paris"', "12345")]], "tool_calls")


def test_none_calls_nothing(clients):
    """A marker that is a token is not written; one that is text is text."""
    text = f"Well. {CALLS['hermes']}"
    content, _, calls, finish = parts(said(clients("hermes"), text, tool_choice="none").choices[0])
    assert (calls, finish) == ([], "stop")
    assert "<tool_call>" not in content
    plain = said(clients("text markers"), text, tool_choice="none").choices[0]
    assert parts(plain) == (text, "", [], "stop")
    assert said(clients("hermes"), "Hi", tools=[], tool_choice="none").choices[0].message.content == "Hi"


@pytest.mark.parametrize("name", ["hermes", "text markers"])
def test_a_malformed_call_is_text_and_never_an_error(clients, name):
    for broken in ('{"name": "other", "arguments": {}}', '{"name": "weather"', "no JSON", ""):
        text = f"Well. <tool_call>{broken}</tool_call>"
        assert parts(said(clients(name), text).choices[0]) == (text, "", [], "stop")
        assert streamed(clients(name), text) == (text, "", [], "stop")
    half = 'Well.<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'
    assert parts(said(clients(name), half).choices[0]) == (half.removesuffix("</tool_call>"), "", [], "stop") or (
        parts(said(clients(name), half).choices[0])[0] == half
    )
    assert streamed(clients(name), half)[2] == [["weather", '{"city": }']]  # what was sent stays sent


def test_a_call_that_is_cut_off_is_given_as_far_as_it_goes(clients):
    cut = said(clients("hermes"), CALLS["hermes"], max_tokens=50).choices[0]
    assert cut.finish_reason == "length"
    (call,) = cut.message.tool_calls
    assert ARGUMENTS.startswith(call.function.arguments)
    assert streamed(clients("hermes"), CALLS["hermes"], max_tokens=50)[2] == [["weather", call.function.arguments]]


def test_choices_usage_stops_and_log_probabilities(clients):
    client, text = clients("hermes"), f"Well.\n{CALLS['hermes']}"
    answer = said(client, text, n=3, logprobs=True, top_logprobs=1, seed=1, temperature=1)
    assert [parts(choice) for choice in answer.choices] == [("Well.", "", ONE_CALL, "tool_calls")] * 3
    tokens = [token.token for token in answer.choices[0].logprobs.content]
    assert "".join(tokens).removesuffix("<|end|>") == text
    assert answer.usage.completion_tokens == 3 * len(tokens)
    chunks = list(said(client, text, logprobs=True, stream=True, stream_options={"include_usage": True}))
    told = [token.token for chunk in chunks[:-1] for token in (chunk.choices[0].logprobs or NoTokens).content]
    assert told == tokens
    assert chunks[-1].usage.completion_tokens == len(tokens)
    stopped = said(client, text, stop=["Par"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.tool_calls is None  # half a call
    assert "Well." in stopped.message.content


class NoTokens:
    content = ()


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral named", "json"])
def test_a_conversation_goes_on(clients, name):
    """The answer of the client's own model is sent back, with what the function returned."""
    client = clients(name)
    first = said(client, CALLS[name]).choices[0].message
    messages = [
        {"role": "user", "content": CALLS[name]},
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [{"type": "text", "text": "rain"}]},
        {"role": "user", "content": "It rains."},
    ]
    again = said(client, "", messages=messages)
    assert again.choices[0].message.content == "It rains."
    body = {"messages": [message if isinstance(message, dict) else message.model_dump() for message in messages]}
    served = clients.served(name)
    tokens = patience.post(f"{served.url}/tokenize", json=body | {"tools": TOOLS}).json()["tokens"]
    text = served.engine.engine.tokenizer.decode(tokens, skip_special_tokens=False)
    assert ARGUMENTS in text
    assert "rain" in text
    assert again.usage.prompt_tokens == len(tokens)


def test_the_client_s_own_parser_and_stream(clients):
    client, tool = clients("hermes"), pydantic_function_tool(Weather, name="weather")
    messages = [{"role": "user", "content": CALLS["hermes"]}]
    common = {"model": "echo", "messages": messages, "tools": [tool], "temperature": 0, "max_tokens": 300}
    parsed = client.chat.completions.parse(**common).choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=3)
    with client.chat.completions.stream(**common) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.message.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=3)
    assert final.finish_reason == "tool_calls"
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**common | {"max_tokens": 45})
    # what it parsed can be sent back
    back = [*messages, parsed, {"role": "tool", "tool_call_id": parsed.tool_calls[0].id, "content": "rain"}]
    assert client.chat.completions.parse(**common | {"messages": [*back, messages[0]]}).choices[0].message.tool_calls


def test_answers_are_as_openapi_says(clients):
    body = {"messages": [{"role": "user", "content": f"Well.{CALLS['hermes']}"}], "tools": TOOLS, "temperature": 0}
    for name, choice in (("hermes", "auto"), ("thinks", "required")):
        answer = patience.post(f"{clients.served(name).url}/v1/chat/completions", json=body | {"tool_choice": choice})
        assert ChatAnswer.model_validate_json(answer.content).choices[0].message.tool_calls


THOUGHT = "<think>\nhm, {let me see}\n</think>\n\n"
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_thinking_is_told_apart(clients, force, drafter):
    client = clients("thinks")
    extra = {"speculative": {"drafter": drafter}, "chat_template_kwargs": {"force_thinking": force}}
    for text, content, calls, finish in (
        ("Hello\n", "Hello\n", [], "stop"),
        (CALLS["hermes"], "", ONE_CALL, "tool_calls"),
        (f"So.\n{TWO['hermes']}", "So.", TWO_CALLS, "tool_calls"),
    ):
        wanted = (content, "hm, {let me see}", calls, finish)
        for tools in (TOOLS, STRICT):
            choice = said(client, THOUGHT + text, tools=tools, extra_body=extra).choices[0]
            assert parts(choice) == wanted
            assert choice.message.reasoning == choice.message.reasoning_content
            assert streamed(client, THOUGHT + text, tools=tools, extra_body=extra) == wanted
    cut = said(client, THOUGHT, max_tokens=9, extra_body=extra).choices[0]
    assert (cut.message.content, cut.finish_reason) == (None, "length")
    assert "hm, {let me see}".startswith(cut.message.reasoning_content)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_forms_begin_where_the_thinking_ends(clients, force, drafter):
    client = clients("thinks")
    extra = {"speculative": {"drafter": drafter}, "chat_template_kwargs": {"force_thinking": force}}
    answer = ARGUMENTS.replace(" ", "")
    common = {"extra_body": extra, "response_format": FORM, "tools": []}
    wanted = (answer, "hm, {let me see}", [], "stop")
    assert parts(said(client, THOUGHT + answer, **common).choices[0]) == wanted
    assert streamed(client, THOUGHT + answer, **common) == wanted
    content, thought, _, _ = parts(said(client, THOUGHT + "no JSON at all", **common).choices[0])
    assert (list(json.loads(content)), thought) == (["city", "days"], "hm, {let me see}")
    required = parts(said(client, THOUGHT + "Hello", tool_choice="required", extra_body=extra).choices[0])
    assert required[1:2] + required[3:] == ("hm, {let me see}", "tool_calls")


def test_a_model_may_answer_without_thinking(clients):
    client, answer = clients("thinks"), ARGUMENTS.replace(" ", "")
    assert parts(said(client, answer, response_format=FORM, tools=[]).choices[0]) == (answer, "", [], "stop")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    not_thought = "<think>\n\n</think>\n\n"  # by the template
    chosen = said(client, not_thought + answer, response_format=FORM, tools=[], extra_body=off).choices[0]
    assert parts(chosen) == (answer, "", [], "stop")
    assert not hasattr(chosen.message, "reasoning_content")


def test_tools_beside_a_form(clients):
    """The answer is a call or has the form, whatever the model wants."""
    client, answer = clients("hermes"), ARGUMENTS.replace(" ", "")
    assert parts(said(client, answer, response_format=FORM).choices[0]) == (answer, "", [], "stop")
    assert parts(said(client, CALLS["hermes"], response_format=FORM).choices[0])[2] == ONE_CALL
    content, _, calls, _ = parts(said(client, "Hello", response_format=FORM).choices[0])
    assert calls or list(json.loads(content)) == ["city", "days"]


def test_what_was_thought_goes_back_to_the_template(clients):
    served = clients.served("thinks")
    call = {"id": "a", "type": "function", "function": {"name": "stop", "arguments": ""}}
    for key in ("reasoning_content", "reasoning"):
        messages = [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": None, key: "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "done"},
        ]
        tokens = patience.post(f"{served.url}/tokenize", json={"messages": messages}).json()["tokens"]
        assert "<think>\nhm\n</think>" in served.engine.engine.tokenizer.decode(tokens, skip_special_tokens=False)


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("name", "body", "param", "code"),
    [
        ("hermes", {"tools": [tool(), tool(name="a b")]}, "tools[1].function.name", "invalid_value"),
        ("hermes", {"tools": [tool(), tool(name="g"), tool()]}, "tools[2].function.name", "invalid_value"),
        ("hermes", {"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "invalid_value"),
        ("hermes", {"tools": [{"type": "custom"}]}, "tools[0].type", "invalid_value"),
        ("hermes", {"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ("hermes", {"tools": [tool(extra=1)]}, "tools[0].function.extra", "unknown_parameter"),
        ("hermes", {"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "invalid_value"),
        ("hermes", {"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
        ("hermes", {"tools": [tool(description="x" * 300_000)]}, "tools", "invalid_value"),
        (
            "hermes",
            {"tools": [tool(), tool(name="g", strict=True, parameters={"type": "object", "properties": {"a": {}}})]},
            "tools[1].function.parameters",
            "invalid_value",
        ),
        (
            "hermes",
            {"tools": [tool(), tool(name="g", parameters={"not": {}})], "tool_choice": "required"},
            "tools[1].function.parameters",
            "invalid_value",
        ),
        ("hermes", {"tools": [tool()], "tool_choice": "some"}, "tool_choice", "invalid_value"),
        ("hermes", {"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function", None),
        ("hermes", {"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            "hermes",
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        (
            "hermes",
            {"tools": [tool()], "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
        ("hermes", {"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ("plain", {"tools": [tool()]}, "tools", "unsupported_parameter"),
        ("hermes", {"functions": [{}]}, "functions", "unsupported_parameter"),
        ("hermes", {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs", "invalid_value"),
        ("thinks", {"chat_template_kwargs": {"enable_thinking": "x" * 5000}}, "chat_template_kwargs", "invalid_value"),
        ("thinks", {"chat_template_kwargs": 5}, "chat_template_kwargs", "invalid_type"),
        ("hermes", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", None),
        (
            "hermes",
            {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
            "messages[1].tool_call_id",
            "invalid_value",
        ),
        ("hermes", {"messages": [USER | {"tool_call_id": "a"}]}, "messages[0].tool_call_id", "invalid_value"),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {}}}}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        ("hermes", {"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls", "invalid_value"),
        ("hermes", {"messages": [USER | {"reasoning": "x"}]}, "messages[0].reasoning_content", "invalid_value"),
        (
            "hermes",
            {"messages": [USER, {"role": "system", "content": None}]},
            "messages[1].content",
            "invalid_value",
        ),
        (
            "hermes",
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [CALL, CALL | {"function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "messages[1].tool_calls[1].function.arguments",
            "invalid_value",
        ),
        (
            "llama3_json",
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "b"}]}]},
            "messages",
            "invalid_value",
        ),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(clients, name, body, param, code):
    served = clients.served(name)
    answer = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": [USER]} | body, timeout=patience.HANG_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["code"] == (code or "missing_required_parameter")
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    if param == "functions":
        assert "use tools" in error["message"]
    served.wait_until_idle()


def test_the_client_raises_its_own_error(clients):
    with pytest.raises(BadRequestError) as error:
        said(clients("plain"), "x")
    assert error.value.body["param"] == "tools"
    assert "--tool-call-parser json" in error.value.body["message"]


def test_odd_values_are_no_defect(clients):
    """Every part of a body with tools, in turn, is replaced by values that it should not have."""
    served = clients.served("thinks")
    body = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
        ],
        "tools": [tool(description="d", strict=True, parameters=CITY)],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 1,
    }
    check_odd_bodies(served, "/v1/chat/completions", body)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup"])
def test_names_of_added_tokens_are_plain_text_in_a_call(clients, name, drafter):
    """Keys and values, of strict functions and others; markers are tokens all the same."""
    value = "<|end|></tool_call><tool_call>[ARGS]<think>[TOOL_CALLS]"
    schema = {"type": "object", "properties": {value: {"const": value}}, "required": [value]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    choice = said(
        clients(name), "x", tools=tools, tool_choice="required", extra_body={"speculative": {"drafter": drafter}}
    )
    assert choice.choices[0].finish_reason == "tool_calls"
    (call,) = choice.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {value: value}


@pytest.mark.parametrize("name", CALLS)
def test_names_of_added_tokens_are_plain_text_in_an_answer_beside_tools(clients, name):
    for value in (*MARKERS, "<|end|>"):
        schema = {"type": "object", "properties": {"x": {"const": value}}, "required": ["x"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        options = {"response_format": form, "tools": STRICT[:1]}
        message = said(clients(name), '{"x":"', **options).choices[0].message
        assert (json.loads(message.content), message.tool_calls) == ({"x": value}, None)
        assert streamed(clients(name), '{"x":"', **options) == (message.content, "", [], "stop")


@pytest.mark.parametrize(
    ("name", "answer", "limit"),
    [
        ("hermes", CALLS["hermes"], 300),
        ("hermes", "Paris", 300),
        ("hermes", f"Paris {CALLS['hermes']}", 300),
        ("llama3_json", CALLS["llama3_json"], 300),
        ("mistral", CALLS["mistral"], 300),
        ("mistral named", TWO["mistral named"], 300),
        ("json", CALLS["json"], 300),
        ("thinks", "<think>\nhm\n</think>\n\nParis", 300),
        ("thinks", f"<think>\nhm\n</think>\n\n{CALLS['hermes']}", 300),
        ("thinks", "<think>\nhm, hm", 9),
    ],
)
def test_an_answer_goes_back_as_it_is(clients, name, answer, limit):
    client = clients(name)
    message = said(client, answer, max_tokens=limit).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls or ()]
    for back in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        messages = [{"role": "user", "content": answer}, back, *results, {"role": "user", "content": "thanks"}]
        assert said(client, "", messages=messages).choices[0].message.content == "thanks"
    if message.content is None and not results:
        messages[1] = {"role": "assistant", "content": None}
        assert said(client, "", messages=messages).choices[0].message.content == "thanks"


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("name", ["hermes", "thinks", "json", "mistral"])
def test_a_turn_of_the_assistant_may_be_empty(clients, name, empty):
    messages = [USER, {"role": "assistant", **empty}, {"role": "user", "content": "thanks"}]
    assert said(clients(name), "", messages=messages, tools=TOOLS).choices[0].message.content == "thanks"


def test_all_parts_of_a_message_are_read_and_others_named(clients):
    kinds = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    parts = [*kinds, {"type": "refusal", "refusal": "refusal"}]
    messages = [{"role": "user", "content": parts}]
    got = said(clients("plain"), "", messages=messages, tools=()).choices[0].message.content
    assert got == "textinput_textoutput_textrefusal"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio", "input_audio": {}}):
        with pytest.raises(BadRequestError) as caught:
            said(clients("plain"), "", messages=[{"role": "user", "content": [kinds[0], part]}], tools=())
        assert caught.value.param == "messages[0].content[1].type"

"""Calls of functions and thinking with the official client: every format, whole and streamed."""

import json

import pytest
from openai import BadRequestError, LengthFinishReasonError, pydantic_function_tool

from specexport_runtime.intake.tool_formats.families import FORMATS
from tests.support.cases import patience
from tests.support.fakes.chat_fakes import MARKERS
from tests.support.servers.odd_bodies import check_odd_bodies
from tests.support.servers.tool_servers import ARGUMENTS, CITY, THOUGHT, Weather

llguidance = pytest.importorskip("llguidance")


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}, TOOLS[1]]
V31, K2 = (FORMATS[name].markers for name in ("deepseek_v31", "kimi_k2"))
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "mistral named": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "json": f'{{"name": "weather", "arguments": {ARGUMENTS}}}',
    "minimax": f'<tool_calls>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_calls>',
    "deepseek_v31": f"{V31[0]}{V31[2]}weather{V31[3]}{ARGUMENTS}{V31[4]}{V31[1]}",
    "kimi_k2": f"{K2[0]}{K2[2]}functions.weather:0{K2[3]}{ARGUMENTS}{K2[4]}{K2[1]}",
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
}
TAGGED = ("qwen3_coder", "glm45", "minimax_m2")  # formats in which values have tags of their own
TWO = {
    "hermes": f"{CALLS['hermes']}\n" + '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "mistral": CALLS["mistral"].removesuffix("]") + ', {"name": "stop", "arguments": {}}]',
    "mistral named": f"{CALLS['mistral named']}[TOOL_CALLS]stop[ARGS]{{}}",
    "json": f'[{CALLS["json"]}, {{"name": "stop", "arguments": {{}}}}]',
    "minimax": CALLS["minimax"].replace("</", '{"name": "stop", "arguments": {}}\n</'),
    "deepseek_v31": CALLS["deepseek_v31"].replace(V31[1], f"{V31[2]}stop{V31[3]}{{}}{V31[4]}{V31[1]}"),
    "kimi_k2": CALLS["kimi_k2"].replace(K2[1], f"{K2[2]}functions.stop:1{K2[3]}{{}}{K2[4]}{K2[1]}"),
    "qwen3_coder": f"{CALLS['qwen3_coder']}\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm45": f"{CALLS['glm45']}\n<tool_call>stop\n</tool_call>",
    "minimax_m2": CALLS["minimax_m2"].replace("</minimax", '<invoke name="stop">\n</invoke>\n</minimax'),
}


def said(client, answer, **more):
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


def answered(client, answer, **more):
    return parts(said(client, answer, **more).choices[0])


def parts(choice):
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason


ONE_CALL = [["weather", ARGUMENTS]]
TWO_CALLS = [["weather", ARGUMENTS], ["stop", "{}"]]


@pytest.mark.parametrize(("tools", "drafter"), [(TOOLS, "draft-model"), (STRICT, "none")], ids=["loose", "strict"])
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
    for text, tools in (("Hello.\n\n", TOOLS), ("{1: [2}]", STRICT), ("a <tool_", TOOLS), ("[TOOL", STRICT)):
        written = f"<|channel|>final<|message|>{text}" if name == "openai" else text
        choice = said(clients(name), written, tools=tools).choices[0]
        assert parts(choice) == (text, "", [], "stop"), text
        assert choice.message.content == text
        assert streamed(clients(name), written, tools=tools) == (text, "", [], "stop")


@pytest.mark.parametrize("name", TWO)
def test_parallel_calls(clients, name):
    client = clients(name)
    for choice in ("auto", "required"):
        assert answered(client, TWO[name], tool_choice=choice)[2] == TWO_CALLS
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
        wish = "<|channel|>commentary" if name == "openai" else "Hello"  # else it may think on and on
        content, _, calls, finish = answered(client, wish, **more)
        assert (content, finish) == ("", "tool_calls")
        assert {call[0] for call in calls} <= names
        for called, arguments in calls:
            found = json.loads(arguments)
            if called == "weather":
                assert list(found) == ["city", "days"]
                assert len(found["city"]) <= 9 and found["days"] <= 9  # noqa: PT018
            else:
                assert found == {}
        assert streamed(client, wish, **more)[2] == calls
        plain = more | {"extra_body": {"speculative": {"drafter": "none"}}}
        assert answered(client, wish, **plain)[2] == calls


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral named", "text markers"])
def test_from_the_marker_on_strict_arguments_follow_their_schema(clients, name):
    """The model wants another type, in the middle of its answer; without strict it gets its way."""
    client = clients(name)
    wanted = "Well.\n" + CALLS["hermes" if name == "text markers" else name].replace('"Paris"', "12345")
    content, _, calls, _ = answered(client, wanted, tools=STRICT)
    assert content == "Well."
    assert isinstance(json.loads(calls[0][1])["city"], str)
    assert answered(client, wanted) == ("Well.", "", [["weather", ARGUMENTS.replace('"Paris"', "12345")]], "tool_calls")


def test_none_calls_nothing(clients):
    """A marker that is a token is not written; one that is text is text."""
    text = f"Well. {CALLS['hermes']}"
    content, _, calls, finish = answered(clients("hermes"), text, tool_choice="none")
    assert (calls, finish) == ([], "stop")
    assert "<tool_call>" not in content
    assert answered(clients("text markers"), text, tool_choice="none") == (text, "", [], "stop")
    assert said(clients("hermes"), "Hi", tools=[], tool_choice="none").choices[0].message.content == "Hi"


@pytest.mark.parametrize("name", ["hermes", "text markers"])
def test_a_malformed_call_is_text_and_never_an_error(clients, name):
    for broken in ('{"name": "other", "arguments": {}}', "no JSON"):
        text = f"Well. <tool_call>{broken}</tool_call>"
        assert answered(clients(name), text) == (text, "", [], "stop")
        assert streamed(clients(name), text) == (text, "", [], "stop")
    half = 'Well.<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'
    content, *others = answered(clients(name), half)
    assert content in (half, half.removesuffix("</tool_call>"))
    assert others == ["", [], "stop"]
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
    assert "".join(tokens).removesuffix("<|eot|>") == text
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


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}


@pytest.mark.parametrize(("force", "drafter"), [(False, "none"), (True, "draft-model")])
def test_thinking_is_told_apart_and_forms_begin_behind_it(clients, force, drafter):
    client = clients("thinks")
    extra = {"speculative": {"drafter": drafter}, "chat_template_kwargs": {"force_thinking": force}}
    for text, content, calls, finish in (
        ("Hello\n", "Hello\n", [], "stop"),
        (CALLS["hermes"], "", ONE_CALL, "tool_calls"),
        (f"So.\n{TWO['hermes']}", "So.", TWO_CALLS, "tool_calls"),
    ):
        wanted = (content, "hm, {let me see}", calls, finish)
        tools = STRICT if force else TOOLS
        choice = said(client, THOUGHT + text, tools=tools, extra_body=extra).choices[0]
        assert parts(choice) == wanted
        assert choice.message.reasoning == choice.message.reasoning_content
        assert streamed(client, THOUGHT + text, tools=tools, extra_body=extra) == wanted
    cut = said(client, THOUGHT, max_tokens=9, extra_body=extra).choices[0]
    assert (cut.message.content, cut.finish_reason) == (None, "length")
    assert "hm, {let me see}".startswith(cut.message.reasoning_content)
    # forms begin where the thinking ends
    answer = ARGUMENTS.replace(" ", "")
    common = {"extra_body": extra, "response_format": FORM, "tools": []}
    wanted = (answer, "hm, {let me see}", [], "stop")
    assert answered(client, THOUGHT + answer, **common) == wanted
    assert streamed(client, THOUGHT + answer, **common) == wanted
    content, thought, _, _ = answered(client, THOUGHT + "no JSON at all", **common)
    assert (list(json.loads(content)), thought) == (["city", "days"], "hm, {let me see}")
    required = answered(client, THOUGHT + "Hello", tool_choice="required", extra_body=extra)
    assert required[1:2] + required[3:] == ("hm, {let me see}", "tool_calls")


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_channels_are_told_apart(clients, drafter):
    """gpt-oss's: with tools, without, and with a form; a marker that is a token in no text."""
    client, more = clients("openai"), {"extra_body": {"speculative": {"drafter": drafter}}}
    thought = "<|channel|>analysis<|message|>hm, {let me see}<|end|><|start|>assistant"
    said_first = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for text, tools, wanted in (
        (f"{thought}{final}Hello\n", TOOLS, ("Hello\n", "hm, {let me see}", [], "stop")),
        (f"{thought}{final}Hello", [], ("Hello", "hm, {let me see}", [], "stop")),
        (f"{final}Hello", [], ("Hello", "", [], "stop")),
        (f"{thought}{said_first}{CALLS['openai']}<|call|>", TOOLS, ("So.", "hm, {let me see}", ONE_CALL, "tool_calls")),
        (f"{thought}{said_first}{CALLS['openai']}", STRICT, ("So.", "hm, {let me see}", ONE_CALL, "tool_calls")),
    ):
        assert answered(client, text, tools=tools, **more) == wanted
        assert streamed(client, text, tools=tools, **more) == wanted
    answer = ARGUMENTS.replace(" ", "")
    for tools in ([], TOOLS):
        form = {"response_format": FORM, "tools": tools, **more}
        assert answered(client, f"{thought}{final}{answer}", **form) == (answer, "hm, {let me see}", [], "stop")
        content, thoughts, _, _ = answered(client, f"{thought}{final}Hello", **form)
        assert (list(json.loads(content)), thoughts) == (["city", "days"], "hm, {let me see}")
    with pytest.raises(BadRequestError, match="no form of an answer in channels"):
        said(client, "x", tools=[], extra_body={"structured_outputs": {"regex": "a"}})
    assert answered(client, CALLS["openai"], tool_choice="none", **more)[2:] == ([], "stop")


def test_a_model_may_answer_without_thinking(clients):
    client, answer = clients("thinks"), ARGUMENTS.replace(" ", "")
    assert answered(client, answer, response_format=FORM, tools=[]) == (answer, "", [], "stop")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    not_thought = "<think>\n\n</think>\n\n"  # by the template
    chosen = said(client, not_thought + answer, response_format=FORM, tools=[], extra_body=off).choices[0]
    assert parts(chosen) == (answer, "", [], "stop")
    assert not hasattr(chosen.message, "reasoning_content")


def test_tools_beside_a_form(clients):
    """The answer is a call or has the form, whatever the model wants."""
    client, answer = clients("hermes"), ARGUMENTS.replace(" ", "")
    assert answered(client, answer, response_format=FORM) == (answer, "", [], "stop")
    assert answered(client, CALLS["hermes"], response_format=FORM)[2] == ONE_CALL
    content, _, calls, _ = answered(client, "Hello", response_format=FORM)
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
NEEDED, OPEN = {"tool_choice": "required"}, {"type": "object", "properties": {"a": {}}}


DATED = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
TWICE = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "b"}]}
LIST = CALL | {"function": {"name": "f", "arguments": "[1]"}}
REFUSED = {
    "invalid_value": [
        ({"tools": [tool(), tool(name="a b")]}, "tools[1].function.name"),
        ({"tools": [tool(), tool(name="g"), tool()]}, "tools[2].function.name"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [tool(), tool(name="g", strict=True, parameters=OPEN)]}, "tools[1].function.parameters"),
        (NEEDED | {"tools": [tool(), tool(name="g", parameters={"not": {}})]}, "tools[1].function.parameters"),
        ({"tools": [tool()], "tool_choice": "some"}, "tool_choice"),
        (NEEDED, "tool_choice"),
        ({"tools": [tool()], "tool_choice": tool(name="g")}, "tool_choice.function.name"),
        ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs"),
        ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER | {"tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"reasoning": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [USER, {"role": "system", "content": None}]}, "messages[1].content"),
        ({"messages": [USER, TWICE | {"tool_calls": [CALL, LIST]}]}, "messages[1].tool_calls[1].function.arguments"),
    ],
    "missing_required_parameter": [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
    "unknown_parameter": [({"tools": [tool(extra=1)]}, "tools[0].function.extra")],
    "invalid_type": [
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
    "unsupported_parameter": [({"functions": [{}]}, "functions")],
}
BY_TEMPLATE = [
    ("plain", {"tools": [tool()]}, "tools", "unsupported_parameter"),
    ("llama3_json", {"messages": [USER, TWICE]}, "messages", "invalid_value"),
    (
        "glm45",
        NEEDED | {"tools": [tool(), tool(name="g", parameters=DATED)]},
        "tools[1].function.parameters",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(
    ("name", "body", "param", "code"),
    [*(("thinks", *case, code) for code, cases in REFUSED.items() for case in cases), *BY_TEMPLATE],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_honoured_is_named(clients, name, body, param, code):
    served = clients.served(name)
    answer = patience.post(f"{served.url}/v1/chat/completions", json={"messages": [USER]} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    served.wait_until_idle()


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


def only(key, value):
    schema = {"type": "object", "properties": {key: {"const": value}}, "required": [key]}
    return schema | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("name", "drafter"), [*((name, "draft-model") for name in CALLS), ("hermes", "none"), ("json", "lookup")]
)
def test_names_of_added_tokens_are_plain_text(clients, name, drafter):
    """Keys and values, of strict functions and of a form beside them; markers are tokens all the same."""
    own = FORMATS[name.split()[0]].markers
    value = "".join(each for each in (*MARKERS[:7], *own, "<|eot|>") if each not in ("</arg_value>", "</parameter>"))
    key = "k" if name in TAGGED else value
    function = {"name": "weather", "parameters": only(key, value), "strict": True}
    options = {"tools": [{"type": "function", "function": function}], "max_tokens": 900, "parallel_tool_calls": False}
    options["extra_body"] = {"speculative": {"drafter": drafter}}
    wish = "<|channel|>commentary" if name == "openai" else "x"
    content, _, ((_, arguments),), finish = answered(clients(name), wish, tool_choice="required", **options)
    assert (content, json.loads(arguments), finish) == ("", {key: value}, "tool_calls")
    options["response_format"] = FORM | {"json_schema": FORM["json_schema"] | {"schema": only("x", value)}}
    wanted = ("<|channel|>final<|message|>" if name == "openai" else "") + '{"x":"'
    content, *others = answered(clients(name), wanted, **options)
    assert (json.loads(content), others) == ({"x": value}, ["", [], "stop"])
    assert streamed(clients(name), wanted, **options) == (content, "", [], "stop")


@pytest.mark.parametrize(
    ("name", "answer", "limit"),
    [
        *((name, call, 300) for name, call in CALLS.items()),
        ("thinks", f"{THOUGHT}Paris {CALLS['hermes']}", 300),
        ("thinks", "<think>\nhm, hm", 9),
    ],
)
def test_an_answer_goes_back_as_it_is(clients, name, answer, limit):
    """As the client's own model or as JSON, with what its functions returned, which the model gets to read."""
    client, served, thanks = clients(name), clients.served(name), {"role": "user", "content": "thanks"}
    message = said(client, answer, max_tokens=limit).choices[0].message
    fog = [{"type": "text", "text": "fog"}]
    results = [{"role": "tool", "tool_call_id": call.id, "content": fog} for call in message.tool_calls or ()]
    for back in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        messages = [{"role": "user", "content": answer}, back, *results, thanks]
        again = said(client, "", messages=messages)
        assert again.choices[0].message.content == "thanks"
    tokens = patience.post(f"{served.url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = served.engine.engine.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.count(answer if name in TAGGED else ARGUMENTS) == 2 * len(results)
    assert text.count("fog") == len(results)
    assert again.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("name", ["thinks", "json", "mistral named"])
def test_a_turn_of_the_assistant_may_be_empty(clients, name):
    for empty in ({}, {"content": None}, {"content": ""}, {"content": []}):
        messages = [USER, {"role": "assistant", **empty}, {"role": "user", "content": "thanks"}]
        assert said(clients(name), "", messages=messages, tools=TOOLS).choices[0].message.content == "thanks"


def test_all_parts_of_a_message_are_read(clients):
    kinds = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    messages = [{"role": "user", "content": [*kinds, {"type": "refusal", "refusal": "refusal"}]}]
    got = said(clients("plain"), "", messages=messages, tools=()).choices[0].message.content
    assert got == "textinput_textoutput_textrefusal"

"""Calls of functions and thinking on ``/v1/responses`` with the official client: items, events, what goes back."""

import json
import re

import pytest
from openai import pydantic_function_tool

from specexport_runtime.server.responses_schema import ResponseAnswer
from tests.support.cases import patience
from tests.support.servers.odd_bodies import check_odd_bodies
from tests.support.servers.tool_servers import ARGUMENTS, CITY, THOUGHT, Weather

llguidance = pytest.importorskip("llguidance")

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "stop", "strict": None},
]
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
WEATHER, STOPPED = ("function_call", "weather", ARGUMENTS), ("function_call", "stop", "{}")
REASONING = ("reasoning", "hm, {let me see}")
USER, WELL = ({"role": "user", "content": content} for content in ("x", "Well."))
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "a", "output": "rain"}


def create(client, answer, **more):
    more = {"tools": TOOLS, "temperature": 0, "max_output_tokens": 300} | more
    more = {"input": [{"role": "user", "content": answer}]} | more
    return client.responses.create(model="echo", **more)


def items_of(response):
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        else:
            (part,) = item.content
            assert part.type == {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
            found.append((item.type, part.text))
    return found


ALIKE = {"id", "created_at", "completed_at", "item_id", "call_id", "input_tokens_details"}


def alike(value):
    """JSON without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {name: alike(item) for name, item in value.items() if name not in ALIKE}
    return [alike(item) for item in value] if isinstance(value, list) else value


def check_stream(client, answer, whole, **more):
    """The events tell what the whole answer tells: every item begins, grows and ends, one after the other."""
    *_, last = events = [event.to_dict() for event in create(client, answer, stream=True, **more)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last["type"] == f"response.{whole.status}"
    ResponseAnswer.model_validate(last["response"])
    assert alike(last["response"]) == alike(whole.to_dict())
    at = 2
    for index, item in enumerate(last["response"]["output"]):
        own = []
        while at < len(events) - 1 and not (own and own[-1]["type"] == "response.output_item.done"):
            own.append(events[at])
            at += 1
        assert {event["output_index"] for event in own} == {index}
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        (first, *middle, end) = own
        assert first["type"] == "response.output_item.added"
        assert (first["item"]["id"], first["item"]["status"]) == (item["id"], "in_progress")
        assert end["item"] == item
        deltas = [event for event in middle if event["type"].endswith(".delta")]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text
        kind = {"message": "output_text", "reasoning": "reasoning_text"}.get(item["type"], "function_call_arguments")
        assert {event["type"] for event in deltas} <= {f"response.{kind}.delta"}
        if kind == "function_call_arguments":
            begun, done = [], [f"response.{kind}.done"]
        else:
            begun, done = ["content_part.added"], [f"response.{kind}.done", "response.content_part.done"]
        ends = [event["type"] for event in middle if event not in deltas]
        assert ends == [f"response.{name}" for name in begun] + done
        (told,) = [event for event in middle if event["type"] == f"response.{kind}.done"]
        assert told["arguments" if kind == "function_call_arguments" else "text"] == text
    assert at == len(events) - 1
    return last["response"]


@pytest.mark.parametrize(
    ("name", "answer", "wanted"),
    [
        ("hermes", f"Well.\n{CALL}\n{STOP}", [("message", "Well."), WEATHER, STOPPED]),
        ("hermes", "Hello.\n\n", [("message", "Hello.\n\n")]),
        ("hermes", "", [("message", "")]),
        ("hermes", f"Well. {BROKEN}", [("message", f"Well. {BROKEN}")]),
        ("mistral named", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", [WEATHER]),
        ("thinks", f"{THOUGHT}So.\n{CALL}", [REASONING, ("message", "So."), WEATHER]),
        ("thinks in text", f"{THOUGHT}Hello.", [REASONING, ("message", "Hello.")]),
        ("plain", "Hello.", [("message", "Hello.")]),
    ],
)  # fmt: skip
def test_items_whole_and_streamed(clients, name, answer, wanted):
    client, more = clients(name), {"tools": [] if name == "plain" else TOOLS}
    if name == "thinks in text" or BROKEN in answer:
        more["tools"] = TOOLS[1:]  # strict calls are well-formed, and cannot begin after a thinking that no token ends
    whole = create(client, answer, **more)
    assert (items_of(whole), whole.status) == (wanted, "completed")
    assert whole.output_text == "".join(item[1] for item in wanted if item[0] == "message")
    assert [item.id[:3] for item in whole.output] == [
        {"message": "msg", "reasoning": "rs_", "function_call": "fc_"}[item[0]] for item in wanted
    ]
    ids = [item.id for item in whole.output] + [getattr(item, "call_id", None) or item.id for item in whole.output]
    assert len(set(ids)) == len(wanted) + sum(item[0] == "function_call" for item in wanted)
    check_stream(client, answer, whole, **more)


def test_ids_of_calls_are_such_as_the_template_takes(clients):
    whole = create(clients("mistral named"), f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}")
    assert re.fullmatch("[A-Za-z0-9]{9}", whole.output[0].call_id)
    assert create(clients("hermes"), CALL).output[0].call_id.startswith("call_")


def test_tokens_of_thinking_are_counted(clients):
    """Up to the token that ends it; of letters, so that they can be counted here."""
    for force in (False, True):
        extra = {"chat_template_kwargs": {"force_thinking": force}}
        usage = create(clients("thinks"), f"{THOUGHT}Hello.", extra_body=extra).usage
        begun = 2 if force else 0  # the marker and a line break, by the template
        assert usage.output_tokens_details.reasoning_tokens == len("\nhm, {let me see}\n") + 2 - begun
    assert create(clients("thinks"), "Hello.").usage.output_tokens_details.reasoning_tokens == 0
    cut = create(clients("thinks"), THOUGHT, max_output_tokens=9)
    assert cut.usage.output_tokens_details.reasoning_tokens == 9
    assert create(clients("thinks"), "", input=[USER, *cut.output, WELL]).output_text == "Well."
    # no token ends it, so that none are counted
    assert create(clients("thinks in text"), THOUGHT, tools=[]).usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(("limit", "last"), [(9, "reasoning"), (len(THOUGHT) + 40, "function_call")])
def test_what_is_cut_off_is_incomplete(clients, limit, last):
    answer = f"{THOUGHT}{CALL}"
    whole = create(clients("thinks"), answer, max_output_tokens=limit)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.output[-1].type, whole.output[-1].status) == (last, "incomplete")
    assert {item.status for item in whole.output[:-1]} <= {"completed"}
    assert whole.output_text == ""
    check_stream(clients("thinks"), answer, whole, max_output_tokens=limit)


def test_choices_of_functions(clients):
    client = clients("hermes")
    for choice, names in (
        ("required", {"weather", "stop"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        ({"type": "function", "name": "stop"}, {"stop"}),
    ):
        whole = create(client, "Hello", tool_choice=choice, parallel_tool_calls=False)
        (item,) = whole.output
        assert item.name in names
        assert list(json.loads(item.arguments)) == ([] if item.name == "stop" else ["city", "days"])
        assert (whole.parallel_tool_calls, whole.to_dict()["tool_choice"]) == (False, choice)
        check_stream(client, "Hello", whole, tool_choice=choice, parallel_tool_calls=False)
    assert [tool.name for tool in whole.tools] == ["weather", "stop"]
    (none,) = create(client, f"Well. {CALL}", tool_choice="none").output
    assert none.type == "message"
    one = create(client, f"{CALL}\n{STOP}", parallel_tool_calls=False)
    assert [item for item in items_of(one) if item[0] == "function_call"] == [WEATHER]


def test_a_call_that_turns_out_to_be_none(clients):
    """Whole, it is text; in a stream, what was sent stays sent."""
    half = 'Well.<tool_call>{"name": "stop", "arguments": {"city": }}</tool_call>'
    whole = create(clients("hermes"), half, tools=TOOLS[1:]).output
    assert {item.type for item in whole} == {"message"}
    assert half.startswith(whole[0].content[0].text)
    *_, last = create(clients("hermes"), half, tools=TOOLS[1:], stream=True)
    called = [(item.status, item.arguments) for item in last.response.output if item.type == "function_call"]
    assert (last.type, called) == ("response.completed", [("incomplete", '{"city": }')])


def test_the_clients_own_parser_and_stream(clients):
    client, chat_tool = clients("thinks"), pydantic_function_tool(Weather, name="weather")["function"]
    tool = {"type": "function", **chat_tool}
    common = {"model": "echo", "input": f"{THOUGHT}{CALL}", "tools": [tool], "temperature": 0}
    parsed = client.responses.parse(**common)
    call = parsed.output[1]
    assert call.parsed_arguments == {"city": "Paris", "days": 3}
    with client.responses.stream(**common) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == ARGUMENTS
    assert final.output[1].parsed_arguments == call.parsed_arguments
    # what it parsed can be sent back
    again = create(client, "", input=[USER, *parsed.output, RETURNED | {"call_id": call.call_id}, WELL])
    assert again.output_text == "Well."


def test_items_go_back_as_the_messages_of_a_chat(clients):
    served, client = clients.served("thinks"), clients("thinks")
    first = create(client, f"{THOUGHT}So.\n{CALL}\n{STOP}").output
    done = [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}]
    outputs = [RETURNED | {"call_id": first[2].call_id}, RETURNED | {"call_id": first[3].call_id, "output": done}]
    for back in (first, [item.model_dump() for item in first]):
        again = create(client, "", input=[USER, *back, *outputs, WELL])
        assert again.output_text == "Well."
    called = [("weather", json.loads(ARGUMENTS)), ("stop", {})]
    calls = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(called)
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "So.", "reasoning_content": "hm, {let me see}", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "rain"},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        WELL,
    ]
    tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in TOOLS]
    told = patience.post(f"{served.url}/tokenize", json={"messages": messages, "tools": tools}).json()
    assert "hm, {let me see}" in served.engine.engine.tokenizer.decode(told["tokens"], skip_special_tokens=False)
    assert again.usage.input_tokens == told["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instructions": "Be brief."}, "instructions"),
        ({"input": [WELL, {"role": "developer", "content": "Be brief."}, WELL]}, "input[1].content"),
        ({"instructions": "", "input": [WELL, {"role": "system", "content": "Be brief."}, WELL]}, "input[1].content"),
        ({"input": [WELL, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]}, "input[1]"),
    ],
)
def test_what_a_template_leaves_out_is_named(clients, body, param):
    answer = patience.post(clients.served("talk").url + PATH, json={"input": "x"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"Parameter {param}, of role ")


def tool(**more):
    return {"type": "function", "name": "f"} | more


REFUSED = [
    ({"tools": [tool(), {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "unsupported_parameter"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [tool(function={})]}, "tools[0].function", "unknown_parameter"),
    ({"tools": [tool(), tool(name="g"), tool()]}, "tools[2].name", "invalid_value"),
    ({"tools": [tool(name="g"), tool(strict=True, parameters={"type": "object"})]}, "tools[1].parameters", None),
    ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools[0].parameters", "invalid_value"),
    ({"tools": [tool()], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [tool()], "include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
    ({"tools": [tool()], "speculative": {"token_origins": True}}, "speculative.token_origins", None),
    ({"max_tool_calls": 2}, "max_tool_calls", "unsupported_parameter"),
    ({"input": [USER, RETURNED]}, "input[1].call_id", "invalid_value"),
    ({"instructions": "Be brief.", "input": [USER, RETURNED]}, "input[1].call_id", "invalid_value"),
    ({"input": [USER, CALLED, RETURNED | {"output": 5}]}, "input[2].output", "invalid_type"),
    ({"input": [USER, CALLED, RETURNED | {"output": [{"type": "input_image"}]}]}, "input[2].output[0].type", None),
    ({"input": [USER, {"type": "function_call", "name": "f"}]}, "input[1].call_id", "missing_required_parameter"),
    ({"input": [USER, CALLED, CALLED | {"arguments": "[1]"}]}, "input[2].arguments", "invalid_value"),
    ({"input": [USER, CALLED | {"namespace": "x"}]}, "input[1].namespace", "unknown_parameter"),
    ({"input": [USER, *[CALLED] * 129]}, "input[129]", "limit_exceeded"),
    ({"instructions": "x", "input": [USER] * 4096}, "input", "limit_exceeded"),
    ({"input": [USER, {"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]},
     "input[1].content[0].type", "invalid_value"),
    ({"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
     "input[1].summary", "unsupported_parameter"),
    ({"input": [{"type": "reasoning"}, {"type": "reasoning", "content": []}]}, "input", "invalid_value"),
    ({"input": [USER, {"type": "reasoning", "encrypted_content": "x"}]},
     "input[1].encrypted_content", "unsupported_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_named(clients, body, param, code):
    served = clients.served("hermes")
    answer = patience.post(served.url + PATH, json={"input": "x"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["code"] == (code or error["code"])
    assert "messages" not in error["message"] or code == "limit_exceeded"
    assert ".function." not in error["message"] or "function" in param


def test_odd_values_are_no_defect(clients):
    """Every part of a body with tools, in turn, is replaced by values that it should not have."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    body = {
        "input": [USER, thought, CALLED, RETURNED], "tools": [tool(description="d", strict=True, parameters=CITY)],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False, "max_output_tokens": 1,
    }  # fmt: skip
    check_odd_bodies(clients.served("thinks"), PATH, body)

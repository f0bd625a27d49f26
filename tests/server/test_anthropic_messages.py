"""``/v1/messages`` with the official client: blocks, events, what goes back, counts, refusals."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import anthropic
import pytest
from pydantic import BaseModel

from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.messages_schema import MessageAnswer
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.odd_bodies import check_odd_bodies
from tests.support.servers.serving import TEMPLATE, Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.tool_servers import ARGUMENTS, CITY, THOUGHT

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
STOP = {"type": "custom", "name": "stop", "input_schema": {"type": "object", "additionalProperties": False}}
TOOLS = [WEATHER, STOP]
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
STOP_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
CALLED, STOPPED = ("weather", json.loads(ARGUMENTS)), ("stop", {})
THINKING = ("thinking", "hm, {let me see}")
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def anthropics(clients):
    """Anthropic's client of a server, by the server's name."""
    made = {}

    def client_of(name):
        if name not in made:
            url = clients.served(name).url
            made[name] = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=HANG_S)
        return made[name]

    yield client_of
    for client in made.values():
        client.close()


def create(client, answer, **more):
    more = {"tools": TOOLS, "max_tokens": 300} | more
    more["extra_body"] = {"temperature": 0} | more.get("extra_body", {})  # this client has no name for it any more
    return client.messages.create(model="echo", **{"messages": [{"role": "user", "content": answer}]} | more)


def blocks_of(message):
    found = []
    for block in message.content:
        if block.type == "tool_use":
            found.append((block.name, block.input))
        else:
            found.append((block.type, getattr(block, block.type)))
    return found


def check_stream(client, answer, whole, **more):
    """The events tell what the whole answer tells: every block begins, grows and ends, one after the other."""
    stream = create(client, answer, stream=True, **more)
    first, *middle, delta, last = [event.to_dict() for event in stream]
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    told = {name: first["message"][name] for name in ("content", "stop_reason", "stop_sequence", "role", "model")}
    assert told == {"content": [], "stop_reason": None, "stop_sequence": None, "role": "assistant", "model": "echo"}
    blocks = []
    for index, of_block in itertools.groupby(middle, lambda event: event["index"]):
        begin, *deltas, end = of_block
        assert (index, begin["type"], end) == (
            len(blocks), "content_block_start", {"type": "content_block_stop", "index": index}
        )  # fmt: skip
        assert {event["type"] for event in deltas} <= {"content_block_delta"}
        block, parts = begin["content_block"], [event["delta"] for event in deltas]
        kinds = [kind for kind, _ in itertools.groupby(part["type"] for part in parts)]
        key = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
        text = "".join(part.get(key, "") for part in parts)
        if block["type"] == "tool_use":
            assert (block["input"], kinds) == ({}, ["input_json_delta"])
            block["input"] = json.loads(text)
        else:
            assert kinds == (["text_delta"] if key == "text" else ["thinking_delta", "signature_delta"])
            block[key] = text
        if key == "thinking":
            block["signature"] = parts[-1]["signature"]
            assert block["signature"]
        blocks.append(block)
    wanted = [block.to_dict() for block in whole.content]
    for block, other in zip(blocks, wanted, strict=True):
        assert block | {"id": "", "signature": ""} == other | {"id": "", "signature": ""}
    assert delta["delta"] == {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
    begun, usage, wanted = first["message"]["usage"], delta["usage"], whole.usage
    assert usage["output_tokens"] == wanted.output_tokens
    total = [each["input_tokens"] + each["cache_read_input_tokens"] for each in (begun, usage)]
    assert total == [wanted.input_tokens + wanted.cache_read_input_tokens] * 2


@pytest.mark.parametrize(
    ("name", "answer", "wanted", "reason"),
    [
        ("hermes", f"Well.\n{CALL}\n{STOP_CALL}", [("text", "Well."), CALLED, STOPPED], "tool_use"),
        ("hermes", f"{CALL}\nSo.\n{STOP_CALL}", [CALLED, ("text", "So."), STOPPED], "tool_use"),
        ("hermes", "Hello.\n\n", [("text", "Hello.\n\n")], "end_turn"),
        ("hermes", "", [], "end_turn"),
        ("mistral named", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", [CALLED], "tool_use"),
        ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', [CALLED], "tool_use"),
        ("thinks", f"{THOUGHT}So.\n{CALL}", [THINKING, ("text", "So."), CALLED], "tool_use"),
        ("thinks in text", f"{THOUGHT}Hello.", [THINKING, ("text", "Hello.")], "end_turn"),
        ("plain", "Hello.", [("text", "Hello.")], "end_turn"),
    ],
)  # fmt: skip
def test_blocks_whole_and_streamed_with_drafts_and_without(anthropics, name, answer, wanted, reason):
    client, more = anthropics(name), {"tools": [] if name == "plain" else TOOLS}
    for drafter in ("draft-model", "none"):
        more["extra_body"] = {"speculative": {"drafter": drafter}}
        whole = create(client, answer, **more)
        assert (blocks_of(whole), whole.stop_reason, whole.stop_sequence) == (wanted, reason, None)
        assert (whole.usage.speculative["drafted"] > 0) == (drafter != "none" and bool(answer))
        assert whole.id == f"msg_{whole._request_id}"
        MessageAnswer.model_validate(whole.to_dict())
        check_stream(client, answer, whole, **more)


def test_a_stop_sequence_is_told_and_left_out(anthropics):
    client = anthropics("thinks")
    for answer, stops, text, found in (
        ("Hello, world", ["lo", "o, "], "Hel", "lo"),  # the one that ends first
        ("Hello, world", ["lo", "llo"], "He", "llo"),  # of two that end alike the one that begins first
        ("Hello, world", ["xy", "world"], "Hello, ", "world"),
        ("Hello, world", ["worldly"], "Hello, world", None),
        (f"{THOUGHT}Yes", ["{let"], None, "{let"),
        ("ab", ["ab"], None, "ab"),
    ):
        for drafter in ("draft-model", "none"):
            more = {"stop_sequences": stops, "extra_body": {"speculative": {"drafter": drafter}}}
            whole = create(client, answer, **more)
            assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence" if found else "end_turn", found)
            wanted = [("thinking", "hm, ")] if answer.startswith(THOUGHT) else [("text", text)] if text else []
            assert blocks_of(whole) == wanted
            check_stream(client, answer, whole, **more)


def test_what_is_cut_off(anthropics):
    """Half a call is text, which nobody runs; in a stream, what was sent stays sent."""
    client, limit = anthropics("thinks"), len(THOUGHT) + 40
    whole = create(client, f"{THOUGHT}{CALL}", max_tokens=limit)
    assert (whole.stop_reason, [block.type for block in whole.content]) == ("max_tokens", ["thinking", "text"])
    assert CALL.startswith(whole.content[1].text)
    assert whole.usage.output_tokens == limit
    with client.messages.stream(
        model="echo", max_tokens=limit, tools=TOOLS, extra_body={"temperature": 0},
        messages=[{"role": "user", "content": f"{THOUGHT}{CALL}"}],
    ) as stream:  # fmt: skip
        message = stream.get_final_message()
    assert (message.stop_reason, message.content[1].type) == ("max_tokens", "tool_use")
    assert set(message.content[1].input) < {"city", "days"}
    whole = create(client, THOUGHT + "a" * 50, max_tokens=9)
    assert blocks_of(whole) == [("thinking", "hm, {le")]


def test_an_answer_may_end_with_the_context(anthropics, clients):
    most = clients.served("plain").engine.engine.max_model_len
    long = "a" * (most - 20)
    whole = create(anthropics("plain"), long, tools=[], max_tokens=10**6)
    assert whole.stop_reason == "model_context_window_exceeded"
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens + whole.usage.output_tokens == most
    check_stream(anthropics("plain"), long, whole, tools=[], max_tokens=10**6)


@pytest.mark.parametrize("name", ["hermes", "mistral named"])
def test_choices_of_tools(anthropics, name):
    pytest.importorskip("llguidance")
    client, two = anthropics(name), f"{CALL}\n{STOP_CALL}"
    if name != "hermes":
        two = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[ARGS]{{}}"
    for choice, names in (
        ({"type": "any"}, {"weather", "stop"}),
        ({"type": "tool", "name": "stop"}, {"stop"}),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, {"weather"}),
    ):
        more = {"tool_choice": choice | {"disable_parallel_tool_use": True}}
        whole = create(client, "Hello", **more)
        (block,) = whole.content
        assert block.name in names
        assert whole.stop_reason == "tool_use"
        check_stream(client, "Hello", whole, **more)
    assert blocks_of(create(client, two)) == [CALLED, STOPPED]
    assert blocks_of(create(client, two, tool_choice={"type": "auto", "disable_parallel_tool_use": True})) == [CALLED]
    none = create(client, two, tool_choice={"type": "none"})
    assert {block.type for block in none.content} == {"text"}
    strict = create(client, CALL.replace('"Paris"', "12345"), tools=[WEATHER | {"strict": True}, STOP])
    assert all(isinstance(block.input["city"], str) for block in strict.content if block.type == "tool_use")


def test_ids_of_calls_are_such_as_the_template_takes(anthropics):
    whole = create(anthropics("mistral named"), f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}")
    assert re.fullmatch("[A-Za-z0-9]{9}", whole.content[0].id)


def test_numbers_of_arguments_stay_as_they_were_written(clients):
    """JSON has more numbers than Python reads: what the model wrote is told."""
    odd = '{"city": 1.50, "days": 1e999}'
    answer = f'<tool_call>\n{{"name": "weather", "arguments": {odd}}}\n</tool_call>'
    body = {"max_tokens": 300, "temperature": 0, "tools": TOOLS, "messages": [{"role": "user", "content": answer}]}
    assert f'"input": {odd}' in patience.post(clients.served("hermes").url + PATH, json=body).text


def test_a_conversation_is_that_of_a_chat(anthropics, clients):
    """System, thoughts, calls in parallel, results that are texts, parts or failures; counted as it is read."""
    client, served = anthropics("thinks"), clients.served("thinks")
    first = create(client, f"{THOUGHT}So.\n{CALL}\n{STOP_CALL}")
    ids = [block.id for block in first.content if block.type == "tool_use"]
    parts = [{"type": "text", "text": "do"}, {"type": "text", "text": "ne", "cache_control": {"type": "ephemeral"}}]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": parts},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no rain", "is_error": True},
        {"type": "text", "text": "Well."},
    ]
    redacted = {"type": "redacted_thinking", "data": "abc"}
    for back in (first.to_param(), {"role": "assistant", "content": [redacted, *first.to_dict()["content"]]}):
        messages = [USER, back, {"role": "user", "content": results}]
        asked = {"messages": messages, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
        again = create(client, "", **asked)
        assert blocks_of(again) == [("text", "Well.")]
        usage = again.usage
        assert client.messages.count_tokens(model="echo", **asked).input_tokens == (
            usage.input_tokens + usage.cache_read_input_tokens
        )
    calls = [
        {"id": called, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for called, (name, arguments) in zip(ids, (CALLED, STOPPED), strict=True)
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "So.", "reasoning_content": "hm, {let me see}", "tool_calls": calls},
        {"role": "tool", "tool_call_id": ids[0], "content": "done"},
        {"role": "tool", "tool_call_id": ids[1], "content": "Error: no rain"},
        {"role": "user", "content": "Well."},
    ]
    functions = [
        {"name": tool["name"], "parameters": tool["input_schema"]}
        | {key: tool[key] for key in ("description",) if key in tool}
        for tool in TOOLS
    ]
    body = {"messages": chat, "tools": [{"type": "function", "function": each} for each in functions]}
    told = patience.post(f"{served.url}/tokenize", json=body).json()
    assert usage.input_tokens + usage.cache_read_input_tokens == told["count"]
    assert usage.cache_read_input_tokens > 80


def test_the_clients_own_loop_calls_tools(anthropics):
    """It first asks for a thread on the server, and goes on when it is told that there are none."""

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """Tells it.

        Args:
            city: which
            days: how many
        """
        return f"rain in {city}" * days

    client, asked = anthropics("hermes"), [{"role": "user", "content": CALL}]
    loop = client.beta.messages.tool_runner(
        model="echo", max_tokens=300, messages=asked, tools=[weather], extra_body={"temperature": 0}, max_iterations=2
    )
    first, second = loop
    assert blocks_of(first) == [CALLED]
    told = f"<tool_response>{'rain in Paris' * 3}</tool_response>"  # of the last message, which is repeated
    assert blocks_of(second) == [("text", told)]
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        create(client, "Hi", extra_body={"thread": {"type": "create"}})


def test_what_comes_in_another_order_keeps_it(clients):
    """A call before a text is a message before it, and a text before a result one of the user before it."""

    def count(path, body, key):
        answer = patience.post(clients.served("hermes").url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()[key]

    use = {"type": "tool_use", "id": "a", "name": "stop", "input": {}}
    said = [
        USER,
        {"role": "assistant", "content": [use, {"type": "text", "text": "Later."}]},
        {"role": "user", "content": [{"type": "text", "text": "So"}, {"type": "tool_result", "tool_use_id": "a"}]},
    ]
    call = {"id": "a", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    chat = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "Later."},
        {"role": "user", "content": "So"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    assert count(COUNT, {"messages": said}, "input_tokens") == count("/tokenize", {"messages": chat}, "count")


def test_the_beginning_of_an_answer_goes_on(anthropics, clients):
    """A last message of the assistant is not told again; what it cannot go on with is refused."""
    asked = [{"role": "user", "content": "Hello, world."}]
    for name, tools in (("plain", []), ("hermes", TOOLS), ("thinks", TOOLS)):
        for begun in ("Hello,", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo,"}]):
            more = {"tools": tools, "messages": [*asked, {"role": "assistant", "content": begun}]}
            whole = create(anthropics(name), "", **more)
            assert blocks_of(whole) == [("text", " world.")]
            check_stream(anthropics(name), "", whole, **more)
            count = anthropics(name).messages.count_tokens(model="echo", messages=more["messages"], tools=tools)
            assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    called = create(anthropics("hermes"), CALL)
    body = {"max_tokens": 9, "tools": TOOLS, "messages": [*asked, called.to_param()]}
    body["messages"][1]["content"] = [block.to_dict() for block in called.content]
    error = patience.post(clients.served("hermes").url + PATH, json=body).json()["error"]
    assert error["message"].startswith("Parameter messages[1] cannot go on: ")
    assert "or end with a message of the user" in error["message"]


@pytest.mark.parametrize("name", ["thinks", "always thinks"])
def test_a_budget_ends_the_thinking(anthropics, clients, name):
    client, long = anthropics(name), THOUGHT.replace("hm, ", "hm, " * 40) + "So."
    free = create(client, long)
    assert [block.type for block in free.content] == ["thinking", "text"]
    bound = create(client, long, thinking={"type": "enabled", "budget_tokens": 9})
    assert bound.content[0].type == "thinking"
    assert free.content[0].thinking.startswith(bound.content[0].thinking)
    assert len(bound.content[0].thinking) <= 9
    check_stream(client, long, bound, thinking={"type": "enabled", "budget_tokens": 9})
    ample = create(client, long, thinking={"type": "enabled", "budget_tokens": 10**6})
    assert blocks_of(ample) == blocks_of(free)
    off = create(client, long, thinking={"type": "disabled"})
    assert "thinking" not in {block.type for block in off.content}
    # a model that never thinks keeps to any budget
    assert blocks_of(create(anthropics("hermes"), "Hi", thinking={"type": "enabled", "budget_tokens": 9})) == [
        ("text", "Hi")
    ]


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_is_parsed(anthropics):
    pytest.importorskip("llguidance")
    client = anthropics("plain")
    common = {"model": "echo", "max_tokens": 200, "messages": [USER], "extra_body": {"seed": 2}}
    message = client.messages.parse(output_format=Person, **common)
    assert isinstance(message.parsed_output, Person)
    with client.messages.stream(output_format=Person, **common) as stream:
        assert stream.get_final_message().parsed_output == message.parsed_output
    again = create(client, "", tools=[], messages=[USER, message.to_param(), {"role": "user", "content": "Well."}])
    assert blocks_of(again) == [("text", "Well.")]


def test_settings_of_thinking_reach_a_template_that_reads_them():
    def counts(condition, **more):
        template = f"{{% if {condition} %}}w7 {{% endif %}}{TEMPLATE}"
        with Served(lambda: fake_engine(chat_template=template), ServerConfig(model_name="fake")) as served:
            found = []
            for fields in ({}, *more["of"]):
                body = {"messages": [{"role": "user", "content": "w1"}]} | fields
                answer = patience.post(served.url + COUNT, json=body)
                assert answer.status_code == 200, answer.text
                found.append(answer.json()["input_tokens"])
            return found

    kinds = [{"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "summarized"}}]
    kinds += [{"thinking": {"type": kind}} for kind in ("adaptive", "disabled")]
    own = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert counts("enable_thinking", of=[*kinds, own]) == [1, 2, 2, 1, 2]
    assert counts("false", of=[*kinds, {"output_config": {"effort": "high"}}]) == [1] * 5  # nothing is read
    efforts = [{"output_config": {"effort": effort}} for effort in ("low", "high")]
    assert counts("reasoning_effort == 'high'", of=efforts) == [1, 1, 2]


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
AGENT = {
    "model": "fake", "max_tokens": 6, "seed": 5, "stream": False, "tools": [], "tool_choice": {"type": "auto"},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "w1 w2", **EPHEMERAL}]}],
    "metadata": {"user_id": "somebody"}, "service_tier": "auto", "stop_sequences": [], "temperature": None,
    "cache_control": {"type": "ephemeral", "ttl": "1h"}, "system": [], "top_p": 1,
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
}  # fmt: skip


def test_what_coding_agents_send_besides_changes_nothing(fake_served):
    """Headers, a query, hints; the text is that of a chat."""
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b", "x-api-key": "any"}
    answer = patience.post(f"{fake_served.url}{PATH}?beta=true", json=AGENT, headers=headers)
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    chat = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 6, "seed": 5}
    message = patience.post(f"{fake_served.url}/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    assert block == {"type": "text", "text": message["content"]}


def turns(*contents):
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"stop": ["a"]}, "stop"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "system", "content": [USE]}]}, "messages[0].content[0].type"),
    (turns(5), "messages[0].content"),
    (turns([]), "messages[0].content"),
    (turns([{"type": "text", "text": "a"}, {"type": "image", "source": {}}]), "messages[0].content[1].type"),
    (turns([{"type": "document"}]), "messages[0].content[0].type"),
    (turns([USE]), "messages[0].content[0].type"),
    (turns("a", [RESULT]), "messages[1].content[0].type"),
    (turns("a", [USE], [RESULT, RESULT | {"tool_use_id": "b"}]), "messages[2].content[1].tool_use_id"),
    (turns("a", [USE], [RESULT | {"content": [{"type": "image"}]}]), "messages[2].content[0].content[0].type"),
    (turns("a", [USE | {"input": "{}"}], "b"), "messages[1].content[0].input"),
    (turns("a", [USE | {"input": {"a": float("1e400")}}], "b"), "messages[1].content[0].input"),
    (turns("a", [USE] * 129, "b"), "messages[1].content[128]"),
    ({"messages": [{"role": "user", "content": [RESULT] * 10}] * 410}, "messages"),
    ({"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "stop"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ({"context_management": {"edits": []}}, "context_management"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"metadata": {"a": "b"}}, "metadata.a"),
    ({"speculative": {"token_origins": True}}, "speculative.token_origins"),
    ({"speculative": {"drafter": "x"}}, "speculative.drafter"),
    (turns("a" * 3000), "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_named(clients, fields, param):
    body = {"max_tokens": 5, "messages": [USER]} | fields
    answer = patience.post(clients.served("hermes").url + PATH, content=json.dumps(body).replace("Infinity", "1e400"),
                           headers={"Content-Type": "application/json"})  # fmt: skip
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(rf"(^| |\(){re.escape(param)}(?![\w\[]|\.\w)", error["message"]), error["message"]


def test_odd_values_in_every_place_are_refused_or_honoured(clients):
    body = {name: value for name, value in AGENT.items() if name != "model"} | {
        "system": "Be brief.", "tools": [STOP],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
            {"role": "user", "content": [RESULT | {"is_error": True}, {"type": "text", "text": "a"}]},
        ],
    }  # fmt: skip
    check_odd_bodies(clients.served("thinks"), PATH, body)


def test_limits_and_counts(demo_chat):
    """A count is bounded as a prompt is."""
    url = demo_chat.url
    ask = {"messages": [{"role": "user", "content": "def f(a):\n" * 9}]}
    count = patience.post(url + COUNT, json=ask).json()["input_tokens"]
    used = patience.post(url + PATH, json=ask | {"max_tokens": 1}).json()["usage"]
    assert count == used["input_tokens"] + used["cache_read_input_tokens"]
    for path in (PATH, COUNT):
        answer = patience.post(url + path, json={"messages": [{"role": "user", "content": "x = 1\n" * 300}]} | (
            {"max_tokens": 1} if path == PATH else {}))  # fmt: skip
        assert answer.status_code == 400
        assert "this server takes up to 200 (messages)" in answer.json()["error"]["message"]
    answer = patience.post(url + PATH, json=ask | {"max_tokens": 51})
    assert "this server takes up to 50 (max_tokens)" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def demo_chat():
    config = ServerConfig(model_name="fake", max_prompt_tokens=200, max_tokens=50, max_body_bytes=2**14)
    with Served(fake_engine, config) as served:
        yield served


def test_errors_are_such_as_the_client_raises(demo_chat):
    keyed = ServerConfig(model_name="fake", api_keys=("the-key",))
    with Served(fake_engine, keyed) as served:
        wrong = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            create(wrong, "w1", tools=[])
        error = refused.value
        assert (error.status_code, error.body["error"]["type"]) == (401, "authentication_error")
        assert error.request_id == error.body["request_id"] == error.response.headers["request-id"]
        for right in ({"api_key": "the-key"}, {"auth_token": "the-key"}):
            with anthropic.Anthropic(base_url=served.url, max_retries=0, **right) as client:
                assert client.messages.create(model="fake", max_tokens=1, messages=[USER]).usage.output_tokens == 1
        wrong.close()
    with anthropic.Anthropic(base_url=demo_chat.url, api_key="any", max_retries=0) as client:
        for raised, status, kind, fields in (
            (anthropic.NotFoundError, 404, "not_found_error", {"model": "claude"}),
            (anthropic.BadRequestError, 400, "invalid_request_error", {"max_tokens": 51}),
            (anthropic.APIStatusError, 413, "request_too_large", {"system": "a" * 2**14}),
        ):
            with pytest.raises(raised) as refused:
                client.messages.create(**{"model": "fake", "max_tokens": 1, "messages": [USER]} | fields)
            assert (refused.value.status_code, refused.value.body["error"]["type"]) == (status, kind)
    answer = patience.get(f"{demo_chat.url}{PATH}/batches")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = patience.get(demo_chat.url + PATH, headers={"Host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (421, "invalid_request_error")


def test_a_server_without_a_chat_template_says_so():
    with Served(lambda: fake_engine(chat_template=None)) as served:
        for path in (PATH, COUNT):
            body = {"messages": [USER]} | ({"max_tokens": 1} if path == PATH else {})
            answer = patience.post(served.url + path, json=body)
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
            assert "no chat template" in answer.json()["error"]["message"]


def test_a_stream_that_fails_says_so_and_a_full_queue_is_told():
    stepper = Stepper(ServerConfig(model_name="fake", max_waiting=0))
    with stepper.served as served, ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "w1"}], "stream": True, "max_tokens": 300, "ignore_eos": True}
        answer = pool.submit(patience.post, served.url + PATH, json=body)
        stepper.let(3)
        full = patience.post(served.url + PATH, json=body)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        served.loop.call_soon_threadsafe(served.engine.stop_admitting)
        for request in list(served.engine._active):
            request.cancel()
        stepper.wait_until_cancelled()
        stepper.finish()
        *_, last, nothing = answer.result().text.split("\n\n")
        wait_until(lambda: not served.engine.num_active)
        draining = patience.post(served.url + PATH, json=body)
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (nothing, name, error["error"]["type"]) == ("", "event: error", "overloaded_error")
    assert error["request_id"] == answer.result().headers["request-id"]
    assert (draining.status_code, draining.json()["error"]["type"]) == (503, "overloaded_error")


def test_a_client_that_leaves_its_stream_frees_its_row(fake_served):
    client = anthropic.Anthropic(base_url=fake_served.url, api_key="any", max_retries=0)
    body = {"ignore_eos": True, "speculative": {"drafter": "none"}}
    with (
        client,
        client.messages.create(
            model="fake", max_tokens=390, messages=[{"role": "user", "content": "w1"}], stream=True, extra_body=body
        ) as stream,
    ):
        assert next(iter(stream)).type == "message_start"
    fake_served.wait_until_idle()


def test_the_client_raises_what_a_stream_says(fake_served, monkeypatch):
    from specexport_runtime.decoding import handle

    make = handle.make_chunk

    def fail(event):
        if event.request.stats.rounds > 3:
            raise ValueError("a defect: secret")
        return make(event)

    monkeypatch.setattr(handle, "make_chunk", fail)
    client = anthropic.Anthropic(base_url=fake_served.url, api_key="any", max_retries=0)
    asked = {"model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": "w1"}]}
    with client, pytest.raises(anthropic.APIStatusError, match="api_error") as failed:
        list(client.messages.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert "secret" not in str(failed.value.body)

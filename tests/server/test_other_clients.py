"""Clients of others against our routes of OpenAI and of Anthropic: chats, streams, tools, counts.

The extra ``clients`` installs them: ``pip install -e '.[clients]'``.
"""

import asyncio
import functools
import gc
import json
import operator

import pytest

from tests.support.cases.patience import HANG_S
from tests.support.servers.tool_servers import ARGUMENTS, CITY, THOUGHT, Weather

pytestmark = [
    pytest.mark.whole,  # to import them takes seconds
    pytest.mark.filterwarnings("ignore"),  # theirs are their own
]

ROME = '{"city": "Rome", "days": 1}'
CALL = '\n<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
CALLS = "".join(CALL.replace("ARGUMENTS", each) for each in (ARGUMENTS, ROME))
CALLED = [json.loads(ARGUMENTS), json.loads(ROME)]
SAID = "Hello, world."


@pytest.fixture(scope="module", autouse=True)
def loops():
    """One of them leaves an event loop open, which would be told of some other test."""

    def loose():
        found = [each for each in gc.get_objects() if isinstance(each, asyncio.BaseEventLoop)]
        return {each for each in found if not (each.is_running() or each.is_closed())}

    before = loose()
    yield
    for loop in loose() - before:
        loop.close()


@pytest.fixture
def langchain(clients):
    """A chat model of LangChain, by the route that it takes."""
    reason = "the extra `clients` is not installed"
    by_anthropic = pytest.importorskip("langchain_anthropic", reason=reason)
    by_openai = pytest.importorskip("langchain_openai", reason=reason)

    def model(route, server="thinks"):
        url = clients.served(server).url
        common = {"model": "echo", "api_key": "none", "max_tokens": 300, "temperature": 0, "max_retries": 0}
        if route == "messages":
            return by_anthropic.ChatAnthropic(base_url=url, timeout=HANG_S, **common)
        common |= {"use_responses_api": route == "responses", "stream_usage": True}
        return by_openai.ChatOpenAI(base_url=f"{url}/v1", timeout=HANG_S, **common)

    return model


@pytest.mark.parametrize("route", ["messages", "chat", "responses"])
def test_langchain_chats_and_streams(langchain, route):
    model = langchain(route)
    asked = [("system", "Be brief."), ("user", SAID)]
    whole = model.invoke(asked)
    streamed = functools.reduce(operator.add, model.stream(asked))
    for message in (whole, streamed):
        assert message.text == SAID
        assert message.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"] > 0
        assert message.usage_metadata["output_tokens"] == len(SAID) + 1
    if route != "responses":  # there it leaves them out
        assert model.invoke(asked, stop=["world"]).text == "Hello, "


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["messages", "chat", "responses"])
def test_langchain_calls_tools_and_sends_results(langchain, route, stream):
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain(route).bind_tools([Weather])
    asked = HumanMessage(f"{THOUGHT}So.{CALLS.replace('weather', 'Weather')}")
    message = functools.reduce(operator.add, model.stream([asked])) if stream else model.invoke([asked])
    assert [call["args"] for call in message.tool_calls] == CALLED
    assert message.text == "So."
    results = [
        ToolMessage("rain", tool_call_id=call["id"], status=status)
        for call, status in zip(message.tool_calls, ("success", "error"), strict=True)
    ]
    assert model.invoke([asked, message, *results, HumanMessage("Well.")]).text == "Well."


@pytest.mark.parametrize("route", ["messages", "chat", "responses"])
def test_langchain_gets_a_form(langchain, route):
    pytest.importorskip("llguidance")
    schema = Weather.model_json_schema() | CITY
    form = langchain(route, "hermes").with_structured_output(schema | {"title": "weather"}, method="json_schema")
    assert set(form.invoke("x")) == {"city", "days"}
    tool = {"name": "weather", "description": "Tells it.", "parameters": CITY}
    forced = langchain(route, "hermes").bind_tools([tool], tool_choice="weather").invoke("x")
    assert [(call["name"], set(call["args"])) for call in forced.tool_calls] == [("weather", {"city", "days"})]


def test_langchain_counts_as_the_server_does(langchain):
    from langchain_core.messages import HumanMessage

    model, asked = langchain("messages"), [HumanMessage(SAID)]
    assert model.get_num_tokens_from_messages(asked) == model.invoke(asked).usage_metadata["input_tokens"]


@pytest.fixture
def litellm(monkeypatch, clients):
    """LiteLLM's ``completion`` by a route, and the module."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
    module = pytest.importorskip("litellm", reason="the extra `clients` is not installed")
    monkeypatch.setattr(module, "suppress_debug_info", True)

    def ask(route, messages, *, server="thinks", **more):
        url = clients.served(server).url + ("" if route == "anthropic" else "/v1")
        common = {"api_base": url, "api_key": "none", "max_tokens": 300, "temperature": 0, "timeout": HANG_S}
        return module.completion(model=f"{route}/echo", messages=messages, **common | more)

    return ask, module


ROUTES = ["openai", "hosted_vllm", "anthropic"]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}


@pytest.mark.parametrize("route", ROUTES)
def test_litellm_chats_and_streams(litellm, route):
    ask, _ = litellm
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAID}]
    whole = ask(route, asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SAID, "stop")
    assert whole.usage.completion_tokens == len(SAID) + 1
    chunks = list(ask(route, asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert ask(route, asked, stop=["world"]).choices[0].message.content == "Hello, "


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_litellm_calls_tools_and_sends_results(litellm, route, stream):
    ask, module = litellm
    asked = {"role": "user", "content": f"{THOUGHT}So.{CALLS}"}
    answer = ask(route, [asked], tools=[TOOL], stream=stream)
    message = (module.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
    assert (message.content, message.reasoning_content) == ("So.", "hm, {let me see}")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == CALLED
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    for back in (message, message.model_dump()):
        again = ask(route, [asked, back, *results, {"role": "user", "content": "Well."}], tools=[TOOL])
        assert again.choices[0].message.content == "Well."


@pytest.mark.parametrize("route", ["openai", "anthropic"])  # on the third it takes bounds out of the schema
def test_litellm_is_given_the_call_that_it_wants(litellm, route):
    pytest.importorskip("llguidance")
    ask, _ = litellm
    asked = [{"role": "user", "content": "x"}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        more = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "server": "hermes"}
        (call,) = ask(route, asked, **more).choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
    if route != "anthropic":  # for models that it does not know it asks for a call of its own
        form = ask(route, asked, response_format=Weather, server="hermes").choices[0].message.content
        assert set(json.loads(form)) == {"city", "days"}


def test_litellm_speaks_of_messages_and_counts(litellm, clients):
    _, module = litellm
    where = {"model": "anthropic/echo", "api_base": clients.served("thinks").url, "api_key": "none"}
    asked = [{"role": "user", "content": SAID}]
    answer = asyncio.run(module.anthropic.messages.acreate(max_tokens=30, messages=asked, **where))
    assert answer["content"] == [{"type": "text", "text": SAID}]
    count = asyncio.run(module.acount_tokens(messages=asked, **where))
    assert count.total_tokens == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]

"""Streams with the official client, and what is on the wire."""

import json

import pytest

from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper

MESSAGES = [{"role": "user", "content": "w1 w2"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def texts_of(chunks, count):
    """The text of each choice, and that each ends once, with its last chunk."""
    texts, ended = [""] * count, [False] * count
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert not ended[choice.index]
        texts[choice.index] += choice.text if hasattr(choice, "text") else choice.delta.content or ""
        ended[choice.index] = choice.finish_reason is not None
    assert all(ended)
    return texts


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 4}, {"seed": 4, "stop": ["w3"]}], ids=str)
def test_a_completion_joined_is_the_whole(client, fake_served, params):
    params = {"model": "fake", "prompt": ["w1 w2", "w5"], "n": 1, "max_tokens": 40} | params
    whole = client.completions.create(**params)
    chunks = list(client.completions.create(**params, **USAGE))
    assert texts_of(chunks, 2) == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_usage_goes_along_if_it_is_asked_for(client):
    """As guidellm asks."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    params = {"model": "fake", "prompt": "w1 w2", "max_tokens": 9, "temperature": 0}
    chunks = list(client.completions.create(**params, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {2}


def test_a_chat_joined_is_the_whole(client):
    params = {"model": "fake", "messages": MESSAGES, "seed": 4, "max_tokens": 40, "n": 2}
    whole = client.chat.completions.create(**params)
    chunks = list(client.chat.completions.create(**params, **USAGE))
    assert texts_of(chunks, 2) == [choice.message.content for choice in whole.choices]
    roles = [(c.index, c.delta.role) for chunk in chunks for c in chunk.choices]
    assert roles[:2] == [(0, "assistant"), (1, "assistant")]
    assert {role for _, role in roles[2:]} == {None}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].usage == whole.usage


def test_text_comes_while_it_is_made():
    stepper = Stepper()
    with stepper.served as served, client_of(served) as client:
        stepper.allow(3)
        chunks = iter(client.completions.create(model="fake", prompt="w1", max_tokens=300, stream=True))
        assert next(chunks).choices[0].text
        assert served.engine.num_active == 1
        stepper.allow(300)
        assert list(chunks)[-1].usage is None  # nobody asked
        stepper.finish()


def test_origins_of_tokens(client):
    extra = {"speculative": {"token_origins": True}}
    params = {"model": "fake", "messages": MESSAGES, "seed": 4, "max_tokens": 40, "extra_body": extra}
    chunks = list(client.chat.completions.create(**params, **USAGE))
    tokens = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "tokens", [])]
    assert tokens == client.chat.completions.create(**params).choices[0].tokens
    assert "".join(token["text"] for token in tokens) == texts_of(chunks, 1)[0]
    drafts = chunks[-1].usage.speculative
    assert sum(token["kind"] == "accepted" for token in tokens) == drafts["accepted"] > 0
    told = [getattr(choice, "drafted", 0) for chunk in chunks for choice in chunk.choices]
    assert sum(told) == drafts["drafted"]


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_on_the_wire(fake_served, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = ({"messages": MESSAGES} if chat else {"prompt": 'w1 "é\n'}) | {"stream": True, "max_tokens": 20}
    answer = patience.post(fake_served.url + path, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: {")
        assert "\n" not in event
        choice = json.loads(event[6:])["choices"][0]
        assert set(choice) == {"index", "delta" if chat else "text", "logprobs", "finish_reason"}


def test_choices_interleave():
    with Served(lambda: fake_engine(4, step_seconds=0.005), ServerConfig(model_name="slow")) as served:
        with client_of(served) as client:
            chunks = list(client.completions.create(model="slow", prompt="w1", n=3, max_tokens=40, stream=True))
        served.wait_until_idle()
    order = [choice.index for chunk in chunks for choice in chunk.choices]
    assert order != sorted(order)
    assert set(order) == {0, 1, 2}

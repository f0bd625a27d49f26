"""The end of a request that is not its answer: the client goes away, the time is up, the engine fails."""

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest
from openai_help import alone, client_of
from serving import Served, fake_engine

from specexport_runtime.decoding import handle
from specexport_runtime.server.config import ServerConfig

MESSAGES = [{"role": "user", "content": "w1"}]
LONG = {"model": "slow", "prompt": "w1 w2", "max_tokens": 390}


@pytest.fixture(scope="module")
def slow():
    """One row, and a step takes a while."""
    with Served(lambda: fake_engine(1, step_seconds=0.005), ServerConfig(model_name="slow")) as served:
        yield served


@pytest.fixture
def cancelled(slow, monkeypatch):
    """Requests that were cancelled before they ended, with their rounds at that time."""
    seen = []
    cancel = slow.engine.engine._loop.cancel

    def note(request):
        if request.sequence.finish_reason is None:
            seen.append((request, request.sequence.stats.rounds))
        cancel(request)

    monkeypatch.setattr(slow.engine.engine._loop, "cancel", note)
    return seen


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def post_and_leave(served, body, *, when):
    """Send a request and close the connection once ``when()`` holds."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_for(when)


def running(served):
    return served.engine.engine._loop.decoder.running


def check_row_is_free(served, cancelled, count):
    """All ``count`` sequences were cancelled, none of them did more than the round that it was in."""
    served.wait_until_idle()
    rounds_at = {}
    for request, rounds in cancelled:
        rounds_at.setdefault(id(request), (request, rounds))  # the first time counts
    assert len(rounds_at) == count
    for request, rounds in rounds_at.values():
        assert request.sequence.finish_reason == "cancelled"
        assert request.sequence.stats.rounds <= rounds + 1
    with client_of(served) as client:  # and the row serves others
        text = client.completions.create(model="slow", prompt="w3", temperature=0, max_tokens=5).choices[0].text
    assert text == alone(served, "w3", temperature=0, max_tokens=5).text


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(slow, cancelled, stream, n):
    post_and_leave(slow, LONG | {"stream": stream, "n": n}, when=lambda: running(slow))
    check_row_is_free(slow, cancelled, n)


def test_a_client_that_goes_away_while_it_waits(slow, cancelled):
    with client_of(slow) as client, client.completions.create(**LONG, stream=True, temperature=0) as first:
        chunks = iter(first)
        next(chunks)
        post_and_leave(slow, LONG, when=lambda: slow.engine.num_active == 2)
        wait_for(lambda: slow.engine.num_active == 1)
        assert {id(request) for request, _ in cancelled} == {id(cancelled[0][0])}
        assert cancelled[0][0].sequence.stats.rounds == 0  # it never got a row
        assert list(chunks)[-1].choices[0].finish_reason == "length"  # nothing happened to the other one
    slow.wait_until_idle()


def test_closing_a_stream_of_the_official_client(slow, cancelled):
    with client_of(slow) as client:
        stream = client.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
        next(iter(stream))
        stream.close()
    check_row_is_free(slow, cancelled, 1)


def test_cancelling_a_task_of_the_official_client(slow, cancelled):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
            task = asyncio.create_task(client.completions.create(**LONG))
            while not running(slow):
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    check_row_is_free(slow, cancelled, 1)


@pytest.fixture(scope="module")
def hasty():
    config = ServerConfig(model_name="slow", request_timeout_s=0.3)
    with Served(lambda: fake_engine(1, step_seconds=0.01), config) as served:
        yield served


def test_a_request_that_takes_too_long(hasty):
    with client_of(hasty) as client, pytest.raises(openai.InternalServerError) as late:
        client.completions.create(**LONG, n=2, extra_body={"speculative": {"drafter": "none"}})
    assert late.value.status_code == 504
    assert (late.value.code, late.value.type) == ("request_timeout", "timeout_error")
    hasty.wait_until_idle()


def test_a_stream_that_takes_too_long_ends_with_an_error(hasty):
    body = LONG | {"stream": True, "speculative": {"drafter": "none"}}
    events = httpx.post(f"{hasty.url}/v1/completions", json=body).text.strip().split("\n\n")
    assert len(events) > 1
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert all("error" not in event for event in events[:-1])
    hasty.wait_until_idle()
    with client_of(hasty) as client, pytest.raises(openai.APIError, match="took more than"):
        list(client.completions.create(**LONG, stream=True, extra_body={"speculative": {"drafter": "none"}}))
    hasty.wait_until_idle()


@pytest.fixture
def failing(monkeypatch):
    """Requests with the seed 666 fail in their fourth round, whatever is beside them."""
    make = handle.make_chunk

    def fail(event):
        if event.sequence.params.seed == 666 and event.sequence.stats.rounds > 3:
            raise ValueError("a defect: secret")
        return make(event)

    monkeypatch.setattr(handle, "make_chunk", fail)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_ends_one_request_and_no_other(fake_served, failing, n, caplog):
    texts = []

    def ask_beside():
        with client_of(fake_served) as client:
            answer = client.completions.create(model="fake", prompt="w5", seed=1, max_tokens=300)
            texts.append(answer.choices[0].text)

    thread = threading.Thread(target=ask_beside)
    thread.start()
    with client_of(fake_served) as client:
        params = {"model": "fake", "prompt": "w1", "max_tokens": 300, "seed": 667 - n, "n": n}
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**params)
        assert (failed.value.status_code, failed.value.type) == (500, "server_error")
        assert "secret" not in str(failed.value.body)
        with pytest.raises(openai.APIError, match="server failed"):
            list(client.completions.create(**params, stream=True))
    thread.join(30)
    fake_served.wait_until_idle()
    assert texts == [alone(fake_served, "w5", seed=1, max_tokens=300).text]
    assert "secret" in caplog.text  # the log says what


def test_a_server_that_shuts_down_says_so_in_the_stream():
    config = ServerConfig(model_name="slow")
    with Served(lambda: fake_engine(1, step_seconds=0.005), config) as served, client_of(served) as client:
        stream = iter(client.completions.create(**LONG, stream=True))
        next(stream)
        served.call(served.engine.drain(0))
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**LONG)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")

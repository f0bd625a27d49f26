"""The end of a request that is not its answer: the client goes away, the time is up, the engine fails."""

import asyncio
import json
import socket
import threading

import openai
import pytest

from specexport_runtime.decoding import handle
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.openai_help import alone, client_of
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper

MESSAGES = [{"role": "user", "content": "w1"}]
PLAIN = {"speculative": {"drafter": "none"}}  # 390 steps: it runs for seconds
LONG = {"model": "slow", "prompt": "w1 w2", "max_tokens": 390}


@pytest.fixture(scope="module")
def slow():
    """One row, and a step is made when a test says so."""
    stepper = Stepper(ServerConfig(model_name="slow"))
    with stepper.served:
        yield stepper


@pytest.fixture
def cancelled(slow, monkeypatch):
    """Requests that were cancelled before they ended, with their rounds at that time."""
    seen = []
    cancel = slow.served.engine.engine._loop.cancel

    def note(request):
        if request.request.finish_reason is None:
            seen.append((request, request.request.stats.rounds))
        cancel(request)

    monkeypatch.setattr(slow.served.engine.engine._loop, "cancel", note)
    return seen


def post_and_leave(slow, body, *, when):
    """Send a request and close the connection once ``when()`` holds."""
    port, data = slow.served.port, json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(when)


def running(slow):
    return slow.served.engine.engine._loop.decoder.running


def check_row_is_free(slow, cancelled, count):
    """All ``count`` sequences were cancelled, none of them did more than the round that it was in."""
    slow.wait_until_cancelled(count)
    slow.finish()
    rounds_at = {}
    for request, rounds in cancelled:
        rounds_at.setdefault(id(request), (request, rounds))  # the first time counts
    assert len(rounds_at) == count
    for request, rounds in rounds_at.values():
        assert request.request.finish_reason == "cancelled"
        assert request.request.stats.rounds <= rounds + 1
    slow.allow(1000)
    with client_of(slow.served) as client:  # and the row serves others
        text = client.completions.create(model="slow", prompt="w3", temperature=0, max_tokens=5).choices[0].text
    assert text == alone(slow.served, "w3", temperature=0, max_tokens=5).text
    slow.finish()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(slow, cancelled, stream, n):
    post_and_leave(slow, LONG | {"stream": stream, "n": n}, when=lambda: running(slow))
    check_row_is_free(slow, cancelled, n)


def test_a_client_that_goes_away_while_it_waits(slow, cancelled):
    slow.allow(3)
    with client_of(slow.served) as client, client.completions.create(**LONG, stream=True, temperature=0) as first:
        chunks = iter(first)
        next(chunks)
        post_and_leave(slow, LONG, when=lambda: slow.served.engine.num_active == 2)
        slow.wait_until_cancelled()
        slow.allow(1)
        wait_until(lambda: slow.served.engine.num_active == 1)
        assert {id(request) for request, _ in cancelled} == {id(cancelled[0][0])}
        assert cancelled[0][0].request.stats.rounds == 0  # it never got a row
        slow.allow(1000)
        assert list(chunks)[-1].choices[0].finish_reason == "length"  # nothing happened to the other one
    slow.finish()


def test_closing_a_stream_of_the_official_client(slow, cancelled):
    slow.allow(3)
    with client_of(slow.served) as client:
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
    config = ServerConfig(model_name="slow", request_timeout_s=0.6)
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
    events = patience.post(f"{hasty.url}/v1/completions", json=body).text.strip().split("\n\n")
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
        if event.request.params.seed == 666 and event.request.stats.rounds > 3:
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
    thread.join(HANG_S)
    fake_served.wait_until_idle()
    assert texts == [alone(fake_served, "w5", seed=1, max_tokens=300).text]
    assert "secret" in caplog.text  # the log says what


def test_a_server_that_shuts_down_says_so_in_the_stream():
    config = ServerConfig(model_name="slow")
    with Served(lambda: fake_engine(1, step_seconds=0.005), config) as served, client_of(served) as client:
        stream = iter(client.completions.create(**LONG, stream=True, extra_body=PLAIN))
        next(stream)
        served.call(served.engine.drain(0))
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**LONG)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")

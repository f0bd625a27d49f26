"""The end of a request that is not its answer: the client goes away, the time is up, the engine fails."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from specexport_runtime.decoding import handle
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.openai_help import alone, async_client_of, client_of
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper

MESSAGES = [{"role": "user", "content": "w1"}]
PLAIN = {"speculative": {"drafter": "none"}}  # 390 steps: it runs for seconds
LONG = {"model": "slow", "prompt": "w1 w2", "max_tokens": 390}


@pytest.fixture(scope="module")
def slow():
    stepper = Stepper()
    with stepper.served:
        yield stepper


def test_a_stream_that_the_official_client_closes_frees_its_row(slow):
    begun = slow.steps
    slow.allow(3)
    with client_of(slow.served) as client:
        stream = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        next(iter(stream))
        wait_until(lambda: slow.steps == begun + 3 and slow.inside)
        stream.close()
        slow.wait_until_cancelled()
    gone = slow.steps
    slow.finish()
    assert slow.steps == gone + 1


def test_a_task_of_the_official_client_that_is_cancelled_frees_its_row(slow):
    async def ask():
        async with async_client_of(slow.served) as client:
            task = asyncio.create_task(client.completions.create(**LONG | {"model": "fake"}))
            await asyncio.to_thread(slow.let, 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    slow.wait_until_cancelled()
    gone = slow.steps
    slow.finish()
    assert slow.steps == gone + 1


def test_what_takes_too_long_ends_with_an_error():
    """Whole and streamed, the one that runs and the one that waits for the row."""
    config = ServerConfig(model_name="slow", request_timeout_s=0.4)
    body = LONG | {"stream": True, **PLAIN}
    with (
        Served(lambda: fake_engine(1, step_seconds=0.01), config) as served,
        client_of(served) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        beside = pool.submit(patience.post, f"{served.url}/v1/completions", json=body)
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(**LONG, n=2, extra_body=PLAIN)
        assert (late.value.status_code, late.value.code, late.value.type) == (504, "request_timeout", "timeout_error")
        *events, last, done = beside.result().text.split("\n\n")
        assert done == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert all("error" not in event for event in events)
        with pytest.raises(openai.APIError, match="took more than"):
            list(client.completions.create(**LONG, stream=True, extra_body=PLAIN))
        served.wait_until_idle()


@pytest.fixture
def failing(monkeypatch):
    """Requests with the seed 666 fail in their fourth round, whatever is beside them."""
    make = handle.make_chunk

    def fail(event):
        if event.request.params.seed == 666 and event.request.stats.rounds > 3:
            raise ValueError("a defect: secret")
        return make(event)

    monkeypatch.setattr(handle, "make_chunk", fail)


def test_a_failure_ends_one_request_and_no_other(fake_served, failing, caplog):
    texts = []

    def ask_beside():
        with client_of(fake_served) as client:
            answer = client.completions.create(model="fake", prompt="w5", seed=1, max_tokens=300)
            texts.append(answer.choices[0].text)

    thread = threading.Thread(target=ask_beside)
    thread.start()
    with client_of(fake_served) as client:
        params = {"model": "fake", "prompt": "w1", "max_tokens": 300, "seed": 664, "n": 3}
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

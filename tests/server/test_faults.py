"""The end of a request that is not its answer: the client goes away, the time is up, the engine fails."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from specexport_runtime import SpecEngine
from specexport_runtime.decoding import handle
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.openai_help import alone, client_of
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.wire import Wire

LONG = {"prompt": "w1 w2", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "w5 w6 w7", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
ENDPOINTS = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {key: value for key, value in LONG.items() if key != "prompt"}
    | {"messages": [{"role": "user", "content": "w1 w2"}]},
    "/v1/responses": {"input": "w1 w2", "max_output_tokens": 300, "ignore_eos": True, "temperature": 0},
    "/v1/messages": {key: value for key, value in LONG.items() if key != "prompt"}
    | {"messages": [{"role": "user", "content": "w1 w2"}]},
}
PLAIN = {"speculative": {"drafter": "none"}}  # 390 steps: it runs for seconds
OPENAI = {"model": "slow", "prompt": "w1 w2", "max_tokens": 390}


@pytest.fixture(scope="module")
def stepper():
    made = Stepper()
    with made.served:
        yield made


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def check_gone(stepper: Stepper, requests: int = 1) -> None:
    """The round that was going on when the server saw that a client is gone was the last one."""
    stepper.wait_until_cancelled(requests)
    gone = stepper.steps
    stepper.finish()
    assert stepper.steps == gone + 1


def running(served: Served) -> int:
    return len(served.engine.engine._loop.decoder.running)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("stream", "after"), [(True, 0), (True, 3), (False, 1)])
def test_a_client_that_goes_away_frees_its_row_within_a_round(stepper, path, stream, after):
    with Wire(stepper.served.port) as wire:
        wire.post(ENDPOINTS[path] | {"stream": stream}, path)
        stepper.let(after)
        wire.reset()
        check_gone(stepper)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(stepper, stream):
    with ThreadPoolExecutor(1) as pool, Wire(stepper.served.port) as waiting:
        first = pool.submit(patience.post, f"{stepper.url}/v1/completions", json=SHORT)
        stepper.let(0)
        waiting.post(LONG | {"stream": stream})
        wait_until(lambda: stepper.served.engine.num_active == 2)
        waiting.reset()
        stepper.wait_until_cancelled()
        stepper.let(1)
        wait_until(lambda: stepper.served.engine.num_active == 1)
        stepper.finish()
        text = text_of(first.result())
        alone = pool.submit(patience.post, f"{stepper.url}/v1/completions", json=SHORT)
        stepper.let(0)
        stepper.finish()
        assert text_of(alone.result()) == text


def test_a_client_that_closes_only_its_side_is_gone_too(stepper):
    with Wire(stepper.served.port) as wire:
        wire.post(LONG | {"stream": True})
        stepper.let(2)
        wire.socket.shutdown(1)
        check_gone(stepper)


def test_a_client_that_asked_for_more_before_it_went_away_is_noticed_too(stepper):
    with Wire(stepper.served.port) as wire:
        wire.post(LONG)
        stepper.let(1)
        wire.post(LONG)
        (protocol,) = stepper.served._server.server_state.connections
        wait_until(lambda: protocol._deaf)
        wire.reset()
        check_gone(stepper)


def test_all_choices_of_a_client_end_with_it(stepper):
    with Wire(stepper.served.port) as wire:
        wire.post(LONG | {"n": 3, "stream": True, "temperature": 1})
        stepper.let(2)
        assert stepper.served.engine.num_active == 3
        wire.reset()
        check_gone(stepper, 3)


class FailsOnce:
    def __init__(self) -> None:
        self.armed = threading.Event()

    def engine(self) -> SpecEngine:
        engine = fake_engine(rows=2, step_seconds=0.03)
        execute = engine.target.execute

        def fail_once(*args: Any) -> Any:
            if self.armed.is_set():
                self.armed.clear()
                raise RuntimeError("secret of the engine")
            return execute(*args)

        engine.target.execute = fail_once
        return engine


def test_a_failing_step_ends_what_it_ran_and_nothing_else(caplog):
    fault = FailsOnce()
    with Served(fault.engine) as served, ThreadPoolExecutor(4) as pool:
        url = f"{served.url}/v1/completions"
        alone = text_of(patience.post(url, json=SHORT))
        with Wire(served.port) as stream:
            stream.post(LONG | {"stream": True}, X_Request_Id="the-stream")
            whole = pool.submit(patience.post, url, json=LONG, headers={"X-Request-Id": "the-other"})
            stream.until(b"data: ")
            wait_until(lambda: running(served) == 2)
            waiting = [pool.submit(patience.post, url, json=SHORT) for _ in range(3)]
            wait_until(lambda: served.engine.num_active == 5)
            fault.armed.set()
            events = stream.until(b"\r\n0\r\n\r\n")
        assert b'"server_error"' in events
        assert b"[DONE]" not in events
        failed = whole.result()
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert b"secret" not in events + failed.content
        assert [text_of(answer.result()) for answer in waiting] == [alone] * 3
        assert text_of(patience.post(url, json=SHORT)) == alone
        served.wait_until_idle()
    told = {record.fields["request_id"] for record in caplog.records if record.exc_info and hasattr(record, "fields")}
    assert told == {"the-stream", "the-other"}  # the log has the reason


def test_clients_that_come_and_go_change_nobodys_text():
    with Served(lambda: fake_engine(rows=4)) as served, ThreadPoolExecutor(4) as pool:
        url = f"{served.url}/v1/completions"
        asks = [{"prompt": f"w{i} w{i + 1}", "max_tokens": 60, "seed": i, "temperature": 0.8} for i in range(8)]
        alone = [text_of(patience.post(url, json=ask)) for ask in asks]
        answers = [pool.submit(patience.post, url, json=ask) for ask in asks * 2]
        for number in range(24):
            with Wire(served.port) as wire:
                wire.post(LONG | {"stream": number % 2 == 0, "n": 1 + number % 3, "temperature": 1})
                if number % 4 == 0:
                    wire.until(b"HTTP/1.1")
                wire.reset()
        assert [text_of(answer.result()) for answer in answers] == alone * 2
        served.wait_until_idle()


def test_a_request_that_cannot_be_served_changes_nobodys_text(stepper):
    url = f"{stepper.url}/v1/completions"
    bad = [b"{", b"[]", b"null", json.dumps(SHORT | {"temperature": -1}).encode(), json.dumps(SHORT | {"n": 10**9})]
    texts = []
    with ThreadPoolExecutor(1) as pool:
        for bodies in ([], bad):
            good = pool.submit(patience.post, url, json=SHORT)
            stepper.let(1)
            for body in bodies:
                answer = patience.post(url, content=body, headers={"Content-Type": "application/json"})
                assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert running(stepper.served) == 1
            stepper.finish()
            texts.append(text_of(good.result()))
    assert texts[0] == texts[1]


def test_what_takes_too_long_ends_with_an_error():
    """Whole and streamed, the one that runs and the one that waits for the row."""
    config = ServerConfig(model_name="slow", request_timeout_s=0.4)
    body = OPENAI | {"stream": True, **PLAIN}
    with (
        Served(lambda: fake_engine(1, step_seconds=0.01), config) as served,
        client_of(served) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        beside = pool.submit(patience.post, f"{served.url}/v1/completions", json=body)
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(**OPENAI, n=2, extra_body=PLAIN)
        assert (late.value.status_code, late.value.code, late.value.type) == (504, "request_timeout", "timeout_error")
        *events, last, done = beside.result().text.split("\n\n")
        assert done == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert all("error" not in event for event in events)
        with pytest.raises(openai.APIError, match="took more than"):
            list(client.completions.create(**OPENAI, stream=True, extra_body=PLAIN))
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

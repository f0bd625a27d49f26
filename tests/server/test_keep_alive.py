"""Connections between requests: clients keep them in pools, and send on them after a long time."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from specexport_runtime.server import connection, listener, sse
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.openai_help import client_of
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.wire import HEALTH, Wire, request

ASK = {"prompt": "w1 w2", "max_tokens": 3}
AT_ONCE_S = 0.05


def protocols(served):
    return list(served._server.server_state.connections)


def test_a_client_is_told_how_long_its_connection_may_rest(fake_served):
    assert ServerConfig().keep_alive_timeout_s == 75
    for ask in (HEALTH, request(ASK), request(ASK | {"stream": True}), request({}), request(ASK, "/nothing")):
        with Wire(fake_served.port) as wire:
            wire.send(ask)
            headers = wire.head()[1]
            assert (headers["connection"], headers["keep-alive"]) == ("keep-alive", "timeout=75")
            (protocol,) = protocols(fake_served)
            assert protocol.timeout_keep_alive > 75  # what is sent in the last second arrives
        wait_until(lambda: not protocols(fake_served))


@pytest.mark.parametrize(
    ("ask", "draining"),
    [
        (request(ASK, Connection="close"), False),
        (HEALTH.replace(b"1.1", b"1.0"), False),
        (HEALTH.replace(b"1.1\r\n", b"1.0\r\nConnection: keep-alive\r\n"), False),
        (HEALTH + HEALTH, False),  # the second is dropped
        (request(b"", Expect="100-continue").replace(b"Length: 0", b"Length: 99999999"), False),  # it may never come
        (b"GARBAGE\r\n\r\n", False),
        (HEALTH, True),
    ],
    ids=["wanted", "HTTP/1.0", "HTTP/1.0 that wants more", "two at once", "no body", "no HTTP", "draining"],
)
def test_a_connection_that_is_closed_is_not_told_to_rest(fake_served, monkeypatch, ask, draining):
    monkeypatch.setattr(fake_served.app.state.server, "draining", draining)
    with Wire(fake_served.port) as wire:
        wire.send(ask)
        headers = wire.head()[1]
        assert headers["connection"] == "close"
        assert "keep-alive" not in headers
        wire.rest()


def test_a_connection_rests_longer_than_a_request_may_take_to_begin(monkeypatch):
    """Before the first request, between two, and after one that was answered before its body was there."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", AT_ONCE_S)
    config = ServerConfig(model_name="fake", max_body_bytes=500)
    begun = {b"": None, HEALTH: 200, request(b"x" * 600): 413, request(ASK, Host="elsewhere"): 421}
    with Served(fake_engine, config) as served, ExitStack() as stack:
        wires = {first: stack.enter_context(Wire(served.port)) for first in begun}
        for first, wire in wires.items():
            if first.startswith(b"POST"):
                wire.send(first[:-1])
                assert wire.reply().status == begun[first]
                wire.send(first[-1:])
            elif first:
                wire.send(first)
                assert wire.reply().status == begun[first]
        time.sleep(4 * AT_ONCE_S)
        for wire in wires.values():
            wire.post(ASK)
            assert wire.reply().status == 200


def test_a_connection_that_rests_too_long_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_GRACE_S", 0.1)
    with Served(fake_engine, ServerConfig(keep_alive_timeout_s=0.1)) as served:
        with Wire(served.port) as fresh, Wire(served.port) as wire:
            wire.send(HEALTH)
            assert "keep-alive" not in wire.reply().headers  # there is no number for less than a second
            assert fresh.rest() == wire.rest() == b""
        wait_until(lambda: not protocols(served))


def test_a_request_that_came_while_the_server_was_busy_is_answered(fake_served):
    """The time is up in the same turn of the event loop in which the request waits to be read."""
    with Wire(fake_served.port) as wire:
        wire.send(HEALTH)
        assert wire.reply().status == 200
        (protocol,) = protocols(fake_served)

        async def both() -> None:
            wire.send(request(ASK))
            protocol.timeout_keep_alive_handler()

        fake_served.call(both())
        assert wire.reply().status == 200


def test_one_more_connection_takes_the_place_of_the_one_that_rested_the_longest(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", HANG_S)
    with (
        Served(fake_engine, ServerConfig(max_connections=3)) as served,
        Wire(served.port) as oldest,
        Wire(served.port) as busy,
        Wire(served.port) as younger,
    ):
        for wire in (oldest, busy, younger):
            wire.send(HEALTH)
            assert wire.reply().status == 200
        busy.send(HEALTH[:10])
        wait_until(lambda: any(each._in_head for each in protocols(served)))
        with Wire(served.port) as more:
            more.post(ASK)
            assert more.reply().status == 200
            assert oldest.rest() == b""
            busy.send(HEALTH[10:])
            younger.post(ASK)
            assert [busy.reply().status, younger.reply().status] == [200, 200]
        wait_until(lambda: len(protocols(served)) == 2)


def test_the_end_of_a_server_waits_for_nobody_who_rests(monkeypatch):
    """It would wait for ever: it gives clients that long to read the end of their answers."""
    monkeypatch.setattr(listener, "LAST_WORDS_S", 10 * HANG_S)
    with ExitStack() as later, Served(fake_engine) as served:  # the clients are still there when the server ends
        _, wire = (later.enter_context(Wire(served.port)) for _ in range(2))
        wire.send(HEALTH)
        assert wire.reply().status == 200
        wait_until(lambda: len(protocols(served)) == 2)
    assert not protocols(served)


def test_a_silent_stream_sends_comments_that_clients_skip(monkeypatch):
    monkeypatch.setattr(sse, "SILENCE_S", 0.02)
    stepper = Stepper()
    ask = ASK | {"temperature": 0, "stream": True}
    with stepper.served as served:
        with Wire(served.port) as wire, client_of(served) as client, ThreadPoolExecutor(1) as beside:
            chunks = beside.submit(lambda: list(client.completions.create(model="fake", **ask)))
            stepper.let(0)
            wire.post(ask)  # waits for the row
            for _ in range(3):
                wire.until(b":\n\n")
            stepper.allow(10_000)
            texts = ["".join(chunk.choices[0].text for chunk in chunks.result(HANG_S))]
            events = wire.until(b"[DONE]\n\n")
            texts.append(
                "".join(json.loads(each)["choices"][0]["text"] for each in re.findall(rb"data: (\{.*)", events))
            )
        monkeypatch.setattr(sse, "SILENCE_S", HANG_S)
        whole = patience.post(f"{served.url}/v1/completions", json=ask | {"stream": False}).json()
        assert texts == [whole["choices"][0]["text"]] * 2
        stepper.finish()

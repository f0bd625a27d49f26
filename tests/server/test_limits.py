import dataclasses
import json
import resource
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from specexport_runtime.server import completions, connection
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.listener import bind, format_url, raise_open_file_limit
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.wire import HEALTH, POST, Wire, request

ASK = {"prompt": "w1 w2", "max_tokens": 3}
ABORT = connection.BoundedProtocol._abort


def connections(served: Served) -> int:
    return len(served._server.server_state.connections)


@pytest.fixture(scope="module")
def tight():
    with Served(lambda: fake_engine(rows=1), ServerConfig(model_name="fake", max_body_bytes=500)) as served:
        yield served


@pytest.fixture(scope="module")
def stepper():
    """One runs and two may wait; nothing moves until a test lets it."""
    made = Stepper(ServerConfig(model_name="fake", max_waiting=2))
    with made.served:
        yield made


def padded(size: int) -> bytes:
    return json.dumps(ASK).encode().ljust(size)


def cut_off(wire: Wire, data: bytes) -> bool:
    try:
        wire.send(data)
    except OSError:
        return True
    time.sleep(0.01)
    return False


def test_a_body_of_the_largest_size_is_taken_and_one_byte_more_is_not(tight):
    """Counted as it comes, or refused for what it says of itself; the connection goes on."""
    with Wire(tight.port) as wire:
        for size, status in ((500, 200), (501, 413), (600, 413), (500, 200)):
            wire.post(padded(size))
            reply = wire.reply()
            assert reply.status == status
            assert status == 200 or reply.code == "body_too_large"
    chunk = b"64\r\n" + b" " * 100 + b"\r\n"
    for ask in (b"Content-Length: 999999999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 6):
        with Wire(tight.port) as wire:
            assert wire.ask(POST + ask).code == "body_too_large"


def test_what_follows_a_refused_body_is_cut_off(fake_served, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with Wire(fake_served.port) as wire:
        assert wire.ask(POST + b"Content-Length: 999999999\r\n\r\n").status == 413
        wait_until(lambda: cut_off(wire, b"x" * 1000))


def test_a_client_that_goes_away_in_its_body_leaves_nothing(tight):
    with Wire(tight.port) as wire:
        wire.send(POST + b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: connections(tight) == 1)
        wire.reset()
    wait_until(lambda: connections(tight) == 0 and not tight._server.server_state.tasks)


def test_a_slow_body_holds_no_row():
    """It is not waited for, either."""
    config = ServerConfig(model_name="fake", body_timeout_s=0.3)
    with Served(lambda: fake_engine(rows=1), config) as served, Wire(served.port) as slow, Wire(served.port) as quick:
        slow.send(POST + b"Content-Length: 100\r\n\r\n{")
        assert quick.ask(request(ASK)).status == 200  # head and body at once
        reply = slow.reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (408, "request_too_slow", "close")
        assert slow.rest() == b""
        assert served.engine.num_active == 0


def test_more_than_may_wait_are_refused_and_the_others_are_not_touched(stepper):
    ask = {"prompt": "w3 w4", "max_tokens": 8, "temperature": 0}
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(stepper.served.port)) for _ in range(6)]
        stepper.allow(100)
        alone = json.loads(wires[0].ask(request(ask)).body)["choices"][0]["text"]
        stepper.finish()
        for number, wire in enumerate(wires):
            wire.post(ask | {"max_tokens": 40} if number == 0 else ask)
            wait_until(lambda number=number: stepper.served.engine.num_active == min(number + 1, 3))
            if number == 1:  # there is room for one of two choices
                assert wires[5].ask(request(ask | {"n": 2})).code == "queue_full"
        refused = [wire.reply() for wire in wires[3:]]
        stepper.finish()
        taken = [wire.reply() for wire in wires[:3]]
        assert [reply.status for reply in taken + refused] == [200, 200, 200, 429, 429, 429]
        assert {reply.code for reply in refused} == {"queue_full"}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        texts = [json.loads(reply.body)["choices"][0]["text"] for reply in taken]
        assert texts[0].startswith(alone)
        assert texts[1:] == [alone, alone]
        stepper.allow(100)
        assert wires[5].ask(request(ask)).status == 200  # there is room again
    stepper.finish()


def test_work_before_admission_is_shared_counted_and_dropped(monkeypatch):
    """One key's long prompts hold its places, and up nobody else; what a client left is not worked on."""
    go, planned = threading.Event(), []
    plan = completions.plan_completion

    def held(body, *args):
        planned.append(len(body.prompt))
        if len(body.prompt) > 100_000:
            assert go.wait(patience.HANG_S)
        return plan(body, *args)

    monkeypatch.setattr(completions, "plan_completion", held)
    keys = [letter * 20 for letter in "ab"]
    bearer = [{"Authorization": f"Bearer {key}"} for key in keys]
    with ExitStack() as stack:
        served = stack.enter_context(Served(fake_engine, ServerConfig(api_keys=tuple(keys), max_requests_per_key=2)))
        first, gone, third, other = (stack.enter_context(Wire(served.port)) for _ in range(4))
        first.post(ASK | {"prompt": "w1 " * 40_000}, **bearer[0])
        wait_until(lambda: planned)
        gone.post(ASK | {"prompt": "w1 " * 40_001}, **bearer[0])
        wait_until(lambda: served.engine._planned == 2)
        refused = third.ask(request(ASK, **bearer[0]))
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert other.ask(request(ASK | {"prompt": "w1" + " " * 4000}, **bearer[1])).status == 200
        gone.reset()
        wait_until(lambda: served.engine._planned == 1)
        go.set()
        assert first.reply().code == "context_length_exceeded"
        assert third.ask(request(ASK, **bearer[0])).status == 200
        assert planned == [120_000, 4002, 5]


@pytest.fixture
def unread(monkeypatch):
    """A server that keeps little of what is not read; the time of its one client is up when a test has looked.

    The client's connection is impatient, while its requests have all the time that they need.
    """
    given_up = []
    monkeypatch.setattr(connection.BoundedProtocol, "_abort", lambda self: given_up.append(self))  # noqa: PLW0108
    served = Served(lambda: fake_engine(rows=4))
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with served, Wire(served.port, receive_buffer=4096) as wire:
        wait_until(lambda: connections(served) == 1)
        (protocol,) = served._server.server_state.connections
        protocol._settings = dataclasses.replace(served.config, request_timeout_s=0.2)
        yield served, wire, protocol
        wait_until(lambda: given_up)
        served.loop.call_soon_threadsafe(ABORT, given_up[0])
        wait_until(lambda: connections(served) == 0 and not served._server.server_state.tasks)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_does_not_read_holds_neither_row_nor_memory(stream, unread):
    served, wire, protocol = unread
    wire.post(ASK | {"max_tokens": 100, "ignore_eos": True, "n": 4, "stream": stream, "logprobs": 17})
    wait_until(lambda: protocol.flow is not None and protocol.flow.write_paused)
    served.wait_until_idle()  # the rows are free while the client is still there
    assert connections(served) == 1
    assert not stream or protocol.transport.get_write_buffer_size() < 256 * 1024


def test_a_short_answer_that_is_never_read_keeps_no_connection_for_ever(unread):
    _, wire, protocol = unread
    wire.post(ASK | {"max_tokens": 20, "n": 2, "ignore_eos": True, "logprobs": 17}, Connection="close")
    wait_until(lambda: protocol.transport is not None and protocol.transport.is_closing())
    assert 0 < protocol.transport.get_write_buffer_size() < 64 * 1024  # too little for the transport to complain


def test_a_slow_head_is_not_waited_for(fake_served, monkeypatch):
    """Nor do empty lines keep a connection open, before a first request or after one."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    with Wire(fake_served.port) as wire, Wire(fake_served.port) as fresh, Wire(fake_served.port) as known:
        reply = wire.ask(POST)
        assert (reply.status, reply.code) == (408, "request_too_slow")
        assert wire.rest() == b""
        assert known.ask(HEALTH).status == 200
        for empty in (fresh, known):
            wait_until(lambda empty=empty: cut_off(empty, b"\r\n"))
            assert empty.rest() == b""


def head_of(size: int) -> bytes:
    return (HEALTH[:-2] + b"X-Long: ").ljust(size - 4, b"x") + b"\r\n\r\n"


@pytest.mark.parametrize("parts", [1, 3])
def test_the_limit_of_a_head_is_exact_however_it_comes(fake_served, parts):
    with Wire(fake_served.port) as wire:
        for size in (connection.MAX_HEAD_BYTES, connection.MAX_HEAD_BYTES, connection.MAX_HEAD_BYTES + 1):
            head = head_of(size)
            for at in range(parts):
                wire.send(head[at * size // parts : (at + 1) * size // parts])
                time.sleep(0.01 * (parts - 1))
            reply = wire.reply()
            if size <= connection.MAX_HEAD_BYTES:
                assert reply.status == 200
            else:
                assert (reply.status, reply.code) == (431, "head_too_large")
        assert wire.rest() == b""


def test_a_large_body_that_comes_with_its_head_is_no_head(fake_served):
    ask = request(padded(4 * connection.MAX_HEAD_BYTES))
    with Wire(fake_served.port) as wire:
        assert [wire.ask(ask).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    ("first", "then"),
    [(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk, b"")
     for chunk in (b"zz\r\n", b"-1\r\n", b"1" * 30 + b"\r\n", b"2\r\n{}!!")]
    + [(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", chunk) for chunk in (b"zz\r\n", b"2\r\n{}!!")]
    + [(b"\x16\x03\x01 hello\r\n\r\n", b"")],
)  # fmt: skip
def test_what_is_no_http_gets_an_answer_in_our_shape(fake_served, first, then):
    with Wire(fake_served.port) as wire:
        wire.send(first)
        if then:  # in the middle of the body of a request that was taken
            wait_until(lambda: any(each.cycle is not None for each in fake_served._server.server_state.connections))
            wire.send(then)
        reply = wire.reply()
        assert (reply.status, reply.code) == (400, "bad_http")
        assert wire.rest() == b""
    wait_until(lambda: not fake_served._server.server_state.tasks)


@pytest.mark.parametrize("more", [request(ASK), HEALTH, b"\x00garbage\r\n\r\n"])
def test_what_comes_before_the_answer_never_gets_into_it(fake_served, more):
    ask = ASK | {"temperature": 0}
    text = patience.post(f"{fake_served.url}/v1/completions", json=ask).json()["choices"][0]["text"]
    with Wire(fake_served.port) as wire:
        wire.send(request(ask) + more)
        answers = wire.rest()
    assert answers.count(b"HTTP/1.1") <= 1
    if b"garbage" not in more:
        head, _, body = answers.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert json.loads(body)["choices"][0]["text"] == text
    fake_served.wait_until_idle()


def test_garbage_in_the_middle_of_a_stream_only_ends_it(tight):
    with Wire(tight.port) as wire:
        wire.post(ASK | {"max_tokens": 300, "ignore_eos": True, "stream": True})
        wire.until(b"data: ")
        wire.send(b"\x00garbage\r\n\r\n")
        assert b"HTTP/1.1" not in wire.rest()
    tight.wait_until_idle()


@pytest.mark.parametrize("wish", ["h2c", "websocket"])
def test_a_wish_for_another_protocol_is_ignored(fake_served, caplog, wish):
    ask = request(ASK, Connection="Upgrade, HTTP2-Settings", Upgrade=wish, HTTP2_Settings="AAMAAABkAARAAAAAAAIAAAAA")
    with Wire(fake_served.port) as wire:
        assert [wire.ask(ask).status for _ in range(2)] == [200, 200]
    assert not caplog.records


def test_as_many_files_as_connections_need():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_open_file_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        raise_open_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("host", "url"), [("localhost", "http://localhost:"), ("::1", "http://[::1]:")])
def test_it_listens_where_it_says(host, url):
    config = ServerConfig(host=host, port=0)
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with bind(config) as listener:
        assert format_url(listener, config).startswith(url)
        assert listener.getsockname()[0] == {"localhost": "127.0.0.1"}.get(host, host)


def test_connections_above_the_limit_are_told(monkeypatch):
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 1)
    whole = request(ASK)
    head = len(whole) - 5  # and a part of the body
    with Served(fake_engine, ServerConfig(max_connections=2, body_timeout_s=patience.HANG_S)) as served:
        inside = [Wire(served.port) for _ in range(2)]
        for wire in inside:
            wire.send(whole[:head])
        wait_until(lambda: sum(each.cycle is not None for each in served._server.server_state.connections) == 2)
        with Wire(served.port) as told:
            wait_until(lambda: connections(served) == 3)
            with Wire(served.port) as cut:
                assert cut.rest() == b""
            reply = told.ask(request(ASK))
            assert (reply.status, reply.code) == (503, "too_many_connections")
            assert (reply.headers["connection"], "retry-after" in reply.headers) == ("close", True)
            assert told.rest() == b""
        inside[0].send(whole[head:])
        assert inside[0].reply().status == 200  # those inside go on
        inside[1].socket.close()
        wait_until(lambda: connections(served) == 1)
        assert patience.post(f"{served.url}/v1/completions", json=ASK).status_code == 200
        inside[0].socket.close()


def test_heads_that_never_end_make_room(monkeypatch):
    """The one that began first, for each new connection, however it drips; who comes then is answered."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", patience.HANG_S)
    with Served(fake_engine, ServerConfig(max_connections=3)) as served, ExitStack() as stack:

        def begin(count: int) -> Wire:
            wire = stack.enter_context(Wire(served.port))
            wire.send(POST[:20])
            wait_until(lambda: sum(each._in_head for each in served._server.server_state.connections) == count)
            return wire

        slow = [begin(count) for count in (1, 2, 3)]
        for number in range(2):
            slow[number].send(POST[20:30])
            with Wire(served.port) as wire:
                assert wire.ask(HEALTH).status == 200
                assert slow[number].rest() == b""
                assert connections(served) == 3
            wait_until(lambda: connections(served) == 2)
            slow.append(begin(3))


@pytest.mark.parametrize("ask", [ASK, ASK | {"stream": True}])
def test_a_client_of_http_1_0_gets_no_chunks(fake_served, ask):
    with Wire(fake_served.port) as wire:
        wire.send(request(ask | {"temperature": 0}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = wire.rest().partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"transfer-encoding" not in head.lower()
    if "stream" in ask:
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(json.loads(each.removeprefix(b"data: "))["choices"] for each in events[:-2])
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 3

import dataclasses
import json
import resource
import socket
import time

import pytest

from specexport_runtime.server import connection
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.listener import allow_open_files, bind, url_of
from tests.support.cases import patience
from tests.support.cases.patience import wait_until
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.stepper import Stepper
from tests.support.servers.wire import Wire, request

ASK = {"prompt": "w1 w2", "max_tokens": 3}
ABORT = connection.BoundedProtocol._abort
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connections(served: Served) -> int:
    return len(served._server.server_state.connections)


@pytest.fixture(scope="module")
def tight():
    """Limits that a test can reach, but none of time."""
    with Served(lambda: fake_engine(rows=1), ServerConfig(model_name="fake", max_body_bytes=500)) as served:
        yield served


@pytest.fixture(scope="module")
def hasty():
    """Bodies must come quickly."""
    with Served(lambda: fake_engine(rows=1), ServerConfig(model_name="fake", body_timeout_s=0.2)) as served:
        yield served


@pytest.fixture(scope="module")
def stepper():
    """One runs and two may wait; nothing moves until a test lets it."""
    made = Stepper(ServerConfig(model_name="fake", max_waiting=2))
    with made.served:
        yield made


def padded(size: int) -> bytes:
    return json.dumps(ASK).encode().ljust(size)


def test_a_body_of_the_largest_size_is_taken_and_one_byte_more_is_not(tight):
    """And the connection goes on after the refusal."""
    with Wire(tight.port) as wire:
        for size, status in ((500, 200), (501, 413), (500, 200)):
            wire.post(padded(size))
            reply = wire.reply()
            assert reply.status == status
            assert status == 200 or reply.code == "body_too_large"


def test_a_body_of_unknown_length_is_counted(tight):
    with Wire(tight.port) as wire:
        wire.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b" " * 100 + b"\r\n")
        for _ in range(5):
            wire.send(b"64\r\n" + b" " * 100 + b"\r\n")
        assert wire.reply().code == "body_too_large"


def keeps_sending(wire: Wire, data: bytes) -> None:
    """Until the server has cut the client off."""

    def cut_off() -> bool:
        try:
            wire.send(data)
            time.sleep(0.01)
        except OSError:
            return True
        return False

    wait_until(cut_off)


def test_a_body_that_says_that_it_is_too_large_is_not_read_and_then_cut_off(fake_served, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with Wire(fake_served.port) as wire:
        wire.send(HEAD + b"Content-Length: 999999999\r\n\r\n")
        assert wire.reply().code == "body_too_large"
        keeps_sending(wire, b"x" * 1000)


def test_a_client_that_goes_away_in_its_body_leaves_nothing(tight):
    with Wire(tight.port) as wire:
        wire.send(HEAD + b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: connections(tight) == 1)
        wire.reset()
    wait_until(lambda: connections(tight) == 0 and not tight._server.server_state.tasks)
    assert (connections(tight), len(tight._server.server_state.tasks)) == (0, 0)


def test_a_slow_body_is_not_waited_for_and_holds_no_row(hasty):
    with Wire(hasty.port) as slow, Wire(hasty.port) as quick:
        slow.send(HEAD + b"Content-Length: 100\r\n\r\n{")
        quick.post(ASK)  # head and body at once
        assert quick.reply().status == 200
        reply = slow.reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (408, "request_too_slow", "close")
        assert slow.rest() == b""
    hasty.wait_until_idle()


def test_more_than_may_wait_are_refused_and_the_others_are_not_touched(stepper):
    ask = {"prompt": "w3 w4", "max_tokens": 8, "temperature": 0}
    wires = [Wire(stepper.served.port) for _ in range(6)]
    wires[0].post(ask)
    stepper.allow(100)
    alone = json.loads(wires[0].reply().body)["choices"][0]["text"]
    stepper.finish()
    for number, wire in enumerate(wires):
        wire.post(ask | {"max_tokens": 40} if number == 0 else ask)
        wait_until(lambda number=number: stepper.served.engine.num_active == min(number + 1, 3))
    refused = [wire.reply() for wire in wires[3:]]
    stepper.finish()
    replies = [*(wire.reply() for wire in wires[:3]), *refused]
    assert [reply.status for reply in replies] == [200, 200, 200, 429, 429, 429]
    assert {reply.code for reply in replies[3:]} == {"queue_full"}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies[3:])
    texts = [json.loads(reply.body)["choices"][0]["text"] for reply in replies[:3]]
    assert texts[0].startswith(alone)
    assert texts[1:] == [alone, alone]
    wires[5].post(ask)  # there is room again
    stepper.allow(100)
    assert wires[5].reply().status == 200
    for wire in wires:
        wire.socket.close()
    stepper.finish()


@pytest.fixture
def given_up(monkeypatch):
    """Connections whose client has had its time. They are aborted when a test has looked."""
    seen = []

    def note(self):
        seen.append(self)

    monkeypatch.setattr(connection.BoundedProtocol, "_abort", note)
    return seen


def impatient_connection(served):
    """The server's side of the one connection; it is impatient, while the request itself has all the time it needs."""
    wait_until(lambda: connections(served) == 1)
    (protocol,) = served._server.server_state.connections
    protocol._settings = dataclasses.replace(served.config, request_timeout_s=0.3)
    return protocol


def sending_little(make_engine) -> Served:
    """A server whose sockets take little of what a client does not read."""
    served = Served(make_engine)
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return served


def check_given_up(served, given_up) -> None:
    """The connection ends after the time of a request, and nothing is left of it."""
    wait_until(lambda: given_up)
    served.loop.call_soon_threadsafe(ABORT, given_up[0])  # what the server does with a client whose time is up
    wait_until(lambda: connections(served) == 0 and not served._server.server_state.tasks)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_does_not_read_holds_neither_row_nor_memory(stream, given_up):
    with sending_little(lambda: fake_engine(rows=4)) as served, Wire(served.port, receive_buffer=4096) as wire:
        protocol = impatient_connection(served)
        wire.post(ASK | {"max_tokens": 100, "ignore_eos": True, "n": 4, "stream": stream, "logprobs": 17})
        wait_until(lambda: protocol.flow is not None and protocol.flow.write_paused)
        served.wait_until_idle()  # the rows are free while the client is still there
        assert connections(served) == 1
        assert not stream or protocol.transport.get_write_buffer_size() < 256 * 1024
        check_given_up(served, given_up)


def test_a_short_answer_that_is_never_read_keeps_no_connection_for_ever(given_up):
    with sending_little(fake_engine) as served, Wire(served.port, receive_buffer=4096) as wire:
        protocol = impatient_connection(served)
        wire.post(ASK | {"max_tokens": 20, "n": 2, "ignore_eos": True, "logprobs": 17}, Connection="close")
        wait_until(lambda: protocol.transport is not None and protocol.transport.is_closing())
        assert 0 < protocol.transport.get_write_buffer_size() < 64 * 1024  # too little for the transport to complain
        check_given_up(served, given_up)


def test_a_slow_head_is_not_waited_for(fake_served, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.15)
    with Wire(fake_served.port) as wire:
        wire.send(HEAD)
        reply = wire.reply()
        assert (reply.status, reply.code) == (408, "request_too_slow")
        assert wire.rest() == b""


@pytest.mark.parametrize("fresh", [False, True])
def test_empty_lines_keep_no_connection_open(fake_served, monkeypatch, fresh):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.15)
    with Wire(fake_served.port) as wire:
        if not fresh:
            wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wire.reply().status == 200
        keeps_sending(wire, b"\r\n")
        assert wire.rest() == b""


def head_of(size: int) -> bytes:
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    return begin.ljust(size - 4, b"x") + b"\r\n\r\n"


@pytest.mark.parametrize("parts", [1, 3])
def test_the_limit_of_a_head_is_exact_however_it_comes(fake_served, parts):
    with Wire(fake_served.port) as wire:
        for size in (connection.MAX_HEAD_BYTES, connection.MAX_HEAD_BYTES, connection.MAX_HEAD_BYTES + 1):
            head = head_of(size)
            assert len(head) == size
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
    body = json.dumps(ASK).encode().ljust(4 * connection.MAX_HEAD_BYTES)
    with Wire(fake_served.port) as wire:
        for _ in range(2):
            wire.post(body)
            assert wire.reply().status == 200


@pytest.mark.parametrize(
    ("chunk", "at_once"),
    [(b"zz\r\n", True), (b"-1\r\n", False), (b"1" * 30 + b"\r\n", True), (b"2\r\n{}!!", False)],
)
def test_a_bad_chunk_gets_an_answer(fake_served, chunk, at_once):
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with Wire(fake_served.port) as wire:
        if at_once:
            wire.send(head + chunk)
        else:
            wire.send(head + b"1\r\n{\r\n")
            wait_until(lambda: any(each.cycle is not None for each in fake_served._server.server_state.connections))
            wire.send(chunk)
        reply = wire.reply()
        assert (reply.status, reply.code) == (400, "bad_http")
        assert wire.rest() == b""
    wait_until(lambda: not fake_served._server.server_state.tasks)


def test_what_is_no_http_gets_an_answer_in_our_shape(fake_served):
    with Wire(fake_served.port) as wire:
        wire.send(b"\x16\x03\x01 hello\r\n\r\n")
        reply = wire.reply()
        assert (reply.status, reply.code) == (400, "bad_http")
        assert wire.rest() == b""


@pytest.mark.parametrize(
    "more", [request(ASK), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00garbage\r\n\r\n"]
)
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
    with Wire(fake_served.port) as wire:
        for _ in range(2):
            wire.post(
                ASK, Connection="Upgrade, HTTP2-Settings", Upgrade=wish, HTTP2_Settings="AAMAAABkAARAAAAAAAIAAAAA"
            )
            assert wire.reply().status == 200
    assert not caplog.records


def test_as_many_files_as_connections_need():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        allow_open_files(200)
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
        assert url_of(listener, config).startswith(url)
        assert listener.getsockname()[0] == {"localhost": "127.0.0.1"}.get(host, host)


def test_connections_above_the_limit_are_told(monkeypatch):
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 1)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", patience.HANG_S)
    whole = request(ASK)
    with Served(fake_engine, ServerConfig(max_connections=2)) as served:
        inside = [Wire(served.port) for _ in range(2)]
        for wire in inside:
            wire.send(whole[:20])
        wait_until(lambda: sum(each._in_head for each in served._server.server_state.connections) == 2)
        with Wire(served.port) as told:
            wait_until(lambda: connections(served) == 3)
            with Wire(served.port) as cut:
                assert cut.rest() == b""
            told.post(ASK)
            reply = told.reply()
            assert (reply.status, reply.code) == (503, "too_many_connections")
            assert (reply.headers["connection"], "retry-after" in reply.headers) == ("close", True)
            assert told.rest() == b""
        inside[0].send(whole[20:])
        assert inside[0].reply().status == 200  # those inside go on
        inside[1].socket.close()
        wait_until(lambda: connections(served) == 1)
        assert patience.post(f"{served.url}/v1/completions", json=ASK).status_code == 200
        inside[0].socket.close()

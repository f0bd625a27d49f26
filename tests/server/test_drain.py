import json
import signal
import socket
from contextlib import ExitStack

import httpx

from specexport_runtime.server import listener
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.servers.cluster import free_port
from tests.support.servers.server_process import SLOW_LOAD, ServerProcess
from tests.support.servers.serving import Served, fake_engine
from tests.support.servers.wire import HEALTH, Wire, request

ASK = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
LONG = ASK | {"max_tokens": 230}


def status(url: str) -> int | None:
    try:
        return patience.get(url).status_code
    except httpx.TransportError:
        return None


def streamed_text(events: bytes) -> str:
    data = [line[6:] for line in events.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for item in data for choice in json.loads(item)["choices"])


def test_what_was_taken_is_finished_and_nothing_more_is_taken(demo_bundle):
    """By a server that took the place of one that was killed."""
    with ServerProcess(demo_bundle) as killed, Wire(killed.wait_until_ready().port) as wire:
        wire.post(LONG | {"stream": True})
        wire.until(b"data: ")
        killed.tell(signal.SIGKILL)
        assert killed.end()[0] == -signal.SIGKILL
        with ServerProcess(demo_bundle, "--drain-timeout", "120", port=killed.port) as again:
            check_drain(again.wait_until_ready())


def check_drain(running):
    alone = patience.post(f"{running.url}/v1/completions", json=LONG).json()["choices"][0]["text"]
    with ExitStack() as stack:
        stream, whole, late, probe = (stack.enter_context(Wire(running.port)) for _ in range(4))
        whole.post(LONG)
        stream.post(LONG | {"stream": True})
        begun = stream.until(b"data: ")
        running.tell()
        while (ready := probe.ask(HEALTH.replace(b"health", b"ready"))).status != 503:
            pass
        assert json.loads(ready.body)["status"] == "draining"
        refused = late.ask(request(ASK))
        assert (refused.status, refused.code, refused.headers["connection"]) == (503, "draining", "close")
        assert int(refused.headers["retry-after"]) >= 1
        events = b"data: " + stream.until(b"[DONE]")
        assert begun.startswith(b"HTTP/1.1 200")
        assert streamed_text(events) == alone
        assert json.loads(whole.reply().body)["choices"][0]["text"] == alone
    assert_ended(running)


def assert_ended(server: ServerProcess) -> None:
    code, errors = server.end()
    assert code == 0
    assert "Traceback" not in errors


STUCK = """
import sys, time
from pathlib import Path
from specexport_runtime.server import completions
plan = completions.plan_completion
def slow(body, *args):
    if len(body.prompt) > 2000:
        Path({begun!r}).touch()
        time.sleep({seconds})
    return plan(body, *args)
completions.plan_completion = slow
from specexport_runtime.cli.command import runtime_cli
runtime_cli(["serve", *sys.argv[1:]])
"""


def test_what_does_not_end_in_time_is_cancelled(demo_bundle, tmp_path):
    """Nor does a piece of work on a prompt hold up the end, which nobody can stop."""
    begun = tmp_path / "begun"
    start = ("-c", STUCK.format(begun=str(begun), seconds=4 * HANG_S))
    with ServerProcess(demo_bundle, "--drain-timeout", "0.01", start=start) as server:
        server.wait_until_ready()
        with Wire(server.port) as gone:
            gone.post(ASK | {"prompt": "x" * 3000})
            wait_until(begun.exists)
            gone.reset()
        # n keeps the requests going for longer than the drain: each has many choices, one after another
        with Wire(server.port) as stream, Wire(server.port) as whole:
            whole.post(LONG | {"n": 16, "temperature": 1})
            stream.post(LONG | {"n": 16, "temperature": 1, "stream": True})
            stream.until(b"data: ")
            server.tell(signal.SIGINT)  # Ctrl-C drains as well
            events = stream.until(b"\r\n0\r\n\r\n")
            assert b'"draining"' in events
            assert b"[DONE]" not in events
            reply = whole.reply()
            assert (reply.status, reply.code) == (503, "draining")
        assert_ended(server)


def test_a_client_that_does_not_read_does_not_hold_up_the_end(monkeypatch):
    """Without the last words' limit its connection would be held for the time of a request, longer than we wait."""
    monkeypatch.setattr(listener, "LAST_WORDS_S", 1.0)
    assert ServerConfig().request_timeout_s > 2 * HANG_S
    served = Served(lambda: fake_engine(rows=4))
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ask = {"prompt": "w1", "max_tokens": 100, "ignore_eos": True, "n": 4, "stream": True, "logprobs": 17}
    with ExitStack() as later, served:  # the client is still there when the server ends
        wire = later.enter_context(Wire(served.port, receive_buffer=4096))
        wire.post(ask)
        wait_until(lambda: len(served._server.server_state.connections) == 1)
        (protocol,) = served._server.server_state.connections
        wait_until(lambda: protocol.flow is not None and protocol.flow.write_paused)


def test_it_answers_while_it_loads_and_ends_when_it_is_told(demo_bundle):
    port = free_port()
    start = ("-c", SLOW_LOAD.format(seconds=60))
    with ServerProcess(demo_bundle, port=port, start=start) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: status(f"{url}/health") == 200)
        ready = patience.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        refused = patience.post(f"{url}/v1/completions", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1
        server.tell()
        assert_ended(server)


def test_a_second_signal_ends_it_at_once(demo_bundle):
    with ServerProcess(demo_bundle, "--drain-timeout", "60") as server:
        server.wait_until_ready()
        with Wire(server.port) as wire:
            wire.post(LONG | {"n": 16, "temperature": 1, "stream": True})
            wire.until(b"data: ")
            server.tell(signal.SIGINT)
            wait_until(lambda: status(f"{server.url}/ready") in (503, None))
            server.tell(signal.SIGINT)
            assert server.end()[0] == 130

"""The example service, really started: it streams, frees what a client leaves, refuses a crowd and drains."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from specexport_runtime import SamplingParams, SpecEngine
from tests.support.cases.patience import HANG_S, wait_until

SERVICE = Path(__file__).parents[2] / "examples" / "service"
# The service as it is, and a route of the test's own that tells how requests ended.
WATCHED = """
from service import app

ends = None


class Watcher:
    def on_round(self, record): pass

    def on_finish(self, sequence): ends.append([sequence.finish_reason, sequence.num_generated])


@app.get("/ends")
async def watch():
    global ends
    if ends is None:
        ends = []
        app.state.engine.engine.add_observer(Watcher())
    return ends
"""
LONG = {"prompt": "import os", "max_tokens": 900}


class Service:
    def __init__(self, bundle: Path, folder: Path) -> None:
        (folder / "watched.py").write_text(WATCHED)
        environment = {**os.environ, "BUNDLE": str(bundle), "PYTHONPATH": str(SERVICE), "OMP_NUM_THREADS": "1"}
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:  # clients may come before it is up
            self.port = listener.getsockname()[1]
            fd = listener.fileno()
            command = [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), "watched:app", "--fd", str(fd)]
            self.log = folder / "log"
            with self.log.open("w") as log:
                self.process = subprocess.Popen(
                    [*command, "--timeout-graceful-shutdown", "120"],
                    env=environment, pass_fds=[fd], stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=HANG_S)

    def ends(self) -> list[list]:
        return self.client.get("/ends").json()

    def wait_for_ends(self, count: int) -> list[list]:
        wait_until(lambda: len(self.ends()) >= count)
        return self.ends()

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(HANG_S)
        finally:
            self.process.kill()


@pytest.fixture
def service(demo_bundle: Path, tmp_path: Path) -> Iterator[Service]:
    service = Service(demo_bundle, tmp_path)
    try:
        assert service.ends() == []
        yield service
    finally:
        code = service.stop()
        log = service.log.read_text()
    assert code in (0, -signal.SIGTERM), log  # uvicorn ends itself by the signal that it got
    assert "Application shutdown complete." in log
    assert "Traceback" not in log, log


def test_the_service_streams_cancels_refuses_and_drains(service: Service, demo_bundle: Path) -> None:
    engine = SpecEngine.load(demo_bundle, num_threads=1, spin=False)
    expected = engine.generate(LONG["prompt"], SamplingParams(max_tokens=40))[0].text
    engine.close()

    # It streams: more than one piece, and together the text.
    with service.client.stream("POST", "/continue", json={**LONG, "max_tokens": 40}) as answer:
        assert answer.status_code == 200
        pieces = list(answer.iter_raw())
    assert b"".join(pieces).decode() == expected
    assert len(pieces) > 1
    assert service.ends() == [["length", 40]]

    # What can never be served is refused.
    assert service.client.post("/continue", json={"prompt": ""}).status_code == 400
    assert service.client.post("/continue", json={"prompt": "x", "max_tokens": 0}).status_code == 422

    # A crowd: eight rows, 32 wait, and the next one is refused. All of them leave, and nothing is left.
    body = json.dumps(LONG).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    crowd = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(48)]
    for member in crowd:
        member.sendall(f"POST /continue HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
    lines = [member.recv(12) for member in crowd]
    for member in crowd:
        member.close()
    refused = lines.count(b"HTTP/1.1 503")
    assert refused == 8
    assert lines.count(b"HTTP/1.1 200") == 40
    left = service.wait_for_ends(41)[1:]
    assert {reason for reason, _ in left} == {"cancelled"}
    assert service.client.post("/continue", json={**LONG, "max_tokens": 40}).text == expected

    # SIGTERM in the middle of a stream: it is finished, then the process ends.
    with service.client.stream("POST", "/continue", json=LONG) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        service.process.send_signal(signal.SIGTERM)
        whole = first + "".join(pieces)
    assert whole.startswith(expected)
    assert len(whole) > len(expected)

"""HTTP clients that cost little: raw asyncio protocols, in a process of their own.

Used by ``serving.py``. The process reads a job as JSON from its standard input, ``{"port", "concurrency", "requests":
[body, …]}``, streams completions with so many clients at a time, one connection each, and writes what came back. Bytes
are only counted and kept while requests run; they are parsed afterwards.
"""

import asyncio
import gc
import json
import subprocess
import sys
import time
from typing import Any

END_OF_CHUNKS = b"\r\n0\r\n\r\n"
LONGEST_S = 300
"""Seconds that one answer may take."""


class Connection(asyncio.Protocol):
    """One connection that is kept: :meth:`ask` sends a request and gives the raw answer."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[None]
        self._received = bytearray()
        self._body_start = 0
        self._length: int | None = None
        self.first_event: float | None = None
        self.is_open = False

    def connection_made(self, transport: Any) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = transport
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self.is_open = False
        if hasattr(self, "_answer") and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request; the head and the body of the answer."""
        self._received = bytearray()
        self._body_start, self._length, self.first_event = 0, None, None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answer
        return bytes(self._received)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        if self.first_event is None and b"data: " in data:
            self.first_event = time.perf_counter()
        if not self._body_start:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body_start = end + 4
            length = header(self._received[:end], b"content-length")
            self._length = None if length is None else int(length)
        if self._length is None:
            ended = self._received.endswith(END_OF_CHUNKS)
        else:
            ended = len(self._received) >= self._body_start + self._length
        if ended and not self._answer.done():
            self._answer.set_result(None)

    def close(self) -> None:
        """Hang up, if there is a connection."""
        if self.is_open:
            self._transport.close()
            self.is_open = False


def header(head: bytes | bytearray, name: bytes) -> bytes | None:
    """A header's value."""
    for line in bytes(head).split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None


async def client(port: int, jobs: Any, answers: dict[int, dict[str, Any]]) -> None:
    """Send one request after the other, from those that all clients share."""
    loop, connection = asyncio.get_running_loop(), Connection()
    for index, request in jobs:
        answer = answers[index] = {"start": time.perf_counter()}
        try:
            if not connection.is_open:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            async with asyncio.timeout(LONGEST_S):
                answer["raw"] = await connection.ask(request)
            answer["first"] = connection.first_event
        except (OSError, TimeoutError) as error:
            answer["error"] = repr(error)
            connection.close()
    connection.close()


async def run(job: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """All requests of a job: the seconds they took together, and what came back."""
    requests = []
    for body in job["requests"]:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        requests.append(head.encode() + data)
    jobs = iter(enumerate(requests))
    answers: dict[int, dict[str, Any]] = {}
    start = time.perf_counter()
    await asyncio.gather(*(client(job["port"], jobs, answers) for _ in range(job["concurrency"])))
    return time.perf_counter() - start, [answers[i] for i in range(len(requests))]


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Status, text, tokens and seconds to the first event of one streamed completion."""
    if "error" in answer:
        return {"status": 0, "message": answer["error"]}
    head, _, body = answer["raw"].partition(b"\r\n\r\n")
    found: dict[str, Any] = {"status": int(head[9:12])}
    if found["status"] != 200:
        return found | {"message": body.decode()}
    *events, last, nothing = dechunk(body).decode().split("\n\n")
    if nothing or last != "data: [DONE]":
        found["message"] = f"the stream ends with {last[-200:]!r}"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(choice["text"] for part in parts for choice in part.get("choices", ()))
    tokens = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
    found |= {"texts": [text], "tokens": tokens[-1] if tokens else 0}
    return found if answer["first"] is None else found | {"first_s": answer["first"] - answer["start"]}


def dechunk(body: bytes) -> bytes:
    """A body without its transfer coding."""
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        body = rest[count + 2 :]
    return b"".join(parts)


def send_all(port: int, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Run a job in a process of its own: ``{"seconds": …, "answers": [{"status", "texts", …}, …]}``."""
    job = json.dumps({"port": port, "concurrency": concurrency, "requests": requests})
    done = subprocess.run([sys.executable, __file__], input=job, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Do the job that is given."""
    job = json.load(sys.stdin)
    gc.disable()
    try:
        import uvloop

        seconds, answers = uvloop.run(run(job))
    except ImportError:
        seconds, answers = asyncio.run(run(job))
    json.dump({"seconds": seconds, "answers": [read_answer(answer) for answer in answers]}, sys.stdout)


if __name__ == "__main__":
    main()

"""HTTP clients that cost little: raw asyncio protocols, in a process of their own.

Used by ``serving.py``. The process reads a job as JSON from its standard input, ``{"port", "concurrency", "requests":
[body, …]}``, sends every body to ``/v1/completions`` with so many clients at a time, one connection each, and writes
what came back. An answer of 429 is tried again after the seconds that its ``Retry-After`` says. Bytes are only counted
and kept while requests run; they are parsed afterwards.
"""

import asyncio
import gc
import json
import subprocess
import sys
import time
from typing import Any

END_OF_CHUNKS = b"\r\n0\r\n\r\n"


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
        """Hang up."""
        self._transport.close()


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
        answer: dict[str, Any] = {"retries": 0, "start": time.perf_counter()}
        answers[index] = answer
        try:
            while True:
                if not connection.is_open:
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                raw = await connection.ask(request)
                if not raw.startswith(b"HTTP/1.1 429"):
                    break
                answer["retries"] += 1
                await asyncio.sleep(float(header(raw[: raw.index(b"\r\n\r\n")], b"retry-after") or "nan"))
                answer["start"] = time.perf_counter()
            answer.update(raw=raw, first=connection.first_event, end=time.perf_counter())
        except (OSError, ValueError) as error:
            answer["error"] = repr(error)
    if connection.is_open:
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
    jobs, answers = iter(enumerate(requests)), {}  # type: ignore[var-annotated]
    start = time.perf_counter()
    await asyncio.gather(*(client(job["port"], jobs, answers) for _ in range(job["concurrency"])))
    return time.perf_counter() - start, [answers[i] for i in range(len(requests))]


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Status, texts by choice, tokens and times of one answer."""
    if "error" in answer:
        return {"status": 0, "message": answer["error"], "retries": answer["retries"]}
    head, _, body = answer["raw"].partition(b"\r\n\r\n")
    found = {"status": int(head[9:12]), "retries": answer["retries"], "seconds": answer["end"] - answer["start"]}
    if answer["first"] is not None:
        found["first_s"] = answer["first"] - answer["start"]
    if header(head, b"content-length") is None:
        body = dechunk(body)
    if found["status"] != 200:
        return found | {"message": body.decode()}
    if header(head, b"content-type") == b"application/json":
        whole = json.loads(body)
        texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
        return found | {"texts": texts, "tokens": whole["usage"]["completion_tokens"]}
    return found | read_events(body.decode())


def read_events(stream: str) -> dict[str, Any]:
    """Texts and tokens of a stream."""
    texts: dict[int, str] = {}
    *events, last, nothing = stream.split("\n\n")
    found: dict[str, Any] = {"texts": texts}
    if last != "data: [DONE]" or nothing:
        found["message"] = f"the stream ends with {last[-200:]!r}"
    for event in events:
        part = json.loads(event.removeprefix("data: "))
        if "error" in part:
            found["message"] = part["error"]["message"]
            continue
        for choice in part["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if part.get("usage"):
            found["tokens"] = part["usage"]["completion_tokens"]
    return found


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
    for answer in found["answers"]:
        if "texts" in answer:
            answer["texts"] = [answer["texts"][key] for key in sorted(answer["texts"], key=int)]
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

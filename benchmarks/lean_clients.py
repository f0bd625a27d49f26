"""HTTP clients that cost little: raw asyncio protocols, in a process of their own.

Used by ``serving.py`` and ``mixed_load.py``. The process reads a job as JSON from its standard input, ``{"port",
"concurrency", "seconds", "requests": [{"path", "body", "leave_after"}, …]}``, sends them with so many clients at a
time, one connection each, and writes what came back. An answer of 429 is tried again after the seconds that its
``Retry-After`` says. A client that is to leave hangs up after so many bytes of its answer. After ``seconds`` nothing
more is sent. Bytes are only counted and kept while requests run; they are parsed afterwards.
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
        self._enough: int | None = None
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

    async def ask(self, request: bytes, enough: int | None = None) -> bytes:
        """Send a request; the head and the body of the answer, or no more than its first ``enough`` bytes and some."""
        self._received = bytearray()
        self._body_start, self._length, self.first_event, self._enough = 0, None, None, enough
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
        if self._enough is not None and len(self._received) >= self._enough:
            ended = True
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


async def client(port: int, jobs: Any, answers: dict[int, dict[str, Any]], end: float) -> None:
    """Send one request after the other, from those that all clients share."""
    loop, connection = asyncio.get_running_loop(), Connection()
    for index, (request, leave_after) in jobs:
        answer: dict[str, Any] = {"retries": 0, "start": time.perf_counter()}
        answers[index] = answer
        try:
            while True:
                if answer["start"] > end:
                    raise TimeoutError("not sent in time")
                if not connection.is_open:
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                async with asyncio.timeout(LONGEST_S):
                    raw = await connection.ask(request, leave_after)
                if not raw.startswith(b"HTTP/1.1 429"):
                    break
                answer["retries"] += 1
                await asyncio.sleep(float(header(raw[: raw.index(b"\r\n\r\n")], b"retry-after") or "nan"))
                answer["start"] = time.perf_counter()
            answer.update(raw=raw, first=connection.first_event, end=time.perf_counter())
            if leave_after is not None:
                answer["left"] = True
                connection.close()
                connection.is_open = False
        except (OSError, ValueError, TimeoutError) as error:
            answer["error"] = repr(error)
            if connection.is_open:
                connection.close()
                connection.is_open = False
    if connection.is_open:
        connection.close()


async def run(job: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """All requests of a job: the seconds they took together, and what came back."""
    requests = []
    for asked in job["requests"]:
        data = json.dumps(asked["body"]).encode()
        head = (
            f"POST {asked['path']} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        requests.append((head.encode() + data, asked.get("leave_after")))
    jobs, answers = iter(enumerate(requests)), {}  # type: ignore[var-annotated]
    start = time.perf_counter()
    clients = [client(job["port"], jobs, answers, start + job["seconds"]) for _ in range(job["concurrency"])]
    await asyncio.gather(*clients)
    return time.perf_counter() - start, [answers[i] for i in range(len(requests))]


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Status, texts by choice, log-probabilities, tokens and times of one answer."""
    if "error" in answer:
        return {"status": 0, "message": answer["error"], "retries": answer["retries"]}
    head, _, body = answer["raw"].partition(b"\r\n\r\n")
    found = {"status": int(head[9:12]), "retries": answer["retries"], "seconds": answer["end"] - answer["start"]}
    if answer["first"] is not None:
        found["first_s"] = answer["first"] - answer["start"]
    if answer.get("left"):
        return found | {"left": True}
    if header(head, b"content-length") is None:
        body = dechunk(body)
    if found["status"] != 200:
        return found | {"message": body.decode()}
    told = Told()
    if header(head, b"content-type") == b"application/json":
        told.take(json.loads(body))
    else:
        told.take_events(body.decode())
    return found | told.found


class Told:
    """What answers and events of all endpoints tell, put together."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.logprobs: list[float | None] = []
        self.found: dict[str, Any] = {"texts": self.texts, "logprobs": self.logprobs}

    def take(self, part: dict[str, Any]) -> None:
        """A whole answer, or a chunk of a stream."""
        if part.get("object") == "response":
            for item in part["output"]:
                self._add_call(item)
                for content in item.get("content", []):
                    self._add(0, content["text"], content)
        for choice in part.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or choice
            text = message.get("text") or message.get("content") or ""
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            text += "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
            self._add(choice["index"], text, choice)
        self._add_prompt(part)
        usage = part.get("usage") or {}
        self.found["tokens"] = usage.get("completion_tokens", usage.get("output_tokens", self.found.get("tokens")))

    def take_events(self, stream: str) -> None:
        """A whole stream."""
        *events, last, nothing = stream.split("\n\n")
        is_typed = last.startswith("event: response.")
        if nothing or not (last == "data: [DONE]" or is_typed):
            self.found["message"] = f"the stream ends with {last[-200:]!r}"
        for event in [*events, last] if is_typed else events:
            part = json.loads(event.partition("data: ")[2])
            if "error" in part or part.get("type") in ("error", "response.failed"):
                self.found["message"] = event[-300:]
            elif "choices" in part:
                self.take(part)
            elif part["type"] == "response.output_item.added":
                self._add_call(part["item"])
            elif part["type"].endswith(".delta"):
                self._add(0, part["delta"], part)
            elif part["type"] in ("response.completed", "response.incomplete"):
                self.found["tokens"] = part["response"]["usage"]["output_tokens"]

    def _add(self, index: int, text: str, part: dict[str, Any]) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        told = part.get("logprobs") or ()
        if isinstance(told, dict):
            self.logprobs += told.get("token_logprobs") or []
            told = told.get("content") or ()
        self.logprobs += [item["logprob"] for item in told]
        self._add_prompt(part)

    def _add_call(self, item: dict[str, Any]) -> None:
        if item["type"] == "function_call":
            self._add(0, item["name"] + item["arguments"], {})

    def _add_prompt(self, part: dict[str, Any]) -> None:
        entries = [entry for entry in part.get("prompt_logprobs") or () if entry]
        self.logprobs += [value["logprob"] for entry in entries for value in entry.values()]


def dechunk(body: bytes) -> bytes:
    """A body without its transfer coding."""
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        body = rest[count + 2 :]
    return b"".join(parts)


def send_all(port: int, requests: list[dict[str, Any]], concurrency: int, seconds: float = 3600) -> dict[str, Any]:
    """Run a job in a process of its own: ``{"seconds": …, "answers": [{"status", "texts", …}, …]}``."""
    job = json.dumps({"port": port, "concurrency": concurrency, "seconds": seconds, "requests": requests})
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

"""Clients that behave badly, for ``soak.py``, which starts this as a process of its own.

It reads a job as JSON from its standard input, ``{"port", "clients", "seconds", "seed", "expected": {prompt: text}}``,
and writes ``{"counts", "problems"}``.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
LONGEST = 160
DRAFTING = [{}, {}, {"drafter": "lookup"}, {"drafter": "none"}, {"drafter": "chained"}, {"drafter": "self"}]
WRONG = [
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"prompt": ""}',
    b'{"prompt": "x", "max_tokens": 0}',
    b'{"prompt": "x", "max_tokens": 1e9}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "unknown": 1}',
    b'{"prompt": "x", "n": 100}',
    b'{"prompt": "x", "model": "another"}',
    b'{"prompt": [999999]}',
    b'{"prompt": "x", "suffix": "y"}',
    b'{"prompt": "x", "speculative": {"drafter": "magic"}}',
    b'{"prompt": "' + b"x " * 20000 + b'"}',
    b"[" * 5000,
]


class Attack:
    """The clients.

    Args:
        port: of the server.
        expected: for each prompt its greedy text, longer than any that is asked for.
        seed: of what they do.
    """

    def __init__(self, port: int, expected: dict[str, str], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._port = port
        self._expected = expected
        self._random = random.Random(seed)
        self._deeds: list[tuple[Callable[[Reader, Writer], Awaitable[None]], float]] = [
            (self.finish, 6),
            (self.leave_in_answer, 4),
            (self.leave_while_waiting, 3),
            (self.leave_in_body, 1),
            (self.leave_in_head, 1),
            (self.read_slowly, 0.5),
            (self.send_wrong_body, 2),
            (self.send_noise, 0.5),
        ]

    async def run(self, clients: int, seconds: float) -> None:
        """Let so many clients do so for some seconds."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(clients)))

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            deeds, weights = zip(*self._deeds, strict=True)
            deed = self._random.choices(deeds, weights)[0]
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as error:
                self.problems.append(f"no connection: {error!r}")
                continue
            try:
                async with asyncio.timeout(120):
                    await deed(reader, writer)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.counts[f"{deed.__name__}: {type(error).__name__}"] += 1
                if deed == self.finish or isinstance(error, TimeoutError):
                    self.problems.append(f"{deed.__name__}: {error!r}")
            finally:
                if self._random.random() < 0.3:
                    writer.transport.abort()
                writer.close()

    def _body(self) -> dict[str, Any]:
        chosen = self._random
        body = {
            "prompt": chosen.choice(list(self._expected)),
            "max_tokens": chosen.randint(1, LONGEST),
            "temperature": chosen.choice([0, 0, 0.9]),
            "stream": chosen.random() < 0.6,
            "n": chosen.choice([1, 1, 1, 1, 2, 4]),
            "speculative": dict(chosen.choice(DRAFTING)),
        }
        if chosen.random() < 0.2:
            body["logprobs"] = chosen.randint(0, 5)
        if chosen.random() < 0.2:
            body["speculative"]["token_origins"] = True
        if chosen.random() < 0.1:
            body["stop"] = ["\n\n", "return"]
        return body

    async def _send(self, writer: Writer, data: bytes, *, part: float = 1.0) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        writer.write(whole[: round(len(whole) * part)])
        await writer.drain()

    async def finish(self, reader: Reader, writer: Writer) -> None:
        """Send a request and read all of the answer."""
        body = self._body()
        await self._send(writer, json.dumps(body).encode())
        answer = await reader.read()
        self._judge(body, answer)
        if answer.startswith(b"HTTP/1.1 429"):
            await asyncio.sleep(self._random.random())  # or there would be nothing but refusals

    async def leave_in_answer(self, reader: Reader, writer: Writer) -> None:
        """Go away after a part of a stream."""
        await self._send(writer, json.dumps(self._body() | {"stream": True}).encode())
        for _ in range(self._random.randint(1, 12)):
            if not await reader.read(2000):
                break
        self.counts["left in an answer"] += 1

    async def leave_while_waiting(self, reader: Reader, writer: Writer) -> None:  # noqa: ARG002
        """Go away before anything comes."""
        await self._send(writer, json.dumps(self._body()).encode())
        await asyncio.sleep(self._random.random() * 0.1)
        self.counts["left while waiting"] += 1

    async def leave_in_body(self, reader: Reader, writer: Writer) -> None:  # noqa: ARG002
        """Go away with a part of the body sent."""
        data = json.dumps(self._body()).encode() + b" " * 3000
        await self._send(writer, data, part=0.3 + 0.6 * self._random.random())
        await asyncio.sleep(self._random.random() * 0.3)
        self.counts["left in a body"] += 1

    async def leave_in_head(self, reader: Reader, writer: Writer) -> None:  # noqa: ARG002
        """Go away with a part of the head sent."""
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        await writer.drain()
        self.counts["left in a head"] += 1

    async def read_slowly(self, reader: Reader, writer: Writer) -> None:
        """Read a stream a few bytes at a time."""
        body = self._body() | {"stream": True, "n": 1}
        await self._send(writer, json.dumps(body).encode())
        answer = b""
        while data := await reader.read(500):
            answer += data
            await asyncio.sleep(0.005)
        self._judge(body, answer)

    async def send_wrong_body(self, reader: Reader, writer: Writer) -> None:
        """Send what must be refused."""
        await self._send(writer, self._random.choice(WRONG))
        status = (await reader.read())[9:12].decode()
        self.counts[f"wrong body: {status}"] += 1
        if not status.startswith("4"):
            self.problems.append(f"a wrong body was answered with {status!r}")

    async def send_noise(self, reader: Reader, writer: Writer) -> None:
        """Send random bytes."""
        writer.write(self._random.randbytes(self._random.randint(1, 3000)) + b"\r\n\r\n")
        writer.write_eof()
        status = (await reader.read())[9:12].decode(errors="replace")
        self.counts[f"noise: {status or 'hung up on'}"] += 1

    def _judge(self, body: dict[str, Any], answer: bytes) -> None:
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode()
        self.counts[f"finished: {status}"] += 1
        if status not in ("200", "429"):
            self.problems.append(f"{body} was answered with {answer[:1000]!r}")
        if status == "200" and b'data: {"error"' in rest:
            self.problems.append(f"{body} ended with {rest[-1000:]!r}")
        if status != "200" or body["temperature"] or body["stream"]:
            return
        for choice in json.loads(rest)["choices"]:
            self.counts["greedy texts compared"] += 1
            if not self._expected[body["prompt"]].startswith(choice["text"]):
                self.problems.append(f"{body} gave {choice['text']!r}")


def main() -> None:
    """Do the job that is given."""
    job = json.load(sys.stdin)
    attack = Attack(job["port"], job["expected"], job["seed"])
    asyncio.run(attack.run(job["clients"], job["seconds"]))
    json.dump({"counts": attack.counts, "problems": attack.problems}, sys.stdout)


if __name__ == "__main__":
    main()

"""What a hostile client costs ten honest ones.

    python benchmarks/hostile_clients.py engines/demo [--kinds references,heads] [--json FILE] [OPTIONS OF serve]

For each kind of ``tests/support/servers/hostile.py`` a server of its own, in turns: ten honest clients with a key each
(short completions and chats, most of them streamed, up to 0.1 s between two) alone, and beside four clients of that
kind, which all have one more key. "A fair neighbour" is four clients with four ordinary answers at a time: what any
load costs on this machine; × neighbour compares with it. Of the repeats, the least median and 99th percentile of the
time to the first token and to the whole answer, and the quickest of the longest answers of ``/health``, each over a
connection of its own; of all of them, answers that were late, wrong or missing, and the piece that held the event loop
the longest, by the clock of its thread (and by the wall, where other processes count too). So that pieces can be
measured, the server runs asyncio's own loop in place of uvloop. Clients are processes of their own.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from common import report, wait_for_port
from lean_clients import Connection, dechunk

from tests.support.servers.hostile import TEMPLATE, attack, hostile_clients
from tests.support.servers.loop_pieces import pieces_of
from tests.support.servers.wire import HEALTH, request

HONEST = [f"{name:032}" for name in range(10)]
HOSTILE = "x" * 32
NEIGHBOUR = "a fair neighbour"
OPTIONS = {"requests as long as they may be": ["--kv-cache-memory-bytes", "12MB"]}  # room for one of them
LATE_S = 60.0
Answer = tuple[int, float | None, float, str]
"""Which request it is of, seconds to its first token and to its end, its text."""


def serve(arguments: list[str]) -> None:
    """Be ``specexport serve``; for each line that is read, tell the longest piece since the last one."""
    from specexport_runtime.cli.command import runtime_cli
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.server import listener

    load = SpecEngine.load

    def with_template(*given: Any, **options: Any) -> SpecEngine:
        engine = load(*given, **options)
        engine._chat_template = TEMPLATE
        return engine

    def tell() -> None:
        for _ in sys.stdin:
            print(json.dumps(pieces.take()), flush=True)

    SpecEngine.load, listener.loop_factory = with_template, lambda: asyncio.SelectorEventLoop
    with pieces_of(threading.get_ident()) as pieces:
        threading.Thread(target=tell, daemon=True).start()
        runtime_cli(["serve", *arguments])


class Server:
    """A server in a process of its own, as a context manager; killed in the end."""

    def __init__(self, bundle: Path, options: list[str]) -> None:
        self._keys = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self._keys.write("\n".join([*HONEST, HOSTILE]))
        self._keys.flush()
        command = [sys.executable, __file__, "--serve", str(bundle), "--port", "0", "--api-key-file", self._keys.name]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([*command, "--tool-call-parser", "json", *options], text=True, **pipes)

    def __enter__(self) -> "Server":
        self.port = wait_for_port(self.process)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._keys.close()

    def longest(self) -> list[Any]:
        """CPU and wall seconds of the longest piece since this was last asked, and where it was."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            return list(json.loads(self.process.stdout.readline()))
        return [float("inf"), 0, f"THE SERVER ENDED: {self.process.poll()}"]


def text_of(raw: bytes) -> str:
    """The text of an answer, streamed or not; empty for an error."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head[:13]:
        return ""
    if b"\r\ntransfer-encoding" not in head.lower():
        return str(json.loads(body)["choices"][0]["text"])
    events = dechunk(body).decode().split("\n\n")[:-2]
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


async def honest_client(port: int, key: str, end: float) -> list[Answer]:
    """Ask one thing after the other, each of which has one right answer."""
    draw, connection, found = random.Random(key), Connection(), []
    common, head = {"max_tokens": 16, "temperature": 0, "stream": True}, {"Authorization": f"Bearer {key}"}
    chat = {"messages": [{"role": "user", "content": "def add(a, b):"}]}
    requests = [
        request({"prompt": "import os\n"} | common, **head),
        request(chat | common, "/v1/chat/completions", **head),
        request({"prompt": "for i in range("} | common | {"stream": False}, **head),
    ]
    number = draw.randrange(3)
    while time.perf_counter() < end:
        await asyncio.sleep(draw.random() / 10)
        number, start, raw = (number + 1) % 3, time.perf_counter(), b""
        try:
            async with asyncio.timeout(LATE_S):
                if not connection.is_open:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                raw = await connection.ask(requests[number])
        except (OSError, TimeoutError):
            connection.close()
        first = connection.first_event
        found.append((number, first and first - start, time.perf_counter() - start, text_of(raw)))
    connection.close()
    return found


def be_honest(port: int, seconds: float) -> list[Answer]:
    """Ten clients for so long."""

    async def together() -> list[list[Answer]]:
        end = time.perf_counter() + seconds
        return await asyncio.gather(*(honest_client(port, key, end) for key in HONEST))

    return [answer for each in asyncio.run(together()) for answer in each]


def be_hostile(port: int, kind: str, seconds: float) -> Counter[str]:
    """Clients of a kind for so long; how often each status was answered."""
    return attack(port, hostile_clients(HOSTILE)[kind], seconds)


def probe(port: int, seconds: float) -> float:
    """Ask ``/health`` for so long; the longest answer."""
    longest, end = 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        status = b""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), LATE_S) as connection:
            connection.sendall(HEALTH)
            status = connection.recv(4096)[9:12]
        longest = max(longest, time.perf_counter() - start if status == b"200" else LATE_S)
        time.sleep(0.02)
    return longest


def percentiles(values: list[float]) -> list[float]:
    """Median and 99th percentile; infinite for none."""
    return [sorted(values)[int(share * (len(values) - 1))] if values else float("inf") for share in (0.5, 0.99)]


def measure(bundle: Path, kind: str, options: list[str], seconds: float, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """The honest clients alone, then beside a kind."""
    found: dict[str, Any] = {}
    with Server(bundle, [*options, *OPTIONS.get(kind, ())]) as server:
        right = {number: text for number, _, _, text in pool.submit(be_honest, server.port, 1.0).result() if text}
        server.longest()
        for when in ("alone", "beside"):
            hostile = pool.submit(be_hostile, server.port, kind, seconds + 0.5) if when == "beside" else None
            time.sleep(0.5 if hostile else 0)
            probed = pool.submit(probe, server.port, seconds)
            answers = pool.submit(be_honest, server.port, seconds).result()
            found[when] = {
                "first": percentiles([first for _, first, _, _ in answers if first is not None]),
                "whole": percentiles([whole for _, _, whole, _ in answers]),
                "wrong": [sum(text != right.get(number) for number, _, _, text in answers), len(answers)],
                "health": probed.result(),
                "piece": server.longest(),
                "statuses": hostile.result() if hostile else {},
            }
    return found


def row_of(kind: str, runs: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """A row of the table."""

    def least(kind: str, when: str, what: str, share: int) -> float:
        return min(float(run[when][what][share]) for run in runs[kind])

    cells = []
    for what in ("first", "whole"):
        median, late = (least(kind, "beside", what, share) for share in (0, 1))
        times = [late / least(kind, "alone", what, 1), late / least(NEIGHBOUR, "beside", what, 1)]
        cells.append(f"{1e3 * median:.0f}, {1e3 * late:.0f} ms: {times[0]:.1f}×, {times[1]:.1f}×")
    beside = [run["beside"] for run in runs[kind]]
    wrong, count = (sum(each["wrong"][i] for each in beside) for i in (0, 1))
    piece = max((each["piece"] for each in beside), key=lambda piece: piece[0])
    statuses = sum((Counter(each["statuses"]) for each in beside), Counter[str]())
    cells += [f"{wrong} of {count}", f"{1e3 * min(each['health'] for each in beside):.0f} ms"]
    cells += [f"{1e3 * piece[0]:.0f} ({1e3 * piece[1]:.0f}) ms {piece[2]}"]
    return kind, " | ".join([*cells, ", ".join(f"{n} {status}" for status, n in statuses.items())])


def main() -> None:
    """Run and print a table."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--kinds", default="", help="parts of names of kinds, with commas")
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args, options = parser.parse_known_args()
    kinds = [k for k in hostile_clients("") if k == NEIGHBOUR or any(part in k for part in args.kinds.split(","))]
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        for kind in kinds * args.repeats:
            runs[kind].append(measure(args.bundle, kind, options, args.seconds, pool))
            print(*row_of(kind, runs), sep=" | ", file=sys.stderr, flush=True)
    title = "first token: p50, p99: × alone, × neighbour | whole answer | wrong | /health | piece: CPU (wall) | answers"
    report("Hostile clients", [("kind", title), *(row_of(kind, runs) for kind in kinds)], {"runs": runs}, args.json)


if __name__ == "__main__":
    main()

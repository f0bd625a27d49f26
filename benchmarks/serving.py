"""The server against the engine in the same process.

    python benchmarks/serving.py engines/demo-self [--json FILE]

``specexport serve`` runs on a port of this machine; its clients run in a process of their own (``lean_clients.py``). In
turns, 8 threads of this process that stream from the engine, 8 tasks of an event loop that do, and 8 clients that
stream from the server; figures are medians. Exits with 1 if their texts differ.
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import DEMO_PROMPTS, median, read_prompts, report, wait_for_port
from lean_clients import send_all

from specexport_runtime import AsyncSpecEngine, SamplingParams, SpecEngine

Body = dict[str, Any]
Runs = dict[str, list[float]]


class Serving(NamedTuple):
    """A server: where it listens, and which process it is."""

    port: int
    pid: int


@contextlib.contextmanager
def server(bundle: Path, *options: str) -> Iterator[Serving]:
    """``specexport serve`` as a process of its own. It must end with 0 when it is told to."""
    command = [Path(sys.executable).with_name("specexport"), "serve", bundle, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Serving(wait_for_port(process), process.pid)
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(60)) != 0:
            raise SystemExit(f"the server ended with {code}")
    finally:
        process.kill()
        process.wait()


def in_threads(engine: SpecEngine, requests: list[Body], count: int) -> dict[str, Any]:
    """The same requests from ``count`` threads of this process, each streaming one after the other."""
    jobs, answers = iter(enumerate(requests)), {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index, body = next(jobs, (-1, {}))
            if index < 0:
                return
            start, first, text = time.perf_counter(), 0.0, ""
            for chunk in engine.submit(body["prompt"], params_of(body)):
                first = first or time.perf_counter()
                text += chunk.text
            tokens = chunk.stats.num_generated_tokens
            answers[index] = {"texts": [text], "tokens": tokens, "first_s": first - start}

    threads = [threading.Thread(target=work) for _ in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - start, "answers": [answers[i] for i in range(len(requests))]}


def in_event_loop(engine: SpecEngine, requests: list[Body], count: int) -> dict[str, Any]:
    """The same from ``count`` tasks of an event loop in this process."""
    jobs = iter(enumerate(requests))
    answers = {}

    async def work(service: AsyncSpecEngine) -> None:
        for index, body in jobs:
            start, first, text = time.perf_counter(), 0.0, ""
            async for chunk in await service.submit(body["prompt"], params_of(body)):
                first = first or time.perf_counter()
                text += chunk.text
            tokens = chunk.stats.num_generated_tokens
            answers[index] = {"texts": [text], "tokens": tokens, "first_s": first - start}

    async def run() -> float:
        service = AsyncSpecEngine(engine)
        start = time.perf_counter()
        await asyncio.gather(*(work(service) for _ in range(count)))
        return time.perf_counter() - start

    seconds = asyncio.run(run())
    return {"seconds": seconds, "answers": [answers[i] for i in range(len(requests))]}


def params_of(body: Body) -> SamplingParams:
    """What a request is generated with."""
    return SamplingParams(
        max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=body.get("ignore_eos", False)
    )


def throughput(engine: SpecEngine, port: int, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and times to the first token, in this process and over a socket, in turns."""
    common = {"max_tokens": args.max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    requests = [{"prompt": prompts[i % len(prompts)], **common} for i in range(args.streams * args.rounds)]
    ways = {
        "threads": lambda: in_threads(engine, requests, args.streams),
        "asyncio": lambda: in_event_loop(engine, requests, args.streams),
        "server": lambda: send_all(port, requests, args.streams),
    }
    speeds: Runs = {where: [] for where in ways}
    firsts: Runs = {where: [] for where in ways}
    same = True
    for repeat in range(args.repeats + 1):
        texts = {}
        for where in ways if repeat % 2 else reversed(ways):
            found = ways[where]()
            texts[where] = [answer.get("texts") for answer in found["answers"]]
            if repeat:  # the first is the warm-up
                speeds[where].append(sum(answer.get("tokens", 0) for answer in found["answers"]) / found["seconds"])
                firsts[where] += [1e3 * answer["first_s"] for answer in found["answers"] if "first_s" in answer]
        same &= texts["threads"] == texts["asyncio"] == texts["server"]
    ratios = {
        where: median(other / own for other, own in zip(speeds[where], speeds["threads"], strict=True))
        for where in ways
    }
    return {"tokens_per_s": speeds, "first_token_ms": firsts, "ratios": ratios, "same_text": same}


def percentile(values: list[float], share: float) -> float:
    """The value that so many are below."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def rows_of(speed: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    """The table."""
    rows = []
    names = {"threads": "threads", "asyncio": "asyncio, the same process", "server": "server, clients over a socket"}
    for where, name in names.items():
        rates, firsts = speed["tokens_per_s"][where], speed["first_token_ms"][where]
        p50, p99 = percentile(firsts, 0.5), percentile(firsts, 0.99)
        rows += [
            (f"{args.streams} streams, {name}", f"{median(rates):.0f} tokens/s, {speed['ratios'][where]:.3f}×"),
            (f"time to first token, {name}", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {p99 / p50:.1f}×; n={len(firsts)}"),
        ]
    rows.append(("texts of the three", "the same" if speed["same_text"] else "DIFFERENT"))
    return rows


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--streams", type=int, default=8, help="threads and clients")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each, one after the other")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, 64)
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False)  # as the server loads it
    with server(args.bundle) as served:
        speed = throughput(engine, served.port, prompts, args)
    engine.close()
    report("Serving", rows_of(speed, args), {"throughput": speed}, args.json)
    if not speed["same_text"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What each hop in front of an engine costs: our server alone, Ray's proxy, and the deployment that reads prompts.

    python benchmarks/ray_hops.py engines/demo [--requests 40] [--json FILE]

Three servers of one bundle on 127.0.0.1, one engine of one thread each, asked in turns: `specexport serve`, one replica
behind Ray Serve's proxy, and the same with ``routing="prefix"``. One client, then eight. Also whether it matters that a
replica has seen the beginning of a prompt before.
"""

import argparse
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from common import median, report
from ray_common import WAIT_S, free_port, ray_cluster

SHORT, LONG = 1, 64


def ask(client: httpx.Client, url: str, prompt: str, max_tokens: int) -> tuple[float, float]:
    """Seconds to the first bytes of a stream, and to its end."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    start = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        answer.raise_for_status()
        pieces = answer.iter_raw()
        next(pieces)
        first = time.perf_counter() - start
        for _ in pieces:
            pass
    return first, time.perf_counter() - start


def in_turns(urls: dict[str, str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of one client's requests, the servers asked in turns."""
    times: dict[str, dict[str, list[float]]] = {name: {"first": [], "short": [], "long": []} for name in urls}
    with httpx.Client() as client:
        for turn in range(args.requests + 3):  # the first few are not counted
            for name, url in urls.items():
                first, short = ask(client, url, f"# {turn}\ndef f(", SHORT)
                _, long = ask(client, url, f"# {turn}\ndef f(", LONG)
                if turn >= 3:
                    for kind, seconds in (("first", first), ("short", short), ("long", long)):
                        times[name][kind].append(seconds)
    return {name: {kind: median(values) for kind, values in kinds.items()} for name, kinds in times.items()}


def together(urls: dict[str, str], args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of eight streaming clients, the servers asked in turns; medians."""
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for turn in range(args.repeats + 1):
        for name, url in urls.items():
            with httpx.Client() as client, ThreadPoolExecutor(8) as pool:
                start = time.perf_counter()
                list(pool.map(lambda i, c=client, u=url: ask(c, u, f"# {i}\nclass A", LONG), range(24)))  # type: ignore[misc]
                if turn:
                    rates[name].append(24 * LONG / (time.perf_counter() - start))
    return {name: median(values) for name, values in rates.items()}


def seen_before(url: str, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds to the first bytes for a long prompt: a new one, and one whose beginning the replica has just had."""
    times: tuple[list[float], list[float]] = ([], [])
    with httpx.Client() as client:
        for turn in range(args.requests):
            begin = f"# {turn} {secrets.token_hex(4)}\n" + "def add(a, b):\n    return a + b\n\n\n" * 40
            for kind, end in zip(times, ("def one(", "def two("), strict=True):
                kind.append(ask(client, url, begin + end, SHORT)[0])
    return median(times[0]), median(times[1])


def measure(urls: dict[str, str], args: argparse.Namespace) -> None:
    """Ask, and print."""
    alone, busy = in_turns(urls, args), together(urls, args)
    base = next(iter(urls))
    rows = []
    for name, kinds in alone.items():
        more = 1e3 * (kinds["short"] - alone[base]["short"])
        rows.append((f"{name}: one client, 1 token", f"{1e3 * kinds['short']:.1f} ms ({more:+.1f})"))
        more = 1e3 * (kinds["long"] - alone[base]["long"])
        rows.append((f"{name}: one client, {LONG} tokens streamed", f"{1e3 * kinds['long']:.1f} ms ({more:+.1f})"))
        rows.append((f"{name}: eight clients", f"{busy[name]:.0f} tokens/s ({busy[name] / busy[base]:.2f}x)"))
    new, seen = seen_before(urls["Ray, prefix routing"], args)
    rows.append(
        ("first byte, long prompt: new / beginning seen by this replica", f"{1e3 * new:.1f} / {1e3 * seen:.1f} ms")
    )
    report("Hops in front of an engine", rows, {"alone": alone, "busy": busy, "new": new, "seen": seen}, args.json)


def with_ray(args: argparse.Namespace, then: Callable[[dict[str, str]], None]) -> None:
    """Two deployments on a cluster of this machine, for as long as ``then`` runs."""
    from specexport_runtime.ray_serve import deploy

    with ray_cluster(4) as port:
        settings: dict[str, Any] = {"bundle": args.bundle, "port": port, "max_num_seqs": args.rows}
        deploy({**settings, "app_name": "direct"}, route_prefix="/direct")
        deploy({**settings, "app_name": "prefix", "routing": "prefix"}, route_prefix="/prefix")
        base = f"http://127.0.0.1:{port}"
        then({"Ray's proxy": f"{base}/direct", "Ray, prefix routing": f"{base}/prefix"})


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait for ``/ready``."""
    end = time.monotonic() + WAIT_S
    while server.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("`specexport serve` did not start")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, default in (("requests", 40), ("rows", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "specexport_runtime", "serve", str(args.bundle), "--port", str(port)]
    command += ["--max-num-seqs", str(args.rows), "--threads", "1", "--no-spin"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, url)
        with_ray(args, lambda urls: measure({"specexport serve": url, **urls}, args))
    finally:
        server.terminate()
        server.wait(WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A replica of a Ray Serve deployment is killed under load: who notices, and for how long.

    python benchmarks/ray_kill.py engines/demo [--requests 96] [--json FILE]

Starts a Ray cluster of this machine, two replicas and a few clients, on 127.0.0.1 only. Every request streams. One that
fails is sent again, at most ``--retries`` times. Exits 1 if a text is not that of the engine alone, a request fails for
good, or one fails that a replica still alive had begun to answer.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import DEMO_PROMPTS, read_prompts, report
from ray_common import REPLICA, WAIT_S, ray_cluster, read_events, text_of

from specexport_runtime import SamplingParams, SpecEngine


@dataclass
class Outcome:
    """One request: where each attempt was answered (None: by nobody), what failed, and the text."""

    text: str | None = None
    seconds: float = 0.0
    failures: list[tuple[str | None, str]] = field(default_factory=list)


class Load:
    """Clients that send requests until all are answered."""

    def __init__(self, url: str, prompts: list[str], args: argparse.Namespace) -> None:
        self._url, self._prompts, self._args = url, prompts, args
        self.outcomes = [Outcome() for _ in prompts]
        self.begun: Counter[str] = Counter()  # requests that each replica is answering
        self.count = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Send all requests."""
        with ThreadPoolExecutor(self._args.clients) as pool:
            list(pool.map(self._send, range(len(self._prompts))))

    def _send(self, index: int) -> None:
        outcome, start = self.outcomes[index], time.perf_counter()
        for _ in range(1 + self._args.retries):
            name: list[str] = []
            try:
                outcome.text = self._attempt(self._prompts[index], name)
                break
            except httpx.HTTPError as error:
                outcome.failures.append((name[0] if name else None, f"{type(error).__name__}: {error}"))
            finally:
                self._end(name)
        outcome.seconds = time.perf_counter() - start
        self.count += 1

    def _attempt(self, prompt: str, name: list[str]) -> str:
        body = {"prompt": prompt, "max_tokens": self._args.max_tokens, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            if REPLICA in answer.headers:
                name.append(answer.headers[REPLICA])
                with self._lock:
                    self.begun[name[0]] += 1
            answer.raise_for_status()
            return "".join(map(text_of, read_events(answer.iter_lines())))

    def _end(self, name: list[str]) -> None:
        with self._lock:
            self.begun.subtract(name)


def replicas(handle: Any, wanted: int, without: int = 0) -> dict[str, int]:
    """Name and process of each replica, once there are ``wanted`` other than the process ``without``."""
    found: dict[str, int] = {}
    end = time.monotonic() + WAIT_S
    while len(found) < wanted:
        if time.monotonic() > end:
            raise SystemExit(f"only {len(found)} of {wanted} replicas are there")
        try:
            said = handle.describe.remote().result(timeout_s=WAIT_S)
        except Exception:  # it went to the killed replica
            time.sleep(0.05)
            continue
        if said["pid"] != without:
            found[said["replica"]] = said["pid"]
    return found


def kill_under_load(handle: Any, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Run the load, kill a replica that answers at least one request, and wait until there are as many as before."""
    before = replicas(handle, args.replicas)
    clients = threading.Thread(target=load.run)
    clients.start()
    while load.count < args.requests // 4 or not any(load.begun[name] > 0 for name in before):
        time.sleep(0.001)
    victim = max(before, key=lambda name: load.begun[name])
    in_flight = load.begun[victim]
    os.kill(before[victim], signal.SIGKILL)
    start = time.perf_counter()
    after = replicas(handle, args.replicas, before[victim])
    seconds = time.perf_counter() - start
    clients.join()
    return {"victim": victim, "begun_there": in_flight, "seconds": seconds, "kept": [n for n in before if n in after]}


def judge(load: Load, expected: list[str], killed: dict[str, Any], args: argparse.Namespace) -> int:
    """Print what happened; 1 if anything happened that must not."""
    failures = [failure for outcome in load.outcomes for failure in outcome.failures]
    wrong = sum(outcome.text not in (None, text) for outcome, text in zip(load.outcomes, expected, strict=True))
    lost = sum(outcome.text is None for outcome in load.outcomes)
    strangers = [failure for failure in failures if failure[0] not in (None, killed["victim"])]
    affected = sum(bool(outcome.failures) for outcome in load.outcomes)
    rows = [
        ("requests, clients, replicas", f"{args.requests}, {args.clients}, {args.replicas}"),
        ("answers that the killed replica had begun", str(killed["begun_there"])),
        ("requests that failed at least once", str(affected)),
        ("of their failures: begun there / not begun", f"{len([f for f in failures if f[0]])} / "
         f"{len([f for f in failures if not f[0]])}"),
        ("failures of answers that a living replica had begun", str(len(strangers))),
        ("requests that failed for good", str(lost)),
        ("texts unlike the engine's alone", str(wrong)),
        ("seconds until all replicas were there again", f"{killed['seconds']:.1f}"),
        ("slowest request, retries included", f"{max(outcome.seconds for outcome in load.outcomes):.2f} s"),
    ]  # fmt: skip
    record = {"rows": dict(rows), "failures": failures, "killed": killed}
    report("A killed replica under load (Ray Serve)", rows, record, args.json)
    return int(bool(wrong or lost or strangers))


def texts_alone(args: argparse.Namespace, prompts: list[str]) -> list[str]:
    """What one engine in this process says."""
    engine = SpecEngine.load(args.bundle, max_num_seqs=args.rows, spin=False)
    try:
        unique = sorted(set(prompts))
        results = engine.generate(unique, SamplingParams(max_tokens=args.max_tokens))
        texts = {prompt: result.text for prompt, result in zip(unique, results, strict=True)}
        return [texts[prompt] for prompt in prompts]
    finally:
        engine.close()


def serve_and_kill(args: argparse.Namespace, prompts: list[str]) -> tuple[Load, dict[str, Any]]:
    """Start the cluster and the deployment, do it, and end everything."""
    from specexport_runtime.ray_serve import deploy

    with ray_cluster(args.replicas + 2) as port:
        settings = {"bundle": args.bundle, "num_replicas": args.replicas, "max_num_seqs": args.rows, "port": port}
        handle = deploy({**settings, "health_check_period_s": args.health_check_period})
        load = Load(f"http://127.0.0.1:{port}", prompts, args)
        return load, kill_under_load(handle, load, args)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, default in (("requests", 96), ("clients", 8), ("replicas", 2), ("rows", 4), ("max-tokens", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--retries", type=int, default=5)
    parser.add_argument("--health-check-period", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    some = read_prompts(DEMO_PROMPTS, 1000)
    prompts = [some[index % len(some)] for index in range(args.requests)]
    expected = texts_alone(args, prompts)
    load, killed = serve_and_kill(args, prompts)
    return judge(load, expected, killed, args)


if __name__ == "__main__":
    sys.exit(main())

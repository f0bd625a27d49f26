"""Replicas that follow the load: one, then two while many ask, then one again; what happens to requests meanwhile.

    python benchmarks/ray_autoscaling.py engines/demo [--clients 12] [--json FILE]

Starts a Ray cluster of this machine on 127.0.0.1. Clients ask one request after the other, each streamed, until two
replicas have answered for ``--seconds``; then a single client goes on until one replica is left. Exits 1 if a request
fails, a text is not that of the engine alone, or the replicas do not become two and one again.
"""

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import DEMO_PROMPTS, median, read_prompts, report
from ray_common import REPLICA, WAIT_S, ray_cluster, read_events, text_of

from specexport_runtime import SamplingParams, SpecEngine

LIMIT_S = 180.0
"""Longest time for a change of the number of replicas."""
APP = "autoscaled"


@dataclass
class Answer:
    """One request: when it ended, where, how long it took; the text, or what went wrong."""

    prompt: str
    ended: float
    seconds: float
    replica: str = ""
    text: str | None = None
    error: str = ""


@dataclass
class Clients:
    """Clients that ask until they are told to stop."""

    url: str
    prompts: list[str]
    max_tokens: int
    answers: list[Answer] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, count: int) -> None:
        """Ask with so many clients until ``stop`` is set."""
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(self._client, range(count)))

    def _client(self, number: int) -> None:
        turn = number
        while not self.stop.is_set():
            self.answers.append(self._ask(self.prompts[turn % len(self.prompts)]))
            turn += 7  # clients do not ask the same things at a time

    def _ask(self, prompt: str) -> Answer:
        body = {"prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        answer, start = Answer(prompt, 0.0, 0.0), time.perf_counter()
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=WAIT_S) as response:
                response.raise_for_status()
                answer.replica = response.headers[REPLICA]
                answer.text = "".join(map(text_of, read_events(response.iter_lines())))
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        answer.seconds = answer.ended - start
        return answer


def num_replicas() -> int:
    """Replicas that run."""
    from ray import serve

    return int(serve.status().applications[APP].deployments["engine"].replica_states.get("RUNNING", 0))


def wait_for(count: int) -> float | None:
    """Seconds until so many replicas run; None if they never do."""
    start = time.perf_counter()
    while num_replicas() != count:
        if time.perf_counter() - start > LIMIT_S:
            return None
        time.sleep(0.1)
    return time.perf_counter() - start


def load_and_relax(clients: Clients, args: argparse.Namespace) -> dict[str, Any]:
    """Many clients, then one; when the number of replicas changed, and what was answered before and after."""
    crowd = threading.Thread(target=clients.run, args=(args.clients,))
    begun = time.perf_counter()
    crowd.start()
    up = wait_for(2)
    two = time.perf_counter()
    if up is not None:
        time.sleep(args.seconds)
    ended = time.perf_counter()
    clients.stop.set()
    crowd.join()
    clients.stop.clear()
    single = threading.Thread(target=clients.run, args=(1,))
    single.start()
    down = wait_for(1) if up is not None else None
    clients.stop.set()
    single.join()
    return {"up_s": up, "down_s": down, "begun": begun, "two": two, "ended": ended}


def rate(answers: list[Answer], begin: float, end: float, tokens: int) -> float:
    """Tokens a second of the answers that ended between two times."""
    return tokens * sum(begin <= each.ended < end for each in answers) / (end - begin)


def judge(clients: Clients, what: dict[str, Any], expected: dict[str, str], args: argparse.Namespace) -> int:
    """Print what happened; 1 if anything happened that must not."""
    answers = clients.answers
    failed = [each for each in answers if each.text is None]
    wrong = [each for each in answers if each.text not in (None, expected[each.prompt])]
    before = rate(answers, what["begun"], what["two"], args.max_tokens)
    after = rate(answers, what["two"], what["ended"], args.max_tokens)

    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.1f}"

    rows = [
        ("requests, clients, then one", f"{len(answers)}, {args.clients}"),
        ("seconds of load until two replicas ran", seconds(what["up_s"])),
        ("tokens/s with one replica, with two", f"{before:.0f}, {after:.0f} ({after / max(before, 1):.2f}x)"),
        ("seconds after the load until one replica was left", seconds(what["down_s"])),
        ("replicas that answered", str(len({each.replica for each in answers if each.replica}))),
        ("requests that failed", str(len(failed))),
        ("texts unlike the engine's alone", str(len(wrong))),
        ("seconds of a request: median, slowest",
         f"{median(each.seconds for each in answers):.2f}, {max(each.seconds for each in answers):.2f}"),
    ]  # fmt: skip
    record = {**what, "rows": dict(rows), "errors": [each.error for each in failed]}
    report("Replicas that follow the load (Ray Serve)", rows, record, args.json)
    return int(bool(failed or wrong) or what["up_s"] is None or what["down_s"] is None)


def texts_alone(args: argparse.Namespace, prompts: list[str]) -> dict[str, str]:
    """What one engine in this process says."""
    engine = SpecEngine.load(args.bundle, max_num_seqs=args.rows, spin=False)
    try:
        results = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens, ignore_eos=True))
        return {prompt: result.text for prompt, result in zip(prompts, results, strict=True)}
    finally:
        engine.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, default in (("clients", 12), ("rows", 4), ("max-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("seconds", 20.0), ("upscale-delay", 2.0), ("downscale-delay", 5.0), ("look-back", 12.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from specexport_runtime.ray_serve import deploy

    prompts = sorted(set(read_prompts(DEMO_PROMPTS, 1000)))
    expected = texts_alone(args, prompts)
    with ray_cluster(4) as port:
        settings: dict[str, Any] = {"bundle": args.bundle, "port": port, "max_num_seqs": args.rows, "app_name": APP}
        settings |= {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": args.upscale_delay}
        settings |= {"downscale_delay_s": args.downscale_delay, "look_back_period_s": args.look_back}
        deploy(settings)
        clients = Clients(f"http://127.0.0.1:{port}", prompts, args.max_tokens)
        what = load_and_relax(clients, args)
    return judge(clients, what, expected, args)


if __name__ == "__main__":
    sys.exit(main())

"""What prefix-affine routing brings: conversations of several turns on two replicas that keep what they have read.

    python benchmarks/ray_prefixes.py engines/demo [--conversations 8] [--turns 6] [--json FILE]

One application for each way to choose a replica, on a cluster of this machine, asked in turns: Ray's own choice, by the
header ``X-Session-Id``, and by the beginning of the prompt. In each run as many clients as conversations say all turns,
each as soon as it has its answer; a prompt is all that was said before. Conversations of different runs begin
differently, so that no run finds what another one left.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from common import DEMO_PROMPTS, median, read_prompts, report
from ray_common import REPLICA, WAIT_S, ray_cluster, read_events, text_of

ROUTINGS = ("balanced", "session", "prefix")
OPENING = 480
"""Characters of a conversation's first message: more than `prefix_chars`, which say where it goes."""


@dataclass
class Turn:
    """One request: where it was answered, its tokens, and seconds."""

    replica: str
    prompt: int
    cached: int
    generated: int
    first_s: float


@dataclass
class Run:
    """All conversations by one way of routing."""

    seconds: float = 0.0
    talks: list[list[Turn]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def later(self) -> list[Turn]:
        """All turns but the first ones."""
        return [turn for talk in self.talks for turn in talk[1:]]

    @property
    def cached(self) -> float:
        """Share of the later turns' prompts that was not read again."""
        return sum(turn.cached for turn in self.later) / sum(turn.prompt for turn in self.later)

    @property
    def first_s(self) -> float:
        """Median seconds to the first text of later turns."""
        return median(turn.first_s for turn in self.later)

    @property
    def rate(self) -> float:
        """Generated tokens a second, of all together."""
        return sum(turn.generated for talk in self.talks for turn in talk) / self.seconds

    @property
    def stayed(self) -> float:
        """Share of later turns that were answered where the turn before was."""
        pairs = [pair for talk in self.talks for pair in pairwise(talk)]
        return sum(one.replica == other.replica for one, other in pairs) / len(pairs)


def say(client: httpx.Client, url: str, prompt: str, session: str, max_tokens: int) -> tuple[str, Turn]:
    """One turn; its text and what it took."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    text, first, usage, start = "", None, {}, time.perf_counter()
    headers = {"X-Session-Id": session}
    with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S) as answer:
        answer.raise_for_status()
        for event in read_events(answer.iter_lines()):
            text += text_of(event)
            first = time.perf_counter() - start if first is None and text else first
            usage = event.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        spent = first if first is not None else time.perf_counter() - start
        return text, Turn(answer.headers[REPLICA], usage["prompt_tokens"], cached, usage["completion_tokens"], spent)


def converse(url: str, name: str, messages: list[str], max_tokens: int) -> tuple[list[Turn], str]:
    """One conversation, a turn for each message; what was said in the end."""
    said, turns = "", []
    with httpx.Client() as client:
        for message in messages:
            text, turn = say(client, url, said + message, name, max_tokens)
            said += message + text
            turns.append(turn)
    return turns, said


def run_all(url: str, number: int, args: argparse.Namespace) -> Run:
    """All conversations at a time."""
    prompts = read_prompts(DEMO_PROMPTS, 1000)

    def messages(talk: int) -> list[str]:
        begin, rest = f"# conversation {number}.{talk}\n", prompts[talk % len(prompts) :] + prompts
        opening = begin + ("\n\n".join(rest) * 9)[: OPENING - len(begin)]
        return [opening, *(f"\n\n\n{text}" for text in rest[: args.turns - 1])]

    run, start = Run(), time.perf_counter()
    with ThreadPoolExecutor(args.conversations) as pool:
        found = pool.map(
            lambda talk: converse(url, f"{number}.{talk}", messages(talk), args.max_tokens), range(args.conversations)
        )
        for turns, text in found:
            run.talks.append(turns)
            run.texts.append(text)
    run.seconds = time.perf_counter() - start
    return run


def measure(urls: dict[str, str], args: argparse.Namespace) -> dict[str, list[Run]]:
    """All ways in turns; the first run of each is not counted."""
    runs: dict[str, list[Run]] = {name: [] for name in urls}
    for number in range(args.repeats + 1):
        names = list(urls)
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            run = run_all(urls[name], number, args)
            if number:
                runs[name].append(run)
    return runs


def show(runs: dict[str, list[Run]], args: argparse.Namespace) -> None:
    """Print a table of the ways, and what each brings over Ray's own choice."""
    rows = []
    base = runs["balanced"]
    for name, each in runs.items():
        cached, stayed = (median(getattr(run, what) for run in each) for what in ("cached", "stayed"))
        first, rate = (median(getattr(run, what) for run in each) for what in ("first_s", "rate"))
        ratios = [
            median(getattr(run, what) / getattr(other, what) for run, other in zip(each, base, strict=True))
            for what in ("first_s", "rate")
        ]
        rows += [
            (f"{name}: later turns where the one before was", f"{stayed:.2f}"),
            (f"{name}: known tokens of their prompts", f"{cached:.3f}"),
            (f"{name}: to their first text", f"{1e3 * first:.1f} ms ({ratios[0]:.2f}x)"),
            (f"{name}: all together", f"{rate:.0f} tokens/s ({ratios[1]:.2f}x)"),
        ]
    texts = [run.texts for each in zip(*runs.values(), strict=True) for run in each]
    sets = [texts[i : i + len(runs)] for i in range(0, len(texts), len(runs))]
    same = sum(len(set(talk)) == 1 for each in sets for talk in zip(*each, strict=True))
    rows.append(("conversations with one text by all ways", f"{same} of {len(sets) * args.conversations}"))
    record = {name: [{**vars(run), "talks": [[vars(t) for t in talk] for talk in run.talks]} for run in each]
              for name, each in runs.items()}  # fmt: skip
    title = f"Routing of {args.conversations} conversations, {args.turns} turns of {args.max_tokens} tokens"
    report(title, rows, record, args.json)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, default in (("conversations", 8), ("turns", 6), ("max-tokens", 48), ("repeats", 5), ("replicas", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=8, help="sequences that a replica decodes at a time")
    parser.add_argument("--prefix-rows", type=int, default=8, help="rows of a replica that only keep texts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from specexport_runtime.ray_serve import deploy

    with ray_cluster(len(ROUTINGS) * args.replicas + 2) as port:
        settings: dict[str, Any] = {"bundle": args.bundle, "port": port, "num_replicas": args.replicas}
        settings |= {"max_num_seqs": args.rows, "prefix_rows": args.prefix_rows}
        for name in ROUTINGS:
            deploy({**settings, "app_name": name, "routing": name}, route_prefix=f"/{name}")
        show(measure({name: f"http://127.0.0.1:{port}/{name}" for name in ROUTINGS}, args), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

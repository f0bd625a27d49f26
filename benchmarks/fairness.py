"""Two owners on one engine: what one that asks now and then waits for its first token while the other has a crowd.

    python benchmarks/fairness.py engines/demo [--rows 4] [--waiting 100] [--json FILE]

In turns: the one alone; beside the crowd of another owner; and beside a crowd of its own, which is what sharing one
queue means. Then the crowd without it, for the tokens a second that turns and pauses cost. Texts are compared with
those of the same requests alone: of an int8 engine they are equal, paused or not. Exits with 1 if one differs in an
engine that is, by ``--exact``, to give the same bits.
"""

import argparse
import random
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from common import DEMO_PROMPTS, median, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.decoding.handle import RequestHandle

CROWD, GUEST = "crowd", "guest"


def parse_args() -> argparse.Namespace:
    """Command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS, help="JSONL: what both ask")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prefix-rows", type=int, default=0, help="rows that may keep what is paused")
    parser.add_argument("--waiting", type=int, default=100, help="requests of the crowd that wait")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of a request of the crowd")
    parser.add_argument("--asks", type=int, default=12, help="requests of the other, one after the other")
    parser.add_argument("--ask-tokens", type=int, default=24, help="new tokens of each of them")
    parser.add_argument("--think-ms", type=float, default=100.0, help="longest pause before each of them")
    parser.add_argument("--shared-asks", type=int, default=2, help="of these, how many wait in the crowd's own queue")
    parser.add_argument("--drafter", help="as in `specexport generate`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--exact", action="store_true", help="the engine gives the same bits in steps of any width")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Crowd:
    """Requests of one owner, so many of which wait at any time.

    Args:
        engine: where they wait.
        prompts: of these, in turns.
        args: how many, and of which length.
        drafting: how to draft.
    """

    def __init__(self, engine: SpecEngine, prompts: list[str], args: argparse.Namespace, drafting: dict[str, Any]):
        self._engine, self._prompts, self._args, self._drafting = engine, prompts, args, drafting
        self._params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
        self._numbers = count()
        self.handles: list[RequestHandle] = []

    def top_up(self) -> None:
        """As many wait as are to wait; all rows are taken."""
        load = self._engine.current_load()
        missing = self._args.waiting + self._args.rows - load.num_waiting - load.num_running
        for _ in range(missing):
            prompt = self._prompts[next(self._numbers) % len(self._prompts)]
            self.handles.append(self._engine.submit(prompt, self._params, owner=CROWD, **self._drafting))

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(handle.request.stats.num_generated_tokens for handle in self.handles)

    def end(self) -> list[Any]:
        """Cancel what is left; the results of those that ended by themselves."""
        for handle in self.handles:
            handle.cancel()
        results = [handle.result() for handle in self.handles]
        return [result for result in results if result.finish_reason != "cancelled"]


def ask(engine: SpecEngine, prompt: str, owner: str, args: argparse.Namespace, drafting: dict[str, Any]) -> Any:
    """The result of one request of the other."""
    params = SamplingParams(max_tokens=args.ask_tokens, ignore_eos=True)
    return engine.submit(prompt, params, owner=owner, **drafting).result()


def first_s(result: Any) -> float:
    """Seconds from submission to the first token."""
    return float(result.stats.first_token_time - result.stats.submit_time)


def beside(
    engine: SpecEngine, prompts: list[str], owner: str, asks: int, args: argparse.Namespace, drafting: dict[str, Any]
) -> dict[str, Any]:
    """What it is to ask beside a crowd: seconds to first tokens, texts, tokens a second of all, pauses."""
    crowd = Crowd(engine, prompts, args, drafting)
    crowd.top_up()
    while crowd.tokens < args.rows * 16:  # all rows decode
        time.sleep(0.002)
    start, before, results = time.perf_counter(), crowd.tokens, []
    pauses = random.Random(7)
    for number in range(asks):
        crowd.top_up()
        time.sleep(pauses.random() * args.think_ms / 1000)  # else it would always come at the beginning of a round
        results.append(ask(engine, prompts[number % len(prompts)], owner, args, drafting))
    seconds, made = time.perf_counter() - start, crowd.tokens - before
    ended = crowd.end()
    handles = [handle.request for handle in crowd.handles]
    return {
        "first_s": [first_s(result) for result in results],
        "texts": [result.token_ids for result in results],
        "tokens_per_s": (made + sum(len(result.token_ids) for result in results)) / seconds,
        "preemptions": sum(seq.stats.preemptions for seq in handles),
        "paused": [(result.prompt, result.token_ids) for result in ended if result.stats.preemptions],
        "seconds": seconds,
    }


def undisturbed(
    engine: SpecEngine, prompts: list[str], seconds: float, args: argparse.Namespace, drafting: dict[str, Any]
) -> float:
    """Tokens a second of the crowd when nobody else asks, over as long a time."""
    crowd = Crowd(engine, prompts, args, drafting)
    crowd.top_up()
    while crowd.tokens < args.rows * 16:
        time.sleep(0.002)
    start, before = time.perf_counter(), crowd.tokens
    while time.perf_counter() - start < seconds:
        crowd.top_up()
        time.sleep(0.02)
    speed = (crowd.tokens - before) / (time.perf_counter() - start)
    crowd.end()
    return speed


def main() -> None:
    """Measure and report."""
    args = parse_args()
    texts = read_prompts(args.prompts, 64)
    # Each begins otherwise, so that none is known from another: what is measured is reading it.
    prompts = [f"# {number}\n{texts[number % len(texts)]}" for number in range(max(64, args.asks))]
    runs: list[dict[str, Any]] = []
    different = compared = 0
    with closing(
        SpecEngine.load(args.bundle, max_num_seqs=args.rows, prefix_rows=args.prefix_rows, num_threads=args.threads)
    ) as engine:
        for number in range(args.repeats + 1):

            def salted(way: str, number: int = number) -> dict[str, Any]:
                # Nothing that one way has read is there for another.
                named = {} if args.drafter is None else {"drafter": args.drafter}
                return {"cache_salt": f"{way}-{number}", **named}

            alone = [ask(engine, prompts[i % len(prompts)], GUEST, args, salted("alone")) for i in range(args.asks)]
            fair = beside(engine, prompts, GUEST, args.asks, args, salted("fair"))
            shared = beside(engine, prompts, CROWD, args.shared_asks, args, salted("shared"))
            crowd = undisturbed(engine, prompts, fair["seconds"], args, salted("crowd"))
            for result, tokens in zip(alone, fair["texts"], strict=True):
                compared, different = compared + 1, different + (result.token_ids != tokens)
            params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
            for prompt, tokens in fair["paused"][:4]:
                again = engine.generate(prompt, params, **salted("again"))[0].token_ids
                compared, different = compared + 1, different + (again != tokens)
            if number:  # the first is the warm-up
                runs.append({
                    "alone": [first_s(result) for result in alone], "fair": fair, "shared": shared, "crowd": crowd,
                })  # fmt: skip
        engine.check()
    firsts = {
        "alone": [seconds for run in runs for seconds in run["alone"]],
        "fair": [seconds for run in runs for seconds in run["fair"]["first_s"]],
        "shared": [seconds for run in runs for seconds in run["shared"]["first_s"]],
    }
    middle = {name: median(values) for name, values in firsts.items()}
    ratios = [median(run["fair"]["first_s"]) / median(run["alone"]) for run in runs]
    speeds = [run["fair"]["tokens_per_s"] / run["crowd"] for run in runs]
    rows = [
        ("first token alone, median and longest", f"{1e3 * middle['alone']:.1f} ms, {1e3 * max(firsts['alone']):.1f}"),
        ("beside another owner's crowd", f"{1e3 * middle['fair']:.1f} ms, {1e3 * max(firsts['fair']):.1f}"),
        ("in the same queue as the crowd", f"{1e3 * middle['shared']:.1f} ms, {1e3 * max(firsts['shared']):.1f}"),
        ("beside another's crowd, over alone", f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"),
        ("tokens/s of all, over the crowd without it", f"{median(speeds):.3f}"),
        ("tokens/s of the crowd without it", f"{median(run['crowd'] for run in runs):.1f}"),
        ("pauses a run", f"{median(run['fair']['preemptions'] for run in runs):.0f}"),
        ("texts that differ from those alone", f"{different} of {compared}"),
    ]
    title = f"fairness: {args.bundle.name}, {args.rows} rows, {args.waiting} waiting"
    report(title, rows, {"runs": runs}, args.json)
    sys.exit(int(args.exact and different > 0))


if __name__ == "__main__":
    main()

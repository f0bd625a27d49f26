"""Prefix reuse: what a conversation reads again, and the first token behind a long prompt that is known.

Every measurement is made on engines with and without reuse, in turns, and the texts are compared.
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from common import DEMO_PROMPTS, median, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine


def parse_args() -> argparse.Namespace:
    """Command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS, help="JSONL: what is said in each turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a turn")
    parser.add_argument("--system", type=int, default=1500, help="tokens of the long prompt")
    parser.add_argument("--drafter", help="as in `specexport generate`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def converse(engine: SpecEngine, said: list[list[int]], tokens: int, drafting: dict[str, Any]) -> dict[str, list[Any]]:
    """One conversation: texts; of each turn its new tokens, those that were read, and seconds to its first token."""
    history: list[int] = []
    found: dict[str, list[Any]] = {"texts": [], "new": [], "read": [], "seconds": []}
    for turn, ids in enumerate(said):
        known = len(history)
        history += ids if not turn else ids[1:]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        result = engine.generate([history], [params], **drafting)[0]
        found["texts"].append(result.token_ids)
        # The last token of an answer was never fed: it is new to the target too.
        found["new"].append(len(history) - max(known - 1, 0))
        found["read"].append(len(history) - (result.stats.cached_tokens or 0))
        found["seconds"].append(result.stats.time_to_first_token_s)
        history = [*history, *result.token_ids]
    return found


def first_tokens(engine: SpecEngine, system: list[int], said: list[list[int]], drafting: dict[str, Any]) -> list[float]:
    """Seconds to the first token of two requests with one long beginning, one after the other."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    results = [engine.generate([system + ids[1:]], [params], **drafting)[0] for ids in said[:2]]
    return [result.stats.time_to_first_token_s or 0.0 for result in results]


def main() -> None:
    """Measure and report."""
    args = parse_args()
    drafting = {} if args.drafter is None else {"drafter": args.drafter}
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    firsts: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(args.repeats):
        for reuse in (False, True):
            with closing(
                SpecEngine.load(args.bundle, max_num_seqs=2, num_threads=args.threads, enable_prefix_caching=reuse)
            ) as engine:
                said = [engine.encode(text) for text in read_prompts(args.prompts, args.turns)]
                runs[reuse].append(converse(engine, said, args.tokens, drafting))
                long = [token for ids in said for token in ids[1:]]
                long = [said[0][0], *(long * (args.system // len(long) + 1))[: args.system - 1]]
                firsts[reuse].append(first_tokens(engine, long, said, drafting))
                engine.check()
    with_reuse, without = runs[True][0], runs[False][0]
    equal = sum(run["texts"] == without["texts"] for each in runs.values() for run in each)
    turns = [median(sum(run["seconds"][1:]) for run in runs[reuse]) for reuse in (True, False)]
    second = median(pair[1] / pair[0] for pair in firsts[True])
    again = median(pair[1] / pair[0] for pair in firsts[False])
    rows = [
        ("turns 2 on: new tokens", f"{sum(with_reuse['new'][1:])}"),
        ("tokens read with reuse", f"{sum(with_reuse['read'][1:])}"),
        ("tokens read without", f"{sum(without['read'][1:])}"),
        ("read over new", f"{sum(with_reuse['read'][1:]) / sum(with_reuse['new'][1:]):.3f}"),
        ("seconds to the first tokens, with and without", f"{turns[0]:.3f}, {turns[1]:.3f}"),
        (f"first token behind {args.system} known tokens, over the first request", f"{second:.3f}"),
        ("the same without reuse", f"{again:.3f}"),
        ("conversations equal", f"{equal} of {2 * args.repeats}"),
    ]
    report(f"prefixes: {args.bundle.name}", rows, {"runs": runs, "firsts": firsts}, args.json)


if __name__ == "__main__":
    main()

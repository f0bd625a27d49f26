"""Batches: the host's own time, lookup that finds nothing, and continuous against static batching.

    python benchmarks/batching.py engines/demo [--json FILE]

Everything is measured in turns within one run; figures are medians.
"""

import argparse
import math
import random
from pathlib import Path
from typing import Any

from common import DEMO_PROMPTS, median, read_prompts, report, timed

from specexport_runtime import SamplingParams, SpecEngine

NEVER_MATCHES = 4096  # longer than any text here


def host_share(engine: SpecEngine, prompts: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Scheduling and packing as a share of a round, plain and with lookup, all rows busy."""
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    shares: dict[str, float] = {}
    for drafter in ("none", "lookup"):
        runs = []
        for _ in range(args.repeats):
            engine.generate(prompts, params, drafter=drafter)
            times = engine.times
            runs.append((times.schedule + times.pack) / times.total)
        shares[drafter] = median(runs)
    return shares


def no_match(engine: SpecEngine, prompts: list[str], args: argparse.Namespace) -> float:
    """Time of lookup that never finds a match over the time of plain decoding."""
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    ratios = []
    for _ in range(args.repeats):
        plain, _ = timed(lambda: engine.generate(prompts, params, drafter="none"))
        lookup, results = timed(lambda: engine.generate(prompts, params, drafter="lookup"))
        if any(result.stats.drafted for result in results):
            raise SystemExit("lookup found a match where it must not")
        ratios.append(lookup / plain)
    return median(ratios)


def draw_lengths(kind: str, args: argparse.Namespace) -> list[int]:
    """Tokens of each request, between the shortest and the longest: evenly spread, or evenly in their logarithm."""
    chosen = random.Random(args.seed)
    if kind == "uniform":
        return [chosen.randint(args.shortest, args.longest) for _ in range(args.requests)]
    span = math.log(args.longest / args.shortest)
    return [round(args.shortest * math.exp(span * chosen.random())) for _ in range(args.requests)]


def continuous_against_static(
    engine: SpecEngine, prompts: list[str], kind: str, drafter: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Requests of mixed length: all at once, against groups that wait for their longest.

    Static batching in two forms: ``shrinking`` lets finished sequences leave their group, which this engine does by
    itself; ``full`` keeps every sequence computing until the longest of its group is done, as static batches do that
    pad finished sequences. The tokens that nobody asked for are not counted.
    """
    requests = [prompts[i % len(prompts)] for i in range(args.requests)]
    lengths = draw_lengths(kind, args)
    groups = [slice(start, start + args.batch_size) for start in range(0, len(requests), args.batch_size)]

    def run(parts: list[slice], *, full: bool = False) -> list[list[int]]:
        texts = []
        for part in parts:
            asked = lengths[part]
            made = [max(asked)] * len(asked) if full else asked
            each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in made]
            results = engine.generate(requests[part], each, drafter=drafter)
            texts += [result.token_ids[:count] for result, count in zip(results, asked, strict=True)]
        return texts

    runs: dict[str, list[float]] = {"continuous": [], "shrinking": [], "full": []}
    same = True
    for _ in range(args.repeats):
        seconds, together = timed(lambda: run([slice(None)]))
        runs["continuous"].append(seconds)
        for form in ("shrinking", "full"):
            seconds, apart = timed(lambda form=form: run(groups, full=form == "full"))
            runs[form].append(seconds)
            same &= together == apart
    ratios = {
        form: median(static / own for static, own in zip(runs[form], runs["continuous"], strict=True))
        for form in ("shrinking", "full")
    }
    return {"tokens": sum(lengths), "seconds": runs, "speedup": ratios, "same_text": same}


def main() -> None:
    """Run the three and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--lengths", default="log-uniform,uniform", help="how the requests' lengths are spread")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = args.batch_size
    prompts = read_prompts(args.prompts, max(rows, 16))
    crowd = [prompts[i % len(prompts)] for i in range(rows)]
    record: dict[str, Any] = {"no_match": {}}
    options: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": args.max_model_len}
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, **options, match_length=NEVER_MATCHES)
    engine.generate(crowd, SamplingParams(max_tokens=16, ignore_eos=True))  # warm-up
    for name, some in (("1", crowd[:1]), (str(rows), crowd)):
        record["no_match"][name] = no_match(engine, some, args)
    engine.close()
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, **options)
    engine.generate(crowd, SamplingParams(max_tokens=16, ignore_eos=True), drafter="lookup")
    record["host_share"] = host_share(engine, crowd, args)
    record["continuous"] = {
        f"{kind} lengths, {drafter}": continuous_against_static(engine, prompts, kind, drafter, args)
        for kind in args.lengths.split(",")
        for drafter in ("none", "lookup")
    }
    engine.close()
    table = [
        (f"scheduling and packing, batch {rows}, {name}", f"{share:.1%} of the round")
        for name, share in record["host_share"].items()
    ]
    table += [
        (f"lookup without a match over plain, time, batch {name}", f"{ratio:.3f}")
        for name, ratio in record["no_match"].items()
    ]
    for name, found in record["continuous"].items():
        same = "same text" if found["same_text"] else "DIFFERENT TEXT"
        label = f"continuous over static, {args.requests} requests, {rows} rows, {name}"
        ratios = ", ".join(f"{ratio:.2f}× ({form})" for form, ratio in found["speedup"].items())
        table.append((label, f"{ratios}; {found['tokens']} tokens, {same}"))
    report("Batching", table, record, args.json)


if __name__ == "__main__":
    main()

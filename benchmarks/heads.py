"""What a draft head brings, and what it costs: text of several domains, and single steps, in turns.

python benchmarks/heads.py engines/with-head --prompts code=code.jsonl,math=math.jsonl

Ways: plain decoding; the head alone with K tokens; ``auto``, and what that would be without the head (copies alone).
With ``--pair`` a bundle of the same target with a draft model is measured behind it, each over its own plain decoding.
Nothing is remembered from one text for the next. Steps: one of the target with and without features, one of
the head on one token, on several that it catches up on, and with the logits of all, as a parallel head drafts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report
from turns import measure_in_turns, ratio, read_domains

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.packing.batch import ModelRunner, RowWork

PAST = 64


def ways_of(
    args: argparse.Namespace, prompts: list[str], drafter: str = "head"
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What makes the arguments of ``generate``, by the name of a way."""

    def way(**drafting: Any) -> Callable[[int], dict[str, Any]]:
        return lambda tokens: {
            "prompts": prompts,
            "params": SamplingParams(max_tokens=tokens, ignore_eos=True),
            "remember": False,
            **drafting,
        }

    alone = {f"{drafter} K={k}": way(drafter=drafter, num_speculative_tokens=k) for k in args.lookaheads}
    ways = {"plain": way(drafter="none"), **alone, "auto": way(drafter="auto")}
    return ways | (
        {"auto without the head": way(drafter="suffix", num_speculative_tokens="auto")} if drafter == "head" else {}
    )


def step_times(engine: SpecEngine, repeats: int) -> dict[str, float]:
    """Milliseconds of single steps, medians over turns."""
    target, head = ModelRunner(engine.target), ModelRunner(engine.head)
    if engine.head is None or not engine.target.gives_features:
        raise SystemExit("the bundle has no draft head")
    tokens = [7 + i % 50 for i in range(PAST)]
    features = np.random.default_rng(0).normal(0, 1, (PAST, engine.head.feature_size)).astype(np.float32)
    target.prefill(0, tokens)
    head.prefill(0, tokens, features)

    def run(runner: ModelRunner, count: int, wanted: bool = False, places: int = 1) -> float:
        rows = features[:count] if runner is head else None
        if runner is target:
            engine.target.want_features(wanted)
        start = time.perf_counter()
        runner.step(0, [RowWork(tokens[:count], places, rows, drafts=count)], "token_ids")  # nothing enters a state
        return 1e3 * (time.perf_counter() - start)

    points = {
        "target, 1 token": lambda: run(target, 1),
        "target, 1 token, with features": lambda: run(target, 1, True),
        "target, 5 tokens": lambda: run(target, 5),
        "target, 5 tokens, with features": lambda: run(target, 5, True),
        "head, 1 token": lambda: run(head, 1),
        "head, 3 tokens": lambda: run(head, 3),
        "head, 8 tokens": lambda: run(head, 8),
        "head, 4 tokens and the logits of all": lambda: run(head, 4, places=4),
        "head, 8 tokens and the logits of all": lambda: run(head, 8, places=8),
    }
    found: dict[str, list[float]] = {name: [] for name in points}
    for _ in range(repeats):
        for name, point in points.items():
            point()  # the step before was another: caches of the processor
            found[name].append(point())
    engine.target.want_features(False)
    for runner in (target, head):
        runner.release_row(0)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    """Measure steps, then texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", required=True, help="NAME=FILE,…")
    parser.add_argument("--pair", type=Path, help="a bundle of the same target with a draft model")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file that are left out")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, max_num_seqs=args.batch_size, max_model_len=1024)
    steps = step_times(engine, args.step_repeats)
    rows = [(name, f"{value:.2f} ms") for name, value in steps.items()]
    rows.append(("head step / target step", f"{steps['head, 1 token'] / steps['target, 1 token']:.3f}"))
    extra = steps["target, 5 tokens, with features"] / steps["target, 5 tokens"] - 1
    rows.append(("features in a step of 5 tokens", f"{extra:+.1%}"))
    records = {}
    other = (
        None
        if args.pair is None
        else SpecEngine.load(args.pair, enable_prefix_caching=False, max_num_seqs=args.batch_size, max_model_len=1024)
    )
    for domain, prompts in read_domains(args.prompts, args.num_prompts, args.skip).items():
        ways = ways_of(args, prompts)
        record = measure_in_turns(engine, ways, size=args.batch_size, tokens=args.tokens, repeats=args.repeats)
        records[domain] = record
        rows.append((f"{domain}: plain", f"{median(record['tokens_per_second']['plain']):.1f} tokens/s"))
        for way in list(ways)[1:]:
            drafted, accepted, rounds = record["counts"][way]
            rows.append((
                f"{domain}: {way}",
                f"{ratio(record, way, 'plain'):.2f}x, accepted {accepted / max(drafted, 1):.2f}, "
                f"{1 + accepted / max(rounds, 1):.2f} tokens a round",
            ))  # fmt: skip
        rows.append(
            (f"{domain}: auto / auto without the head", f"{ratio(record, 'auto', 'auto without the head'):.2f}")
        )
        rows.append((f"{domain}: texts that differ from plain", str(record["different"])))
        if other is not None:
            found = measure_in_turns(
                other,
                ways_of(args, prompts, "draft-model"),
                size=args.batch_size,
                tokens=args.tokens,
                repeats=args.repeats,
            )
            records[f"{domain}, pair"] = found
            for k in args.lookaheads:
                over = ratio(found, f"draft-model K={k}", "plain")
                rows.append((f"{domain}: draft model K={k}", f"{over:.2f}x"))
            rows.append((f"{domain}: auto with the draft model", f"{ratio(found, 'auto', 'plain'):.2f}x"))
    report(f"Draft head of {args.bundle.name}, batch {args.batch_size}", rows, {"steps": steps, **records}, args.json)


if __name__ == "__main__":
    main()

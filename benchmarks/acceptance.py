"""Accepted draft tokens a round, of sampled text, by both rules: as a block, and token by token.

Every prompt is continued a few times by either rule. Accepted tokens are counted; and of each draft it is computed
how many either rule accepts in the mean, which tells the two apart with far fewer texts. Intervals are of 95 %, by
resampling texts. Rows are those of the target's logits that a rule makes distributions of; what one takes is in
``sampling.py``. Nothing here depends on the machine.

python benchmarks/acceptance.py engines/demo
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import DEMO_PROMPTS, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.sampling.block import RULES

Totals = npt.NDArray[np.float64]
"""[texts, 5]: accepted tokens, rows, drafts of a model, and what a block and tests one by one accept in the mean."""


def watched(rule: Callable[..., Any], totals: dict[Any, Totals]) -> Callable[..., Any]:
    """``rule``, which notes by text what it accepts of each draft of a model, and what either does in the mean."""

    def accept(drafted: Any, distributions: Any, target: Any, draws: Any) -> Any:
        rows = set[int]()
        verdict = rule(drafted, distributions, lambda j: (rows.add(j), target(j))[1], draws)
        if distributions:
            block, token, total = 1.0, 1.0, np.array([verdict.accepted, len(rows), 1.0, 0.0, 0.0])
            for j, drawn in enumerate(drafted):
                ratio = target(j).probability(drawn) / distributions[j].probability(drawn)
                block, token = min(1.0, block * ratio), token * min(1.0, ratio)
                total[3:] += block, token
            totals[draws] = totals.get(draws, 0.0) + total
        return verdict

    return accept


def count(engine: SpecEngine, prompts: list[str], args: argparse.Namespace, lookahead: int, name: str) -> Totals:
    """What one rule does, and both would do."""
    rule = RULES[name]
    totals: dict[Any, Totals] = {}
    RULES[name] = watched(rule, totals)
    for seed in range(args.seeds):
        own = range(seed * len(prompts), (seed + 1) * len(prompts))  # texts with one seed share their numbers
        params = [SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=each) for each in own]
        engine.generate(prompts, params, num_speculative_tokens=lookahead, acceptance=name)
    RULES[name] = rule
    return np.array(list(totals.values()))


def ratio(above: Totals, below: Totals) -> npt.NDArray[np.float64]:
    """[3]: the ratio of two sums over texts, and what 95 % of resampling gives."""
    chosen = np.random.default_rng(0).integers(0, len(above), (4000, len(above)))
    low, high = np.quantile(above[chosen].sum(axis=1) / below[chosen].sum(axis=1), [0.025, 0.975])
    return np.array([above.sum() / below.sum(), low, high])


def main() -> None:
    """Count, for every K, and print means, their ratio and its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=20, help="texts of each prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--lookaheads", default="2,4,8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.num_prompts)
    engine = SpecEngine.load(args.bundle, max_num_seqs=len(prompts), num_threads=args.threads)
    rows, record = [], []
    for lookahead in [int(each) for each in args.lookaheads.split(",")]:
        totals = {name: count(engine, prompts, args, lookahead, name) for name in ("block", "token")}
        found = {name: ratio(each[:, 0], each[:, 2]) for name, each in totals.items()}
        found |= {f"{name}, rows": ratio(each[:, 1], each[:, 2]) for name, each in totals.items()}
        drafts = np.concatenate(list(totals.values()))
        found["of the same drafts, block / token"] = ratio(drafts[:, 3], drafts[:, 4])
        rows += [(f"K={lookahead}, {name}", "{:.3f} ({:.3f} to {:.3f})".format(*each)) for name, each in found.items()]
        record.append({"lookahead": lookahead, **{name: each.tolist() for name, each in totals.items()}})
    title = f"Accepted tokens a round, {args.bundle.name}, temperature {args.temperature:g}"
    size = f"{len(prompts)} prompts x {args.seeds} seeds x {args.tokens} tokens"
    report(f"{title}, {size}", rows, {"totals": record}, args.json)
    engine.close()


if __name__ == "__main__":
    main()

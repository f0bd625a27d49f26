"""Accepted draft tokens a round, of sampled text, by both rules: as a block, and token by token.

Every prompt is continued with every seed by either rule. Intervals are of 95 %, by resampling the seeds of each prompt;
counts do not depend on the machine. What the rules themselves take is in ``sampling.py``.

python benchmarks/acceptance.py engines/demo
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import DEMO_PROMPTS, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.sampling.block import RULES


def count(engine: SpecEngine, prompts: list[str], args: argparse.Namespace, **drafting: Any) -> npt.NDArray[np.int64]:
    """[prompts, seeds, 2]: accepted draft tokens, and rounds that had a draft."""
    found = []
    for seed in range(args.seeds):
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=seed)
        texts = engine.generate(prompts, params, **drafting)
        found.append([(each.stats.accepted, each.stats.draft_rounds) for each in texts])
    return np.array(found).swapaxes(0, 1)


def interval(values: npt.NDArray[np.float64]) -> str:
    """95 % of what resampling gave."""
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{low:.3f} to {high:.3f}"


def main() -> None:
    """Count, for every K, and print means, their ratio and its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=20)
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
        means, resampled = {}, {}
        rng = np.random.default_rng(0)
        for rule in RULES:
            texts = count(engine, prompts, args, num_speculative_tokens=lookahead, acceptance=rule)
            total = texts.sum(axis=(0, 1))
            chosen = [rng.integers(0, args.seeds, (2000, args.seeds)) for _ in texts]
            sums = sum(each[seeds].sum(axis=1) for each, seeds in zip(texts, chosen, strict=True))
            means[rule] = float(total[0] / total[1])
            resampled[rule] = sums[:, 0] / sums[:, 1]
            record.append({"lookahead": lookahead, "rule": rule, "accepted": means[rule], "texts": texts.tolist()})
        shown = "; ".join(f"{rule} {means[rule]:.3f} ({interval(resampled[rule])})" for rule in RULES)
        ratio = means["block"] / means["token"]
        rows.append((f"K={lookahead}, accepted a round", shown))
        rows.append(
            (f"K={lookahead}, block / token", f"**{ratio:.3f}** ({interval(resampled['block'] / resampled['token'])})")
        )
    title = f"Acceptance rules, {args.bundle.name}, temperature {args.temperature:g}"
    report(
        f"{title}, {len(prompts)} prompts x {args.seeds} seeds x {args.tokens} tokens",
        rows,
        {"counts": record},
        args.json,
    )
    engine.close()


if __name__ == "__main__":
    main()

"""Speculative against plain greedy decoding of one bundle, and the runtime's own time in a round.

python benchmarks/speculation.py engines/demo --threads 2
"""

import argparse
from pathlib import Path

from common import DEMO_PROMPTS, median, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine


def main() -> None:
    """Run both ways prompt by prompt, in turns, and print medians over the repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, max_num_seqs=1, num_threads=args.threads)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, seed=1)
    prompts = read_prompts(args.prompts, args.num_prompts)
    engine.generate(prompts[0], params)  # warm-up: bindings and memory
    engine.generate(prompts[0], params, speculation=False)
    runs = []
    identical = True
    for _ in range(args.repeats):
        run: dict[str, float] = dict.fromkeys(("fast_s", "plain_s", "tokens", "rounds", "round_s", "engine_s"), 0.0)
        run |= {"drafted": 0, "accepted": 0, "draft_rounds": 0, "plain_rounds": 0, "plain_own_s": 0.0}
        for prompt in prompts:
            fast = engine.generate(prompt, params, num_speculative_tokens=args.lookahead)[0]
            times = engine.times
            plain = engine.generate(prompt, params, speculation=False)[0]
            identical &= fast.token_ids == plain.token_ids
            run["fast_s"] += len(fast.token_ids) / fast.stats.tokens_per_second
            run["plain_s"] += len(plain.token_ids) / plain.stats.tokens_per_second
            run["tokens"] += len(fast.token_ids)
            run["rounds"] += times.rounds
            run["round_s"] += times.total
            run["engine_s"] += times.engine
            run["plain_rounds"] += engine.times.rounds
            run["plain_own_s"] += engine.times.total - engine.times.engine
            for key in ("drafted", "accepted", "draft_rounds"):
                run[key] += getattr(fast.stats, key)
        runs.append(run)
    own_ms = [1e3 * (run["round_s"] - run["engine_s"]) / run["rounds"] for run in runs]
    share = [1 - run["engine_s"] / run["round_s"] for run in runs]
    speedup = [run["plain_s"] / run["fast_s"] for run in runs]
    last = runs[-1]
    rows = [
        ("plain, tokens/s", f"{median(run['tokens'] / run['plain_s'] for run in runs):.1f}"),
        (f"speculative K={args.lookahead}, tokens/s", f"{median(run['tokens'] / run['fast_s'] for run in runs):.1f}"),
        ("speculative / plain", f"{median(speedup):.2f}x (of {', '.join(f'{value:.2f}' for value in speedup)})"),
        ("acceptance rate", f"{last['accepted'] / last['drafted']:.3f}"),
        ("mean accepted length", f"{1 + last['accepted'] / last['draft_rounds']:.2f}"),
        ("round", f"{median(1e3 * run['round_s'] / run['rounds'] for run in runs):.2f} ms"),
        ("runtime outside engines, a round", f"{median(own_ms):.3f} ms = {100 * median(share):.1f} %"),
        ("the same, plain", f"{median(1e3 * run['plain_own_s'] / run['plain_rounds'] for run in runs):.3f} ms"),
    ]
    if args.temperature == 0:
        rows.append(("identical to plain greedy", "yes" if identical else "NO"))
    report(
        f"Speculation, {args.bundle.name}, {len(prompts)} prompts x {args.tokens} tokens",
        rows,
        {"runs": runs},
        args.json,
    )


if __name__ == "__main__":
    main()

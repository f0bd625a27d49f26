"""Quantized bundles against the first bundle given (float32), side by side in one run.

    python benchmarks/quantize.py FP32 INT8 INT4 --prompts code=FILE.jsonl --prompts math=FILE.jsonl [--json FILE]

For each bundle: plain decoding at batch 1 and batch 8, lookup at batch 1 on each domain with a fixed and with a chosen
number of tokens, whether the speculative text
is the bundle's own plain text, how much of the first bundle's greedy text it keeps, and the cost of a step by its
tokens. Bundles take turns in every repeat and are loaded one at a time: idle threads of a second one would spin on the
same cores. Figures are medians over the repeats.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, median, read_prompts, report, timed

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork

WIDTHS = (1, 2, 3, 5, 8, 16)
BATCH = 8
Runs = dict[str, list[float]]
Texts = dict[str, list[list[int]]]


def rate(engine: SpecEngine, prompts: list[str], args: argparse.Namespace, **drafting: Any) -> tuple[float, Any]:
    """Tokens per second of the decode phase of prompts one by one, and their token ids."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    results = [engine.generate(prompt, params, **drafting)[0] for prompt in prompts]
    tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(len(result.token_ids) / result.stats.tokens_per_second for result in results)
    return tokens / seconds, [list(result.token_ids) for result in results]


def batch_rate(engine: SpecEngine, prompts: list[str], args: argparse.Namespace) -> float:
    """Tokens per second of a plain batch of 8, prompts included."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    batch = [prompts[i % len(prompts)] for i in range(BATCH)]
    seconds, results = timed(lambda: engine.generate(batch, params, speculation=False))
    return sum(len(result.token_ids) for result in results) / seconds


def measure_text(path: Path, domains: dict[str, list[str]], args: argparse.Namespace, runs: Runs) -> Texts:
    """Decode every domain plainly and with lookup, and a batch; returns plain texts by domain."""
    engine = SpecEngine.load(path, enable_prefix_caching=False, max_num_seqs=BATCH, num_threads=args.threads)
    texts: Texts = {}
    try:
        for name, prompts in domains.items():
            engine.generate(prompts[0], SamplingParams(max_tokens=8), speculation=False)  # warm-up
            plain, texts[name] = rate(engine, prompts, args, speculation=False)
            runs[f"plain {name}"].append(plain)
            same = [True] * len(prompts)
            for way, lookahead in (("lookup", None), ("lookup auto", "auto")):
                fast, copied = rate(engine, prompts, args, drafter="lookup", num_speculative_tokens=lookahead)
                runs[f"{way} {name}"].append(fast)
                same = [ok and a == b for ok, a, b in zip(same, texts[name], copied, strict=True)]
            runs[f"lossless {name}"].append(sum(same))
        runs["plain batch 8"].append(batch_rate(engine, [p for prompts in domains.values() for p in prompts], args))
    finally:
        engine.close()
    return texts


def measure_steps(path: Path, args: argparse.Namespace, runs: Runs) -> None:
    """Milliseconds of a step by new tokens, past 64."""
    bundle = load_bundle(path, max_num_seqs=1)
    entry = bundle.manifest.models["target"]
    tokens = np.random.default_rng(0).integers(0, bundle.manifest.vocabulary.size, 64).tolist()
    executor = OrtExecutor(path / entry.engine.path, entry, num_rows=1, kv_capacity=128, num_threads=args.threads)
    try:
        runner = ModelRunner(executor)
        runner.prefill(0, tokens)
        for width in WIDTHS:
            work = [RowWork(tokens[:width], width)]
            times = [timed(lambda w=work: runner.step(0, w))[0] * 1e3 for _ in range(args.steps + 2)]  # type: ignore[misc]
            runs[f"step {width}"].append(median(times[2:]))
    finally:
        executor.close()


def agreement(texts: Texts, base: Texts) -> tuple[float, float]:
    """Share of texts equal to the base's, and of tokens before the first difference."""
    pairs = [pair for name in base for pair in zip(texts[name], base[name], strict=True)]
    kept = [next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y)) for x, y in pairs]
    return sum(x == y for x, y in pairs) / len(pairs), sum(kept) / sum(len(y) for _, y in pairs)


def table(name: str, runs: Runs, base: Runs, count: int, same: tuple[float, float]) -> list[tuple[str, str]]:
    """Rows of one bundle; ratios are over the first bundle's plain decoding."""
    rows = []
    for what, values in runs.items():
        kind, _, domain = what.partition(" ")
        if kind == "lossless":
            rows.append((f"{name}: {domain}, lookup text is plain text", f"{min(values):.0f} of {count}"))
        elif kind == "step":
            relative = median(values) / median(runs["step 1"])
            rows.append((f"{name}: step of {domain} tokens", f"{median(values):.2f} ms = {relative:.2f}x"))
        else:
            plain = base[what if kind == "plain" else f"plain {what.split()[-1]}"]
            over = median(a / b for a, b in zip(values, plain, strict=True))
            rows.append((f"{name}: {what}", f"{median(values):.1f} tokens/s = {over:.2f}x"))
    rows.append((f"{name}: greedy texts, tokens kept", f"{same[0]:.0%}, {same[1]:.0%}"))
    return rows


def main() -> None:
    """Run every bundle in turns and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE")
    parser.add_argument("--num-prompts", type=int, default=5, help="of each domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each width, after two")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    files = [item.partition("=") for item in args.prompts or [f"demo={DEMO_PROMPTS}"]]
    domains = {name: read_prompts(Path(file), args.num_prompts) for name, _, file in files}
    names = [path.name for path in args.bundles]
    runs: dict[str, Runs] = {name: defaultdict(list) for name in names}
    texts: dict[str, Texts] = {}
    for _ in range(args.repeats):
        for name, path in zip(names, args.bundles, strict=True):
            texts[name] = measure_text(path, domains, args, runs[name])
            measure_steps(path, args, runs[name])
    base = names[0]
    rows = [
        row
        for name in names
        for row in table(name, runs[name], runs[base], args.num_prompts, agreement(texts[name], texts[base]))
    ]
    report(f"Quantized against {base}, {args.tokens} tokens", rows, {"runs": runs, "texts": texts}, args.json)


if __name__ == "__main__":
    main()

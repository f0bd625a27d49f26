"""Cost of one engine step, fused against unfused: two bundles of the same models, in turns.

    specexport build TARGET --draft DRAFT -o fused
    specexport build TARGET --draft DRAFT -o unfused --no-fuse
    python benchmarks/fused.py fused unfused [--roles draft] [--threads 2] [--json FILE]

Times are of the engine alone (ONNX Runtime's run), with one session at a time: idle threads of a second one would spin
on the same cores. Steps of one token run on the draft's one-token graph where it has one. The order changes from round
to round; figures are medians over rounds of each round's median.
"""

import argparse
from pathlib import Path

import numpy as np
from common import median, report, timed

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork


def time_steps(folder: Path, role: str, tokens: list[int], width: int, args: argparse.Namespace) -> dict[int, float]:
    """Median milliseconds of the engine in a step of one token and in one of ``width``."""
    bundle = load_bundle(folder, max_num_seqs=args.rows)
    entry = bundle.manifest.models[role]
    executor = OrtExecutor(
        folder / entry.path,
        entry,
        num_rows=args.rows,
        kv_capacity=min(bundle.max_model_len, args.past + 64) + width,
        num_threads=args.threads,
    )
    runner = ModelRunner(executor)
    for row in range(args.rows):
        runner.prefill(row, tokens)
    found: dict[int, float] = {}
    for size in (1, width):
        work = [RowWork(tokens[:size], size) for _ in range(args.rows)]
        seconds = []
        for _ in range(args.steps + 5):
            before = executor.engine_seconds
            timed(lambda w=work: runner.step(0, w))
            seconds.append(executor.engine_seconds - before)
        found[size] = median(seconds[5:]) * 1e3
    executor.close()
    return found


def main() -> None:
    """Time every role that both bundles have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fused", type=Path)
    parser.add_argument("unfused", type=Path)
    parser.add_argument("--roles", nargs="+", default=["target", "draft"])
    parser.add_argument("--past", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="sequences in the step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each width, after five")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    manifests = {folder: load_bundle(folder).manifest for folder in (args.fused, args.unfused)}
    width = manifests[args.fused].lookahead + 1
    rows, record = [], {}
    for role in args.roles:
        size = min(manifests[folder].vocabulary.size for folder in manifests)
        tokens = np.random.default_rng(0).integers(0, size, args.past).tolist()
        rounds: dict[Path, list[dict[int, float]]] = {folder: [] for folder in manifests}
        for number in range(args.repeats):
            for folder in list(manifests)[:: 1 if number % 2 else -1]:
                rounds[folder].append(time_steps(folder, role, tokens, width, args))
        for step in (1, width):
            fused, unfused = (median(found[step] for found in rounds[folder]) for folder in manifests)
            rows.append((f"{role}, {step} new", f"{unfused:.4f} -> {fused:.4f} ms: {unfused / fused:.2f}x"))
        record[role] = {str(folder): found for folder, found in rounds.items()}
        entry = manifests[args.fused].models[role]
        fusions = [f"{name} {count}" for name, count in entry.fused]
        rows.append((f"{role}, fused", ", ".join(fusions)))
    report(f"Fused against unfused, {args.rows} rows, {args.threads} threads", rows, {"ms": record}, args.json)


if __name__ == "__main__":
    main()

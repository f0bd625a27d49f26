"""Cost of one engine step: by new tokens (verification), and by KV capacity (nothing may be copied).

python benchmarks/steps.py engines/demo --threads 2
"""

import argparse
from pathlib import Path

import numpy as np
from common import median, report, timed

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork


def main() -> None:
    """Time steps of 1…8 tokens, and the 1- and 5-token step at two capacities, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--role", choices=["target", "draft"], default="target")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--capacities", type=int, nargs=2, default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each width, after three")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bundle = load_bundle(args.bundle, max_num_seqs=1)
    entry = bundle.manifest.models[args.role]
    tokens = np.random.default_rng(0).integers(0, bundle.manifest.vocabulary.size, args.past).tolist()
    small, large = args.capacities
    ms: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for capacity in args.capacities:
            # One session at a time: idle threads of a second one would spin on the same cores.
            executor = OrtExecutor(
                args.bundle / entry.engine.path, entry, num_rows=1, kv_capacity=capacity, num_threads=args.threads
            )
            runner = ModelRunner(executor)
            runner.prefill(0, tokens)
            for width in (1, 5) if capacity == large else range(1, 9):
                work = [RowWork(tokens[:width], width)]
                times_ms = [timed(lambda r=runner, w=work: r.step(0, w))[0] * 1e3 for _ in range(args.steps + 3)]
                ms.setdefault(f"{capacity}/{width}", []).append(median(times_ms[3:]))
            executor.close()
    times = {key: median(values) for key, values in ms.items()}
    rows = [
        (
            f"{width} new tokens",
            f"{times[f'{small}/{width}']:.2f} ms = {times[f'{small}/{width}'] / times[f'{small}/1']:.2f}x",
        )
        for width in range(1, 9)
    ]
    rows += [
        (f"capacity {large} / {small}, {width} new", f"{times[f'{large}/{width}'] / times[f'{small}/{width}']:.3f}x")
        for width in (1, 5)
    ]
    report(f"Steps of the {args.role}, {args.bundle.name}, past {args.past}", rows, {"ms": ms}, args.json)


if __name__ == "__main__":
    main()

"""What steps of a draft head cost; ``defaults.py`` measures its texts.

python benchmarks/heads.py engines/with-head

Steps in turns: of the target with and without features; of the head on one token, on several that it catches up on,
and with the logits of all, as a parallel head drafts.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from common import median, report

from specexport_runtime import SpecEngine
from specexport_runtime.packing.batch import ModelRunner, RowWork

PAST = 64


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
    """Measure steps, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, max_num_seqs=1, max_model_len=1024)
    steps = step_times(engine, args.repeats)
    rows = [(name, f"{value:.2f} ms") for name, value in steps.items()]
    rows.append(("head step / target step", f"{steps['head, 1 token'] / steps['target, 1 token']:.3f}"))
    extra = steps["target, 5 tokens, with features"] / steps["target, 5 tokens"] - 1
    rows.append(("features in a step of 5 tokens", f"{extra:+.1%}"))
    report(f"Draft head of {args.bundle.name}", rows, {"steps": steps}, args.json)


if __name__ == "__main__":
    main()

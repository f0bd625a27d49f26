"""What a quantized model with long heads pays for running without flash attention: prompts and steps, in turns.

python benchmarks/flash_attention.py engines/gemma-int8 --lengths 512 2048

Such a model's engine is opened without it, so that drafts change no bit (``executors/exact_width.py``). Here a second
one is opened with it.
"""

import argparse
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import median, report

from specexport_runtime import SpecEngine
from specexport_runtime.executors.exact_width import sum_borders
from specexport_runtime.packing.batch import ModelRunner, RowWork

STEPS = 20


def open_runner(bundle: Path, length: int, *, flash: bool) -> ModelRunner:
    """The target of a bundle, with flash attention or as it is."""
    borders: Any = (lambda _: ()) if flash else sum_borders
    with patch("specexport_runtime.executors.ort_graph.sum_borders", borders):
        engine = SpecEngine.load(
            bundle, enable_prefix_caching=False, max_num_seqs=1, max_model_len=length, adaptive=False
        )
    return ModelRunner(engine.target)


def seconds_of(runner: ModelRunner, length: int) -> dict[str, float]:
    """Milliseconds of a prompt, and of steps behind it."""
    tokens = [7 + i % 50 for i in range(length)]
    runner.release_row(0)
    start = time.perf_counter()
    runner.prefill(0, tokens)
    found = {f"prompt of {length}": 1e3 * (time.perf_counter() - start)}
    for width in (1, 5):
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            runner.step(0, [RowWork(tokens[:width], 1)], "token_ids")
            times.append(1e3 * (time.perf_counter() - start))
        found[f"step of {width} at {length}"] = median(times)
    return found


def main() -> None:
    """Measure both in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    ways = {flash: open_runner(args.bundle, max(args.lengths) + 64, flash=flash) for flash in (True, False)}
    times: dict[str, dict[bool, list[float]]] = {}
    for repeat in range(args.repeats + 1):
        for length in args.lengths:
            for flash in (True, False) if repeat % 2 else (False, True):
                for name, value in seconds_of(ways[flash], length).items():
                    if repeat:
                        times.setdefault(name, {True: [], False: []})[flash].append(value)
    rows = []
    for name, found in times.items():
        ratio = median([without / with_ for without, with_ in zip(found[False], found[True], strict=True)])
        rows.append((name, f"{median(found[True]):.1f} ms, without flash attention {ratio:.2f} of it"))
    report(f"Flash attention, {args.bundle.name}", rows, {name: dict(found) for name, found in times.items()}, None)


if __name__ == "__main__":
    main()

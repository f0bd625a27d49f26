"""What LoRA adapters cost a target's step: none, one and several of a bundle that lets requests choose, and merged.

python benchmarks/lora.py CHOSEN --plain PLAIN --merged MERGED --rows 1,4

Steps of all bundles are timed in turns, in one process and with one pool of threads, behind the same cache entries.
CHOSEN, PLAIN and MERGED are bundles of one target: with adapters to choose from, without any, and with one merged.
`benchmarks/random_adapter.py` makes adapters to measure with. A step with several adapters gives each row another one,
so that it needs as many rows.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import median, report, timed

from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("chosen", type=Path, help="bundle with adapters to choose from")
    add("--plain", type=Path, help="bundle of the same target without adapters")
    add("--merged", type=Path, help="bundle with one of them merged")
    add("--rows", default="1,4", help="B,…: sequences of a step")
    add("--widths", default="1,5", help="new tokens of a sequence in a step")
    add("--past", type=int, default=64, help="tokens in the cache before a step")
    add("--prompt", type=int, default=256, help="tokens of the prompt that is read in one step")
    add("--threads", type=int, help="compute threads; all cores unless given")
    add("--repeats", type=int, default=9)
    add("--json", type=Path)
    return parser.parse_args()


class Way(NamedTuple):
    """Whose steps are timed.

    Attributes:
        name: in words.
        runner: the target.
        adapters: those that rows have, in turns.
    """

    name: str
    runner: ModelRunner
    adapters: tuple[int | None, ...]

    def step(self, rows: int, width: int, past: int) -> float:
        """Seconds of a step of so many rows and new tokens, behind one that brings its weights into the caches."""
        work = [
            RowWork(list(range(7, 7 + width)), min(width, 16), adapter=self.adapters[row % len(self.adapters)])
            for row in range(rows)
        ]
        seconds = 0.0
        for _ in range(2):
            for row in range(rows):
                self.runner.kv.commit(row, past)
            seconds = timed(lambda: self.runner.step(0, work, "token_ids"))[0]
        return seconds


def ways_of(args: argparse.Namespace, rows: int) -> tuple[list[Way], list[Any]]:
    """What is timed, and the executors behind it."""
    options = EngineOptions(max_num_seqs=rows, adaptive=False, share_threads=True, num_threads=args.threads)
    opened = {
        name: load_engine_parts(folder, options)
        for name, folder in (("plain", args.plain), ("chosen", args.chosen), ("merged", args.merged))
        if folder is not None
    }
    runners = {name: ModelRunner(parts.target) for name, parts in opened.items()}
    count = len(load_manifest(args.chosen).models["target"].chosen_adapters)
    ways = [Way("without adapters in the bundle", runners["plain"], (None,))] if "plain" in runners else []
    ways.append(Way(f"none of {count}", runners["chosen"], (0,)))
    ways.append(Way(f"one of {count}", runners["chosen"], (1,)))
    ways += [
        Way(f"{several} of {count}", runners["chosen"], tuple(range(1, several + 1)))
        for several in range(2, min(rows, count) + 1)
    ]
    if "merged" in runners:
        ways.append(Way("one merged", runners["merged"], (None,)))
    engines = [engine for parts in opened.values() for engine in (parts.target, parts.draft, parts.head)]
    return ways, [engine for engine in engines if engine is not None]


def main() -> None:
    """Time all steps in turns and print their medians, and each over the first."""
    args = parse_args()
    lines: list[tuple[str, str]] = []
    record: dict[str, Any] = {}
    for rows in map(int, args.rows.split(",")):
        ways, executors = ways_of(args, rows)
        shapes = [*((rows, width) for width in map(int, args.widths.split(","))), (1, args.prompt)]
        for way in ways:
            for row in range(rows):
                way.runner.prefill(row, [100 + i % 200 for i in range(args.past)])
        for count, width in shapes:
            runs: dict[str, Callable[[], float]] = {
                way.name: lambda way=way, count=count, width=width: way.step(count, width, args.past)  # type: ignore[misc]
                for way in ways
                if len(way.adapters) <= count
            }
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(args.repeats + 1):
                for name, run in runs.items():
                    value = run()
                    if repeat:  # the first is for bindings and memory
                        seconds[name].append(value)
            first = median(next(iter(seconds.values())))
            record[f"{count} rows, {width} new"] = seconds
            for name, values in seconds.items():
                found = median(values)
                lines.append((f"{count} rows, {width} new: {name}", f"{1e3 * found:.2f} ms, {found / first:.3f}×"))
        for executor in executors:
            executor.close()
    report(f"Steps of {args.chosen.name}", lines, {"seconds": record}, args.json)


if __name__ == "__main__":
    main()

"""What a draft costs beside its target: steps of both by rows and new tokens, reading a prompt, a round of both.

python benchmarks/draft_steps.py BUNDLE --rows 1,8
python benchmarks/draft_steps.py BUNDLE --rows 1 --share-threads

Steps of target and draft are timed in turns, in one process. With --share-threads both engines take one pool of
threads, as they do in the commands and in the server; without it each has its own. The draft of a bundle of fewer than
20 million weights runs on one thread either way.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import median, report, timed

from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("bundle", type=Path)
    add("--rows", default="1", help="B,…: sequences of a step")
    add("--widths", default="1,2,3,5,9", help="new tokens of a sequence in a step of the target")
    add("--lookahead", type=int, default=4, help="K of the round")
    add("--past", type=int, default=64, help="tokens in the cache before a step")
    add("--prompt", type=int, default=200, help="tokens of the prompt that is read")
    add("--share-threads", action="store_true")
    add("--repeats", type=int, default=9)
    add("--json", type=Path)
    return parser.parse_args()


class Steps:
    """Timed steps of target and draft with full caches.

    Args:
        target: the target.
        draft: its draft.
        rows: sequences of a step.
        args: the command line.
    """

    def __init__(self, target: ModelRunner, draft: ModelRunner, rows: int, args: argparse.Namespace) -> None:
        self._target, self._draft, self._rows, self._args = target, draft, rows, args
        for runner in (target, draft):
            for row in range(rows):
                self._read(runner, row, args.past)

    def ways(self) -> dict[str, Callable[[], float]]:
        """By name what runs a step and gives its seconds."""
        k = self._args.lookahead
        found: dict[str, Callable[[], float]] = {
            f"target, {width} new": lambda width=width: self._step(self._target, width, width)  # type: ignore[misc]
            for width in map(int, self._args.widths.split(","))
        }
        found |= {
            "draft, 1 new": lambda: self._step(self._draft, 1, 1),
            "draft, 2 new": lambda: self._step(self._draft, 2, 1),
            f"round of K={k}": lambda: sum(
                [self._step(self._draft, 1, 1) for _ in range(k)], self._step(self._target, k + 1, k + 1)
            ),
        }
        for name, runner in (("target", self._target), ("draft", self._draft)):
            found[f"{name}, reading {self._args.prompt}"] = lambda runner=runner: self._prompt(runner)  # type: ignore[misc]
        return found

    def _step(self, runner: ModelRunner, width: int, logits: int) -> float:
        work = [RowWork(list(range(7, 7 + width)), logits)] * self._rows
        for row in range(self._rows):
            runner.kv.commit(row, self._args.past)
        return timed(lambda: runner.step(0, work, "token_ids"))[0]

    def _prompt(self, runner: ModelRunner) -> float:
        seconds = timed(lambda: self._read(runner, 0, self._args.prompt))[0]
        self._read(runner, 0, self._args.past)
        return seconds

    @staticmethod
    def _read(runner: ModelRunner, row: int, length: int) -> None:
        runner.release_row(row)
        runner.prefill(row, [100 + i % 200 for i in range(length)])


def main() -> None:
    """Time all steps in turns and print their medians."""
    args = parse_args()
    rows: list[tuple[str, str]] = []
    record: dict[str, Any] = {}
    for size in map(int, args.rows.split(",")):
        options = EngineOptions(max_num_seqs=size, adaptive=False, share_threads=args.share_threads)
        parts = load_engine_parts(args.bundle, options)
        if parts.draft is None:
            raise SystemExit(f"{args.bundle} has no draft model.")
        ways = Steps(ModelRunner(parts.target), ModelRunner(parts.draft), size, args).ways()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(args.repeats + 1):
            for name, run in ways.items():
                value = run()
                if repeat:  # the first is for bindings and memory
                    seconds[name].append(value)
        parts.target.close()
        parts.draft.close()
        record[str(size)] = seconds
        rows += [(f"{size} rows: {name}", f"{1e3 * median(values):.1f} ms") for name, values in seconds.items()]
    pool = "one pool of threads" if args.share_threads else "a pool of threads each"
    report(f"Steps of {args.bundle.name}, {pool}", rows, {"seconds": record}, args.json)


if __name__ == "__main__":
    main()

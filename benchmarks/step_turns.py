"""Steps of the target by instruction set, or by checkout, in turns: each side is a process that stays.

    python benchmarks/step_turns.py engines/qwen-coder avx512vnni avx2
    python benchmarks/step_turns.py engines/qwen-coder avx2@../before/runtime avx2

A side is a value of SPECEXPORT_CPU_KERNELS, after an @ with the runtime of another checkout whose operators are built.
``step:N`` is a step of N tokens, the least of three; ``read:N`` reads a prompt. Told are the median and the least of
the turns, and the median of the ratios to the first side.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

from common import median, report

WORKER = """
import sys, time
from pathlib import Path
from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork

PAST = 64
parts = load_engine_parts(Path(sys.argv[1]), EngineOptions(adaptive=False, num_threads=int(sys.argv[2])))
runner = ModelRunner(parts.target)

def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start

def read(count):
    runner.release_row(0)
    return seconds(lambda: runner.prefill(0, [100 + i % 200 for i in range(count)]))

def step(count):
    runner.kv.commit(0, PAST)
    return seconds(lambda: runner.step(0, [RowWork(list(range(7, 7 + count)), count)], "token_ids"))

for line in sys.stdin:
    kind, count = line.split()
    read(PAST)
    print(read(int(count)) if kind == "read" else min(step(int(count)) for _ in range(3)), flush=True)
"""


def start(side: str, args: argparse.Namespace) -> "subprocess.Popen[str]":
    """The process of a side."""
    kernels, _, runtime = side.partition("@")
    environment = os.environ | {"SPECEXPORT_CPU_KERNELS": kernels} | ({"PYTHONPATH": runtime} if runtime else {})
    command = [sys.executable, "-c", WORKER, str(args.bundle), str(args.threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: "subprocess.Popen[str]", cell: str) -> float:
    """Seconds of a cell."""
    given, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    given.write(cell.replace(":", " ") + "\n")
    given.flush()
    return float(answers.readline())


def main() -> None:
    """Time all cells, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bundle", type=Path)
    add("sides", nargs="+", metavar="KERNELS[@RUNTIME]")
    add("--cells", default="step:1,step:2,step:5,step:9,step:16,read:100,read:200")
    add("--threads", type=int, default=2)
    add("--turns", type=int, default=7)
    add("--json", type=Path)
    args = parser.parse_args()
    processes = [start(side, args) for side in args.sides]
    rows: list[tuple[str, str]] = []
    record: dict[str, Any] = {}
    for cell in args.cells.split(","):
        times: list[list[float]] = [[] for _ in processes]
        for turn in range(args.turns + 1):
            for i in range(len(processes))[:: 1 if turn % 2 else -1]:
                value = ask(processes[i], cell)
                if turn:  # the first is for bindings and memory
                    times[i].append(value)
        record[cell] = times
        for side, own in zip(args.sides, times, strict=True):
            ratio = median(a / b for a, b in zip(own, times[0], strict=True))
            rows.append((f"{cell}, {side}", f"{1e3 * median(own):.1f} ms, least {1e3 * min(own):.1f}; {ratio:.2f}"))
    report(f"Steps of {args.bundle.name} in turns", rows, {"sides": args.sides, "seconds": record}, args.json)


if __name__ == "__main__":
    main()

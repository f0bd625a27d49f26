"""What products of packed weights take, without ONNX Runtime: MACs a cycle, near and far, by format and rows.

python benchmarks/kernels.py --formats q4_k,q6_k,int8 --rows 1,2,5,9,16
python benchmarks/kernels.py --kernels avx2 --against ../before --rows 1,5

Near, a weight of 256 outputs and 1024 inputs lies in the L2 cache and one thread multiplies; far, --threads of them
pass over 128 MB of weights. --against takes the checkout of another commit that has this script: both are compiled in
the same way (zig's clang, as wheels are), and answer in turns. Of --turns the fastest counts, and the ratio is its time
over the other's, so that a machine that others use too says something.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

ROOT = Path(__file__).resolve().parents[1]
INCLUDED = {"linear_portable.cpp", "linear_avx512.cpp"}  # by files of the driver


class Time(NamedTuple):
    """What the driver answers: MACs are a cycle's and thread's, the share is of a plain read's bandwidth."""

    seconds: float
    macs: float
    share: float
    arranging: float


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--formats", default="q4_k,q6_k,q5_k,q3_k,q2_k,iq4_xs,int4,int8")
    add("--rows", default="1,2,5,9,16")
    add("--where", default="near,far")
    add("--threads", type=int, default=os.cpu_count(), help="of what is far")
    add("--kernels", default="", help="an instruction set, as SPECEXPORT_CPU_KERNELS names it")
    add("--against", type=Path, help="another checkout")
    add("--turns", type=int, default=5)
    add("--json", type=Path)
    return parser.parse_args()


def driver(checkout: Path) -> Path:
    """The compiled driver of a checkout."""
    folder = checkout / "runtime" / "operators"
    spec = importlib.util.spec_from_file_location("operators_build", folder / "build.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} has no build.py: --against takes a checkout.")
    build: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    tests = sorted((checkout / "tests" / "operators").glob("*.cpp"))
    stamp = max(path.stat().st_mtime_ns for path in (*folder.iterdir(), *tests[0].parent.iterdir()))
    out = checkout / "build" / f"kernels-{stamp:x}"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        flags = [flag for flag in build.FLAGS if flag != "-shared"] + ['-DSPECEXPORT_BUILD="driver"', "-pthread"]
        sources = [*tests, *(path for path in sorted(folder.glob("*.cpp")) if path.name not in INCLUDED)]
        print(f"compiling {out}", file=sys.stderr)
        subprocess.run([*build._compiler(build.this_target()), *flags, *sources, "-o", out], check=True)
    return out


def ask(process: "subprocess.Popen[str]", cell: str) -> Time:
    """The time of a cell."""
    given, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    given.write(cell + "\n")
    given.flush()
    return Time(*map(float, answers.readline().split()))


def main() -> None:
    """See the module."""
    args = parse_args()
    environment = os.environ | {"SPECEXPORT_CPU_KERNELS": args.kernels}
    sides = [
        subprocess.Popen(
            [driver(path), "time"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for path in (ROOT, args.against)
        if path
    ]
    record = []
    print("| format | rows | where | us | MACs a cycle and thread | of a plain read | arranging, us |", end="")
    print(" over the other |" if args.against else "")
    print("| --- " * (8 if args.against else 7) + "|")
    for where in args.where.split(","):
        for name in args.formats.split(","):
            for rows in args.rows.split(","):
                cell = f"{name} {rows} {where} {args.threads if where == 'far' else 1}"
                turns = [[ask(side, cell) for side in sides] for _ in range(args.turns)]
                best = [min(times) for times in zip(*turns, strict=True)]
                own = best[0]
                record.append({"cell": cell, "times": [[time._asdict() for time in pair] for pair in turns]})
                share = f"{own.share:.2f}" if where == "far" else "–"
                ratio = f" {own.seconds / best[1].seconds:.2f} |" if args.against else ""
                print(
                    f"| {name} | {rows} | {where} | {own.seconds * 1e6:.1f} | {own.macs:.1f} | {share} "
                    f"| {own.arranging * 1e6:.2f} |{ratio}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "cells": record}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Where a step of the target spends its time, operator by operator: ONNX Runtime's own profile of it.

    python benchmarks/step_profile.py engines/qwen-coder --widths 1,5

Medians over the steps, in milliseconds, of the operators of one kind together; ``outside of nodes`` is what of the
step, without a profile, is in none of them. A profile costs about a microsecond a node, so that this may be below zero.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import onnxruntime
from common import median, report, timed

from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.packing.batch import ModelRunner, RowWork


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("bundle", type=Path)
    add("--widths", default="1,5", help="new tokens of a step")
    add("--past", type=int, default=64, help="tokens in the cache before a step")
    add("--threads", type=int)
    add("--steps", type=int, default=15)
    add("--json", type=Path)
    return parser.parse_args()


def run_steps(args: argparse.Namespace, widths: list[int]) -> dict[int, list[float]]:
    """Seconds of each step, by its width; the widths in turns."""
    parts = load_engine_parts(args.bundle, EngineOptions(adaptive=False, num_threads=args.threads))
    runner = ModelRunner(parts.target)
    runner.prefill(0, [100 + i % 200 for i in range(args.past)])
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(args.steps + 1):
        for width in widths:
            runner.kv.commit(0, args.past)
            work = [RowWork(list(range(7, 7 + width)), width)]
            seconds[width].append(timed(lambda work=work: runner.step(0, work, "token_ids"))[0])  # type: ignore[misc]
    for executor in (parts.target, parts.draft, parts.head):
        if executor is not None:
            executor.close()
    return {width: each[1:] for width, each in seconds.items()}  # the first is for bindings and memory


def profiled(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The events of the target's profile, in the order in which they began."""
    made = onnxruntime.SessionOptions

    def with_profile() -> Any:
        options = made()
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        return options

    onnxruntime.SessionOptions = with_profile
    run_steps(args, [int(width) for width in args.widths.split(",")])
    files = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("profile*")]
    return max(files, key=len)  # type: ignore[no-any-return]


def main() -> None:
    """Time steps without a profile, then with one, and print both."""
    args = parse_args()
    widths = [int(width) for width in args.widths.split(",")]
    plain = run_steps(args, widths)
    with tempfile.TemporaryDirectory() as folder:
        events = profiled(args, Path(folder))
    runs = [event for event in events if event["name"] == "model_run"][-len(widths) * args.steps :]
    nodes = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    steps: list[dict[str, float]] = [defaultdict(float) for _ in runs]
    counts: dict[str, int] = defaultdict(int)
    for node in nodes:
        for step, run in zip(steps, runs, strict=True):
            if run["ts"] <= node["ts"] < run["ts"] + run["dur"]:
                step[node["args"]["op_name"]] += node["dur"] / 1e3
                counts[node["args"]["op_name"]] += 1
    rows = []
    for i, width in enumerate(widths):
        of_width = steps[i :: len(widths)]
        names = sorted({name for step in of_width for name in step})
        found = {name: median(step[name] for step in of_width) for name in names}
        whole = 1e3 * median(plain[width])
        rows.append((f"{width} new: a step", f"{whole:.2f} ms"))
        for name, value in sorted(found.items(), key=lambda pair: -pair[1]):
            rows.append((f"{width} new: {name} × {counts[name] // len(runs)}", f"{value:.2f} ms, {value / whole:.1%}"))
        rows.append((f"{width} new: outside of nodes", f"{whole - sum(found.values()):.2f} ms"))
    report(f"Where a step of {args.bundle.name} spends its time", rows, {"steps": steps}, args.json)


if __name__ == "__main__":
    main()

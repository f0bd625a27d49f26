"""Throughput and waiting by rows, K, threads and replicas: predicted from step costs, and measured.

    python benchmarks/scaling.py engines/demo [--part grid|replicas|queue] [--json FILE]

The model is ``scaling_model.py``. It takes what steps of few and many rows and tokens cost, measured before any
request, and from two calibration runs, marked ``*``, the acceptance and the host's own time of a round. All else is
predicted. Takes about two minutes.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, read_prompts, report
from scaling_model import Queue, Throughput, row_bytes

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.costs.curves import CostCurves, StepCost
from specexport_runtime.packing.batch import ModelRunner, RowWork

ROWS, KS = (1, 2, 4, 8), (0, 2, 4)
PAST, REPEATS = 16, 20


class Rounds:
    """Writes down when rounds ended, with how many rows, and the tokens they gave; an ``EngineObserver``."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []

    def on_round(self, record: Any) -> None:
        """A round has ended."""
        rows = [len(event.tokens) for event in record.events]
        self.seen.append((time.perf_counter(), len(rows), sum(rows)))

    def on_finish(self, _: object) -> None:
        """Nothing to do."""

    def tokens_per_second(self, rows: int) -> float:
        """Tokens over time, from the first round in which all rows took part to the last."""
        full = [index for index, (_, count, _) in enumerate(self.seen) if count >= rows]
        first, last = full[0], full[-1]
        tokens = sum(count for _, _, count in self.seen[first + 1 : last + 1])
        return tokens / (self.seen[last][0] - self.seen[first][0])


def drafting(k: int) -> dict[str, Any]:
    """How to ask for K draft tokens."""
    return {"drafter": "draft-model", "num_speculative_tokens": k} if k else {"drafter": "none"}


class Rig:
    """An engine with so many rows, and its rounds."""

    def __init__(self, args: argparse.Namespace, rows: int) -> None:
        self.engine = SpecEngine.load(
            args.bundle, enable_prefix_caching=False, max_num_seqs=rows, num_threads=args.threads, spin=False
        )
        self.rounds = Rounds()
        self.engine.add_observer(self.rounds)


def saturate(rig: Rig, rows: int, k: int, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Keep ``rows`` rows busy for a while."""
    engine = rig.engine
    count = rows * args.waves
    batch = [prompts[index % len(prompts)] for index in range(count)]
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    rig.rounds.seen.clear()
    results = engine.generate(batch, params, **drafting(k))
    stats = [result.stats for result in results]
    accepted = sum(item.accepted for item in stats)
    cut = sum(item.draft_rounds - item.accepted_histogram.get(k, 0) for item in stats)  # drafts with a rejection
    times = engine.times
    return {
        "tokens_per_second": rig.rounds.tokens_per_second(rows),
        "acceptance": accepted / (accepted + cut) if accepted else 0.0,
        "host_seconds": (times.total - times.engine) / times.rounds,
    }


def step_cost(runner: ModelRunner, rows: int, width: int) -> StepCost:
    """Steps of one and of all rows, of one token and of many each, as a sum of what each token and each row takes."""
    sizes = [(1, 1), (1, width), (rows, 1), (rows, width)]
    seconds = []
    for row in range(rows):
        runner.prefill(row, list(range(1, PAST + 1)))
    for count, each in sizes:
        taken = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            runner.step(0, [RowWork([1] * each, each)] * count)
            taken.append(time.perf_counter() - start)
            for row in range(rows):
                runner.kv.assume(row, PAST)
        seconds.append(statistics.median(taken))
    for row in range(rows):
        runner.release_row(row)
        runner.give_back(row, 0)
    matrix = np.array([[1, count * each, count] for count, each in sizes])
    step, token, row_ = np.linalg.lstsq(matrix, np.array(seconds), rcond=None)[0]
    return StepCost(float(step), max(float(token), 0.0), row=max(float(row_), 0.0))


def calibrate(args: argparse.Namespace, prompts: list[str]) -> tuple[Throughput, dict[str, float]]:
    """The model, and the host's time and acceptance that went into it."""
    most = max(ROWS)
    full, single = Rig(args, most), Rig(args, 1)
    if full.engine.draft is None:
        raise SystemExit("the bundle has no draft model")
    target, draft = (
        step_cost(ModelRunner(model), most, max(KS) + 1) for model in (full.engine.target, full.engine.draft)
    )
    curves = CostCurves(target, {"draft-model": draft})
    mean_prompt = sum(len(full.engine.encode(prompt)) for prompt in prompts) / len(prompts)
    loaded = saturate(full, most, max(KS), prompts, args)
    plain = saturate(single, 1, 0, prompts, args)
    for rig in (full, single):
        rig.engine.close()
    token = (loaded["host_seconds"] - plain["host_seconds"]) / (most * (max(KS) + 1) - 1)
    fixed = max(plain["host_seconds"] - token, 0.0)
    model = Throughput(curves, loaded["acceptance"], fixed, max(token, 0.0), mean_prompt, args.max_tokens)
    found = {"acceptance": loaded["acceptance"], "host_fixed_ms": 1e3 * fixed, "host_token_ms": 1e3 * token}
    return model, found | {"prompt_tokens": mean_prompt}


def compare(name: str, predicted: float, measured: float, unit: str) -> tuple[str, str]:
    """A row of the table: predicted, measured, error."""
    return (
        name,
        f"{predicted:.4g} predicted, {measured:.4g} measured {unit} ({100 * (predicted / measured - 1):+.0f} %)",
    )


def grid(args: argparse.Namespace, prompts: list[str], model: Throughput) -> list[tuple[str, str]]:
    """Every number of rows with every K."""
    rows = []
    for count in ROWS:
        rig = Rig(args, count)
        for k in KS:
            saturate(rig, count, k, prompts, argparse.Namespace(**{**vars(args), "waves": 1}))  # warm
            measured = max(saturate(rig, count, k, prompts, args)["tokens_per_second"] for _ in range(args.repeats))
            mark = " *" if (count, k) in ((1, 0), (max(ROWS), max(KS))) else ""
            name = f"{count} rows, K = {k}{mark}"
            rows.append(compare(name, model.tokens_per_second(count, k), measured, "tokens/s"))
        rig.engine.close()
    return rows


def worker(args: argparse.Namespace, prompts: list[str]) -> int:
    """A replica of its own: predicts, says that it is ready, and measures when it is told to."""
    model, _ = calibrate(args, prompts)
    rig = Rig(args, args.rows)
    saturate(rig, args.rows, 4, prompts, args)
    print(json.dumps(model.tokens_per_second(args.rows, 4)), flush=True)
    for _ in sys.stdin:
        print(json.dumps(saturate(rig, args.rows, 4, prompts, args)["tokens_per_second"]), flush=True)
    return 0


def replicas(args: argparse.Namespace) -> list[tuple[str, str]]:
    """One process with two threads and eight rows, against two with one thread and four rows each."""
    found = {}
    for name, count, threads, rows in (
        ("1 process, 2 threads, 8 rows", 1, 2, 8),
        ("1 process, 1 thread, 4 rows", 1, 1, 4),
        ("2 processes, 1 thread, 4 rows each", 2, 1, 4),
    ):
        command = [sys.executable, __file__, str(args.bundle), "--part", "worker", "--threads", str(threads)]
        command += ["--rows", str(rows), "--max-tokens", str(args.max_tokens), "--waves", str(2 * args.waves)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers: list[subprocess.Popen[str]] = []
        predicted = []
        try:
            for _ in range(count):  # one after the other: each measures what its steps cost
                workers.append(subprocess.Popen(command, **pipes))
                predicted.append(json.loads(_line(workers[-1])))
            for process in workers:
                process.stdin.write("go\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            found[name] = sum(predicted), sum(json.loads(_line(process)) for process in workers)
        finally:
            for process in workers:
                process.kill()
                process.communicate()
    return [compare(name, *values, "tokens/s, K = 4") for name, values in found.items()]


def _line(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline()  # type: ignore[union-attr]  # it is a pipe


def queue(args: argparse.Namespace, prompts: list[str], model: Throughput) -> list[tuple[str, str]]:
    """Poisson arrivals of requests whose lengths vary as much as their mean; what all rows finish is measured first."""
    rows, k = 4, 4
    engine = Rig(args, rows).engine
    model = replace(model, max_tokens=args.queue_tokens)
    rates = [model.tokens_per_second(n, k) / args.queue_tokens for n in range(1, rows + 1)]
    found = []
    for load in (0.5, 0.7, 0.85):
        arrive(engine, [0.0] * 50, prompts, k, args)
        start = time.perf_counter()
        arrive(engine, [0.0] * args.flood, prompts, k, args)  # all at once: every row is busy until the end
        capacity = args.flood / (time.perf_counter() - start)
        chosen = random.Random(args.seed)
        gaps = [chosen.expovariate(load * capacity) for _ in range(round(load * capacity * args.seconds))]
        stats = arrive(engine, gaps, prompts, k, args)
        latency = sum(item.end_time - item.submit_time for item in stats) / len(stats)
        waited = sum(item.queued_s for item in stats) / len(stats)
        # The grid's error is not this part's: the chain has the capacity that was just measured.
        expected = Queue(tuple(capacity / rates[-1] * rate for rate in rates)).seconds(load * capacity)
        name = f"{rows} rows at {load:.0%} of {capacity:.0f} requests/s, {len(stats)} requests"
        found.append(compare(f"{name}: latency", 1e3 * expected[0], 1e3 * latency, "ms"))
        found.append((f"{name}: waiting", f"{1e3 * expected[1]:.0f} predicted, {1e3 * waited:.0f} measured ms"))
    engine.close()
    return found


def arrive(engine: SpecEngine, gaps: list[float], prompts: list[str], k: int, args: argparse.Namespace) -> list[Any]:
    """Submit requests, so many seconds after one another; returns their statistics."""
    chosen = random.Random(args.seed)
    handles, due = [], time.perf_counter()
    for gap in gaps:
        due += gap
        time.sleep(max(due - time.perf_counter(), 0.0))
        length = 1 + min(round(chosen.expovariate(1 / (args.queue_tokens - 1))), 8 * args.queue_tokens)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        handles.append(engine.submit(chosen.choice(prompts), params, **drafting(k)))
    return [handle.result().stats for handle in handles]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--part", choices=("all", "grid", "replicas", "queue", "worker"), default="all")
    for name, default in (
        ("threads", 2),
        ("rows", 4),
        ("max-tokens", 96),
        ("waves", 4),
        ("repeats", 3),
        ("seed", 0),
        ("flood", 250),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--queue-tokens", type=int, default=24, help="mean length of the requests that arrive")
    parser.add_argument("--seconds", type=float, default=18.0, help="of arrivals at each load")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(DEMO_PROMPTS, 1000)
    if args.part == "worker":
        return worker(args, prompts)
    model, found = calibrate(args, prompts)
    manifest = load_manifest(args.bundle)
    rows = [("calibrated *", ", ".join(f"{name} {value:.3g}" for name, value in found.items()))]
    rows += [("memory of a row, whole context", f"{row_bytes(manifest, manifest.max_model_len) / 2**20:.1f} MiB")]
    rows += grid(args, prompts, model) if args.part in ("all", "grid") else []
    rows += replicas(args) if args.part in ("all", "replicas") else []
    rows += queue(args, prompts, model) if args.part in ("all", "queue") else []
    report(f"Throughput by rows, K and replicas, {args.threads} threads", rows, {"rows": dict(rows)}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

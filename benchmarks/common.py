"""What the benchmark scripts share: the machine's description, medians, prompts, results as table and JSON."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DEMO_PROMPTS = Path(__file__).parent.parent / "examples" / "demo_pair" / "prompts.jsonl"


def median(values: Iterable[float]) -> float:
    """Median of the values."""
    return statistics.median(list(values))


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call took, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def read_prompts(path: Path, count: int) -> list[str]:
    """The first ``count`` prompts of a JSONL file with a field ``prompt``."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [json.loads(line)["prompt"] for line in lines[:count]]


def read_domains(prompts: str, count: int, skip: int = 0) -> dict[str, list[str]]:
    """Texts of each domain; repeated where there are too few.

    Args:
        prompts: ``NAME=FILE,…``.
        count: texts of each.
        skip: texts of each file that are left out.
    """
    from specexport.bench.prompts import read_prompts as read

    domains = {}
    for item in prompts.split(","):
        name, _, path = item.partition("=")
        texts = [prompt.text for prompt in read([Path(path)])][skip:][:count]
        domains[name] = [texts[i % len(texts)] for i in range(count)]
    return domains


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load and tool versions: what a figure depends on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = {}
    for name in ("numpy", "onnxruntime", "tokenizers", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def report(title: str, rows: Sequence[tuple[str, str]], record: dict[str, Any], json_path: Path | None) -> None:
    """Print a Markdown table of the rows; write the full record as JSON if a path is given."""
    machine = describe_machine()
    load = f"load {machine['load_1min']:.1f}"
    print(f"\n### {title}\n\n{machine['cpu']}, {machine['cores']} cores, {load}, Python {machine['python']}\n")
    print("| what | value |\n| --- | --- |")
    for name, value in rows:
        print(f"| {name} | {value} |")
    if json_path is not None:
        record = {"title": title, "command": sys.argv, "machine": machine, **record}
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def wait_for_port(process: subprocess.Popen[str]) -> int:
    """Where a server listens, by its log, which a thread reads to the end; SystemExit if it does not come up."""
    said, log = "", process.stderr
    assert log is not None  # noqa: S101  # it is a pipe
    for line in log:
        said += line
        if found := re.search(r"Serving \S+ at http://\S+:(\d+)\.", line):
            threading.Thread(target=log.read, daemon=True).start()
            return int(found[1])
    raise SystemExit(f"the server did not start: {said}")

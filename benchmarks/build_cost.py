"""Time and peak memory of `specexport build`, as a process of its own, without the stage cache.

python benchmarks/build_cost.py CHECKPOINT
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import median, report


def build_once(checkpoint: Path, extra: list[str]) -> tuple[float, int, dict[str, object]]:
    """Seconds, peak resident bytes and the command's own summary of one build."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "specexport"), "build", str(checkpoint), "-o", f"{folder}/bundle"]
        start = time.perf_counter()
        process = subprocess.Popen([*command, "--no-cache", "--json", *extra], stdout=subprocess.PIPE)
        peak = 0
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = (
                [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
                if status.exists()
                else []
            )
            peak = max(peak, int(lines[0].split()[1]) * 1024 if lines else 0)
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"the build failed with exit code {process.returncode}")
        return seconds, peak, json.loads(process.communicate()[0])


def main() -> None:
    """Build a few times and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    runs = [build_once(args.checkpoint, extra) for _ in range(args.repeats)]
    manifest_params = runs[0][2].get("num_parameters")
    rows = [
        ("build", f"{median(run[0] for run in runs):.1f} s"),
        ("peak memory", f"{median(run[1] for run in runs) / 1e9:.2f} GB"),
    ]
    if isinstance(manifest_params, int):
        ratio = median(run[1] for run in runs) / (4 * manifest_params)
        rows.append(("peak memory over fp32 weights", f"{ratio:.2f}x of {4 * manifest_params / 1e9:.2f} GB"))
    report(f"Build of {args.checkpoint.name}", rows, {"runs": runs}, args.json)


if __name__ == "__main__":
    main()

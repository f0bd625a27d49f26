"""Whole process from start to first token, over a built bundle.

python benchmarks/startup.py engines/demo
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import median, report, timed


def main() -> None:
    """Time `generate --max-tokens 1` as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "specexport_runtime",
        "generate",
        str(args.bundle),
        "def main():",
        "--max-tokens",
        "1",
    ]
    subprocess.run(command, check=True, capture_output=True)  # warm the file cache
    seconds = [timed(lambda: subprocess.run(command, check=True, capture_output=True))[0] for _ in range(args.repeats)]
    rows = [("process start to first token", f"{median(seconds):.2f} s (of {', '.join(f'{s:.2f}' for s in seconds)})")]
    report(f"Start-up, {args.bundle.name}", rows, {"seconds": seconds}, args.json)


if __name__ == "__main__":
    main()

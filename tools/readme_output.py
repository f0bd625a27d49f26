"""Put the output of a real ``specexport demo`` run into the README. Run it on an idle machine.

.venv/bin/python tools/readme_output.py
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- demo output -->\n).*?(<!-- end -->\n)", re.DOTALL)
MEASURED = "\nGreedy, "
"""How the measurement begins, after the streamed text."""
TEXT_LINES = 2


def cpu_name() -> str:
    """Model name of the CPU, as Linux tells it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def shorten(output: str) -> str:
    """The first lines of the streamed text, and all of the measurement."""
    text, begin, measured = output.partition(MEASURED)
    lines = text.rstrip("\n").split("\n")
    if not begin or len(lines) <= TEXT_LINES:
        return output
    return "\n".join([*lines[:TEXT_LINES], "…", "", begin[1:] + measured])


def main() -> None:
    """Run the demo and replace the README's block."""
    command = Path(sys.executable).with_name("specexport")
    output = subprocess.run([command, "demo"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    output = shorten(output.strip("\n"))
    machine = f"Measured on {len(os.sched_getaffinity(0))} cores of an {cpu_name()}."
    text, count = BLOCK.subn(
        lambda match: f"{match[1]}\n```text\n{output}\n```\n\n{machine}\n{match[2]}", README.read_text(encoding="utf-8")
    )
    if count != 1:
        sys.exit(f"{README} has no place for the output. Fix: restore its `<!-- demo output -->` and `<!-- end -->`.")
    README.write_text(text, encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()

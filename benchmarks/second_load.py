"""First and later loads of a bundle in fresh processes: seconds, private memory, time to the first token.

python benchmarks/second_load.py BUNDLE

The run has a cache of its own. Private memory is what is anonymous (Linux, ``smaps_rollup``) after the load, with the
tokenizer there, beyond what the interpreter had before it; no entry of the KV arena has been written to by then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, cast

from common import median, report

OFF = {"SPECEXPORT_PREPACKED": "0"}
HASHED = {"SPECEXPORT_VERIFY_HASHES": "1"}


def memory(field: str) -> int:
    """One field of this process's memory, in bytes (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run_child(bundle: str, threads: int, spin: bool) -> None:
    """Load, weigh, generate two tokens, wait for a line, weigh again; one line of JSON each time."""
    from specexport_runtime.engine import SpecEngine
    from specexport_runtime.sampling.params import SamplingParams

    before = memory("Anonymous")
    start = time.perf_counter()
    engine = SpecEngine.load(bundle, num_threads=threads, spin=spin)
    loaded = time.perf_counter()
    engine.tokenizer.token_to_id("a")  # there when its thread is done
    tokenizer = time.perf_counter()
    private = memory("Anonymous") - before
    chunks = engine.stream("def main():", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    next(iter(chunks))
    first = time.perf_counter()
    seconds = {"load": loaded - start, "tokenizer": tokenizer - start, "first_token": first - start}
    print(json.dumps({**seconds, "private": private, "before": before}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"proportional": memory("Pss")}), flush=True)
    sys.stdin.readline()
    engine.close()


class Child:
    """A process that loads the bundle and waits."""

    def __init__(self, args: argparse.Namespace, cache: str, extra: dict[str, str]) -> None:
        environment = {**os.environ, "SPECEXPORT_CACHE_DIR": cache, **extra}
        spin = [] if args.spin else ["--no-spin"]
        command = [sys.executable, __file__, str(args.bundle), "--child", "--threads", str(args.threads), *spin]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines, self._commands = cast("IO[str]", self._process.stdout), cast("IO[str]", self._process.stdin)
        self.record: dict[str, Any] = json.loads(self._lines.readline())

    def weigh(self) -> None:
        """Let it weigh itself again."""
        self._commands.write("\n")
        self._commands.flush()
        self.record |= json.loads(self._lines.readline())

    def end(self) -> dict[str, Any]:
        """Let it end, weighed or not."""
        self._commands.close()
        self._lines.read()
        self._process.wait()
        return self.record


def measure(args: argparse.Namespace, cache: str) -> dict[str, list[dict[str, Any]]]:
    """Records of the processes by what they are; the repeated ones take turns."""
    Child(args, cache, OFF).end()  # the bundle's files are in memory from here on, and hashed
    records = {"first": [Child(args, cache, {}).end()], "second": [], "off": [], "hashed": []}
    for _ in range(args.repeats):
        for name, extra in (("second", {}), ("off", OFF), ("hashed", HASHED)):
            records[name].append(Child(args, cache, extra).end())
    for name, extra in (("together", {}), ("off together", OFF)):
        pair = [Child(args, cache, extra), Child(args, cache, extra)]
        for child in pair:
            child.weigh()  # while both are there
        records[name] = [child.end() for child in pair]
    return records


def main() -> None:
    """Run the children, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-spin", dest="spin", action="store_false")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(str(args.bundle), args.threads, args.spin)
        return
    with tempfile.TemporaryDirectory() as cache:
        records = measure(args, cache)
        stored = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    titles = {
        "first": "first load: writes the prepacked files",
        "second": "later load",
        "off": "prepacked off",
        "hashed": "later load, all files hashed",
    }
    rows = []
    for name, title in titles.items():
        values = {key: median(record[key] for record in records[name]) for key in records[name][0]}
        fastest = min(record["load"] for record in records[name])
        rows.append(
            (
                title,
                f"{values['load']:.2f} s (fastest {fastest:.2f}), tokenizer there after {values['tokenizer']:.2f} s, "
                f"first token after {values['first_token']:.2f} s; private {values['private'] / 1e6:.0f} MB",
            )
        )
    for name, title in (("together", "two processes at once"), ("off together", "the same, prepacked off")):
        total = sum(record["proportional"] for record in records[name])
        rows.append((title, f"{total / 1e6:.0f} MB resident together, each shared page counted once"))
    rows.append(("cache files", f"{stored / 1e6:.0f} MB"))
    report(f"Loading {args.bundle.name}, {args.threads} threads", rows, {"records": records}, args.json)


if __name__ == "__main__":
    main()

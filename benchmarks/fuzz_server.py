"""Malformed requests against the server: no 500, no crash, no stuck row, errors in OpenAI's shape.

python benchmarks/fuzz_server.py BUNDLE [--requests 5000] [--seed 1]
python benchmarks/fuzz_server.py --fake

The server runs in this process on a free port of 127.0.0.1. Two fifths of the requests are schemathesis's, made of the
server's own schema (as it allows, and as it forbids); the others are damaged by tests/support/malformed.py: noise, JSON
cut short, deep nesting, numbers and encodings that nobody expects, bad chunks and headers, clients that hang up. After
each 200 the server must be idle with its invariants whole, and answer a well-formed request with the same text as
before. Exits with 1 if anything was wrong.
"""

import argparse
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "server"))

import httpx

from specexport_runtime import SpecEngine
from specexport_runtime.server.config import ServerConfig
from tests.support.fuzzing import Report, fuzz
from tests.support.malformed import malformed
from tests.support.schema_requests import schema_requests
from tests.support.serving import Served, fake_engine

SHOWN_PROBLEMS = 20


def main() -> int:
    """Parse the command line, send, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="bundle folder")
    parser.add_argument("--fake", action="store_true", help="two tiny numpy models instead of a bundle")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.fake == (options.bundle is not None):
        parser.error("give a bundle or --fake")
    logging.disable(logging.CRITICAL)  # a refusal is a line of log
    config = ServerConfig(model_name="demo", max_body_bytes=2**17, body_timeout_s=1.0, max_tokens=200)
    started = time.monotonic()
    with Served(lambda: _engine(options.bundle), config) as served:
        openapi = httpx.get(f"{served.url}/openapi.json").json()
        requests = schema_requests(openapi, 2 * options.requests // 5, options.seed)
        requests += itertools.islice(malformed(options.seed), options.requests - len(requests))
        report = fuzz(served, requests)
    _print(report, len(requests), time.monotonic() - started)
    return 1 if report.problems else 0


def _engine(bundle: Path | None) -> SpecEngine:
    options: dict[str, Any] = {"max_num_seqs": 4, "num_threads": 1, "spin": False}
    return fake_engine() if bundle is None else SpecEngine.load(bundle, **options)


def _print(report: Report, sent: int, seconds: float) -> None:
    for (kind, status), count in sorted(report.counts.items()):
        print(f"{kind:18} {status:>5} {count:6}")
    print(f"{sent} requests in {seconds:.0f} s; by status: {report.by_status()}; {len(report.problems)} problems")
    for problem in report.problems[:SHOWN_PROBLEMS]:
        print(f"\nPROBLEM {problem}")


if __name__ == "__main__":
    sys.exit(main())

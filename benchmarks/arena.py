"""Oversubscribed cache rows: typical requests that the same memory holds at a time, and what giving pages back costs.

python benchmarks/arena.py engines/demo --rows 4 --requests 64

Lengths are log-uniform from 64 to 1,024 tokens, prompt and answer together. Rows of fixed length are ``--max-num-seqs``
rows without a budget; pages are as many rows as are wanted, within a budget of the same bytes.
"""

import argparse
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, median, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.watch.observe import RoundRecord

SHORTEST, LONGEST = 64, 1024


def parse_args() -> argparse.Namespace:
    """Command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=4, help="rows of full length that the memory is for")
    parser.add_argument("--max-model-len", type=int, default=LONGEST)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="of the comparison of speeds")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt in that comparison")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens in that comparison")
    parser.add_argument("--drafter", help="as in `specexport generate`")
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS, help="JSONL: texts that prompts are cut from")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def typical_requests(count: int, longest: int, text: list[int], seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens follow: totals are log-uniform, a quarter to three quarters of them prompt."""
    random = np.random.default_rng(seed)
    totals = np.exp(random.uniform(np.log(SHORTEST), np.log(longest), count)).astype(int)
    requests = []
    for total, share, start in zip(totals, random.uniform(0.25, 0.75, count), random.random(count), strict=True):
        length = max(int(total * share), 1)
        begin = int(start * (len(text) - length))
        requests.append((text[begin : begin + length], int(total) - length))
    return requests


class Watcher:
    """Counts what runs while somebody waits."""

    def __init__(self, engine: SpecEngine) -> None:
        self._engine, self._before = engine, resident_bytes()
        self.running: list[int] = []
        self.seconds: list[float] = []
        self.counted, self.resident = 0, 0

    def on_round(self, record: RoundRecord) -> None:
        """A step was executed."""
        load = self._engine.current_load()
        self.counted = max(self.counted, load.kv_bytes_resident)
        self.resident = max(self.resident, resident_bytes() - self._before)
        if load.num_waiting:
            self.running.append(load.num_running)
            self.seconds.append(record.seconds)

    def on_finish(self, sequence: object) -> None:
        """A sequence ended."""


def hold(
    bundle: Path, options: dict[str, Any], requests: list[tuple[list[int], int]], drafting: dict[str, Any]
) -> dict[str, Any]:
    """Answer all requests as they fit; what ran at a time, and what was resident."""
    with closing(SpecEngine.load(bundle, **options)) as engine:
        engine.generate([requests[0][0][:8]], [SamplingParams(max_tokens=4)], remember=False, **drafting)
        watcher = Watcher(engine)
        engine.add_observer(watcher)
        start = time.perf_counter()
        prompts = [prompt for prompt, _ in requests]
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in requests]
        results = engine.generate(prompts, params, remember=False, **drafting)
        seconds = time.perf_counter() - start
        engine.check()
        return {
            "texts": [result.token_ids for result in results],
            "running": sum(watcher.running) / max(len(watcher.running), 1),
            "most": max(watcher.running, default=0),
            "tokens_per_s": sum(count for _, count in requests) / seconds,
            "counted": watcher.counted,
            "resident": watcher.resident,
            "budget": engine.current_load().kv_bytes_budget,
        }


def row_bytes(bundle: Path, options: dict[str, Any]) -> int:
    """Memory of a row of full length, of all models."""
    with closing(SpecEngine.load(bundle, **options, max_num_seqs=1)) as engine:
        return engine.target.kv_bytes + sum(each.kv_bytes for each in (engine.draft, engine.head) if each is not None)


def speeds(engine: SpecEngine, prompt: list[int], tokens: int, drafting: dict[str, Any]) -> tuple[float, float]:
    """Tokens a second of one request: of its prompt, and of its answer."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    stats = engine.generate([prompt], [params], remember=False, **drafting)[0].stats
    return len(prompt) / (stats.time_to_first_token_s or 1.0), (tokens - 1) / (stats.decode_s or 1.0)


def pages(engine: SpecEngine, entries: int) -> dict[str, float]:
    """Seconds to write entries of a row where there is no memory, to write them again, and to give them back."""
    executor = engine.target
    if not executor.copies_rows:
        raise SystemExit("rows of this bundle cannot be copied.")
    found: dict[str, list[float]] = {"first": [], "again": [], "back": []}
    for _ in range(5):
        for name in ("first", "again"):
            start = time.perf_counter()
            executor.copy_row(1, 0, entries)
            found[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.target.give_back(0, 0)
        found["back"].append(time.perf_counter() - start)
    engine.target.give_back(1, 0)
    return {name: min(seconds) for name, seconds in found.items()} | {"bytes": engine.target.row_bytes(entries)}


def main() -> None:
    """Measure and report."""
    args = parse_args()
    drafting = {} if args.drafter is None else {"drafter": args.drafter}
    options = {"num_threads": args.threads, "max_model_len": args.max_model_len}
    budget = args.rows * row_bytes(args.bundle, options | {"kv_cache_memory_bytes": "1TB"})
    paged = options | {"kv_cache_memory_bytes": budget, "max_num_seqs": 8 * args.rows}
    with closing(SpecEngine.load(args.bundle, **options, max_num_seqs=1)) as engine:
        said = [token for text in read_prompts(args.prompts, 1000) for token in engine.encode(text)]
    said *= args.max_model_len // len(said) + 2
    requests = typical_requests(args.requests, args.max_model_len, said, args.seed)
    fixed = hold(args.bundle, options | {"max_num_seqs": args.rows}, requests, drafting)
    pooled = hold(args.bundle, paged, requests, drafting)
    kept: list[tuple[float, float]] = []
    given: list[tuple[float, float]] = []
    # One request at a time in the memory of one row: what it had goes back when it ends.
    one = options | {"max_num_seqs": 2}
    tight = one | {"kv_cache_memory_bytes": budget // args.rows}
    with closing(SpecEngine.load(args.bundle, **one)) as keeps, closing(SpecEngine.load(args.bundle, **tight)) as gives:
        prompt = said[: args.prompt]
        for engine in (keeps, gives):
            speeds(engine, prompt, args.tokens, drafting)
        for _ in range(args.repeats):
            kept.append(speeds(keeps, prompt, args.tokens, drafting))
            given.append(speeds(gives, prompt, args.tokens, drafting))
        left = gives.current_load().kv_bytes_resident
        cost = pages(gives, args.prompt)
    rates = [[median(pair[part] for pair in each) for each in (kept, given)] for part in (0, 1)]
    ratio = pooled["running"] / fixed["running"]
    equal = sum(one == other for one, other in zip(fixed["texts"], pooled["texts"], strict=True))
    resident = [f"{each['counted'] / 1e6:.1f}, {each['resident'] / 1e6:.1f} MB" for each in (fixed, pooled)]
    each_mb = cost["bytes"] / 1e6
    rows = [
        ("memory of both", f"{budget / 1e6:.1f} MB: {args.rows} rows of {args.max_model_len} tokens"),
        ("requests held at a time, fixed rows", f"{fixed['running']:.2f}, at most {fixed['most']}"),
        ("requests held at a time, pages", f"{pooled['running']:.2f}, at most {pooled['most']}"),
        ("pages over fixed rows (wanted: 2 or more)", f"{ratio:.2f}x"),
        (
            "resident at most, fixed: counted, process",
            resident[0],
        ),
        (
            "resident at most, pages: counted, process",
            resident[1],
        ),
        ("tokens a second, fixed, pages", f"{fixed['tokens_per_s']:.1f}, {pooled['tokens_per_s']:.1f}"),
        (
            "texts equal",
            f"{equal} of {len(requests)}",
        ),
        ("prompt tokens a second: memory kept, given back", f"{rates[0][0]:.1f}, {rates[0][1]:.1f}"),
        ("the ratio", f"{rates[0][1] / rates[0][0]:.3f}"),
        ("new tokens a second: memory kept, given back", f"{rates[1][0]:.1f}, {rates[1][1]:.1f}"),
        ("the ratio", f"{rates[1][1] / rates[1][0]:.3f}"),
        ("resident behind a request whose memory went back", f"{left / 1e6:.1f} MB"),
        (
            f"target, {args.prompt} entries ({each_mb:.1f} MB): written first, again, given back",
            f"{1e3 * cost['first']:.2f}, {1e3 * cost['again']:.2f}, {1e3 * cost['back']:.2f} ms",
        ),
    ]
    record = {"fixed": fixed, "pages": pooled, "kept": kept, "given": given, "page_cost": cost, "budget": budget}
    report(f"arena: {args.bundle.name}", rows, record, args.json)


if __name__ == "__main__":
    main()

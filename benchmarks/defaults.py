"""What a user gets who gives no flag: default decoding against plain decoding and against every fixed choice.

python benchmarks/defaults.py BUNDLE --prompts code=code.jsonl,math=math.jsonl,chat=chat.jsonl --batch-sizes 1,8

For each domain and batch size all ways run in turns that begin at another place in each repeat. A way is `default` (no
option at all), `plain`, or NAME:K for a drafter and its K, which may be `auto`. Ratios are medians of the ratios within
the repeats. A run has a `cache_salt` of its own, so that no run copies from what an earlier one generated. With --chat
the prompts go through the bundle's chat template. With --disturb another process takes a core for random parts of a
second.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import DEMO_PROMPTS, read_domains, report

from specexport.bench.methods import Cell
from specexport.bench.runner import Meter
from specexport_runtime import SamplingParams, SpecEngine

BUSY = """
import random, time
chance = random.Random(0)
while True:
    end = time.monotonic() + chance.uniform(0.0, 1.0)
    while time.monotonic() < end:
        pass
    time.sleep(chance.uniform(0.0, 1.0))
"""
WARMUP_TOKENS = 16
WAYS = "plain,default,lookup:7,draft-model:2,draft-model:4,draft-model:6,chained:4"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("bundle", type=Path)
    add("--prompts", default=f"demo={DEMO_PROMPTS}", help="NAME=FILE,…: one domain each")
    add("--skip", type=int, default=0, help="prompts of each file that are left out")
    add("--num-prompts", type=int, default=4, help="of each domain; a larger batch has one a row")
    add("--tokens", type=int, default=96)
    add("--ways", default=WAYS)
    add("--batch-sizes", default="1")
    add("--repeats", type=int, default=3)
    add("--chat", action="store_true")
    add("--disturb", action="store_true")
    add("--json", type=Path)
    return parser.parse_args()


def options_of(way: str) -> dict[str, Any]:
    """Arguments of a request."""
    name, _, number = way.partition(":")
    if name == "default":
        return {}
    if name == "plain":
        return {"drafter": "none"}
    return {"drafter": name} | (
        {"num_speculative_tokens": int(number) if number.isdigit() else number} if number else {}
    )


class Requests:
    """Makes requests, each of which copies from no other.

    Args:
        prompts: of all of them.
    """

    def __init__(self, prompts: Sequence[Any]) -> None:
        self._prompts, self._salts = list(prompts), 0

    def of(self, way: str) -> Callable[[int], dict[str, Any]]:
        """What makes the requests of a way, by the number of new tokens."""

        def make(tokens: int) -> dict[str, Any]:
            self._salts += 1
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            return {"prompts": self._prompts, "params": params, "cache_salt": str(self._salts), **options_of(way)}

        return make


@contextmanager
def disturbed(asked: bool) -> Iterator[None]:
    """While another process is busy half of the time, half a second at a time on average."""
    if not asked:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def measure_in_turns(
    engine: SpecEngine, requests: Mapping[str, Callable[[int], dict[str, Any]]], *, size: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Run every way, in turns that begin at another place in each repeat.

    Args:
        engine: the engine.
        requests: by the name of a way what makes the arguments of ``generate`` for so many new tokens; ``"plain"`` is
            one of them.
        size: rows of the engine.
        tokens: new tokens of each prompt.
        repeats: runs of each way.

    Returns:
        by way: ``tokens_per_second`` of the rounds, one for each repeat; ``counts``: tokens drafted and accepted and
        the rounds of the last repeat. Beside them ``different``: texts that differ from plain decoding.
    """
    wanted = [result.token_ids for result in engine.generate(**requests["plain"](tokens))]
    ways = list(requests)
    for way in ways:  # bindings and memory
        if way != "plain":
            engine.generate(**requests[way](WARMUP_TOKENS))
    rates: dict[str, list[float]] = {way: [] for way in ways}
    counts: dict[str, list[int]] = {}
    different = 0
    for repeat in range(repeats):
        turn = repeat * 2 % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            meter = Meter(engine)
            results = meter.generate(requests[way](tokens))
            record = meter.record(Cell(way, way, True, True, size, 0, 0.0, "", "continuous"), repeat, results)
            rates[way].append(record.decode_tokens_per_second or record.tokens_per_second)
            different += sum(r.token_ids != tokens for r, tokens in zip(results, wanted, strict=True))
            counts[way] = [sum(getattr(r.stats, key) for r in results) for key in ("drafted", "accepted", "rounds")]
    return {"batch_size": size, "tokens_per_second": rates, "counts": counts, "different": different}


def ratio(record: dict[str, Any], way: str, other: str) -> float:
    """Median over the repeats of the ratio of two ways."""
    rates = record["tokens_per_second"]
    return median(a / b for a, b in zip(rates[way], rates[other], strict=True))


def describe(record: dict[str, Any]) -> tuple[str, str]:
    """A row of the table."""
    rates = record["tokens_per_second"]
    fixed = [way for way in rates if way != "default"]
    parts = [f"{way} {median(values):.1f}" for way, values in rates.items()]
    parts += [f"{way}/plain {ratio(record, way, 'plain'):.2f}" for way in rates if way != "plain"]
    if "default" in rates and fixed:
        best = max(fixed, key=lambda way: median(rates[way]))
        parts.append(f"default/best ({best}) {ratio(record, 'default', best):.3f}")
    parts += [f"{way}: {a} of {d} in {n} rounds" for way, (d, a, n) in record["counts"].items() if d]
    return f"{record['domain']}, batch {record['batch_size']}", "; ".join(parts)


def main() -> None:
    """Measure and report."""
    args = parse_args()
    ways = list(dict.fromkeys(["plain", *args.ways.split(",")]))
    records: list[dict[str, Any]] = []
    for size in map(int, args.batch_sizes.split(",")):
        engine = SpecEngine.load(args.bundle, enable_prefix_caching=False, max_num_seqs=size, share_threads=True)
        try:
            for domain, texts in read_domains(args.prompts, max(args.num_prompts, size), args.skip).items():
                chats = [engine.encode_chat([{"role": "user", "content": text}]) for text in texts if args.chat]
                requests = Requests(chats or texts)
                made = {way: requests.of(way) for way in ways}
                with disturbed(args.disturb):
                    found = measure_in_turns(engine, made, size=size, tokens=args.tokens, repeats=args.repeats)
                records.append({"domain": domain, **found})
                print(*describe(records[-1]), sep=": ", flush=True)
        finally:
            engine.close()
    different = sum(record["different"] for record in records)
    rows = [*map(describe, records), ("texts that differ from plain decoding", str(different))]
    title = f"{args.bundle.name}, no flags against every choice, {args.tokens} tokens, {args.repeats} repeats"
    report(title, rows, {"records": records, "different": different}, args.json)


if __name__ == "__main__":
    main()

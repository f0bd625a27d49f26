"""What a user gets who gives no flag: default decoding against plain decoding and against every fixed choice.

python benchmarks/defaults.py BUNDLE --prompts code=code.jsonl,math=math.jsonl,chat=chat.jsonl --batch-sizes 1,8

For each domain and batch size all ways run in turns that begin at another place in each repeat. A way is `default` (no
option at all), `plain`, or NAME:K for a drafter and its K. Ratios are medians of the ratios within the repeats. A run
has a `cache_salt` of its own, so that no run copies from what an earlier one generated. With --chat the prompts go
through the bundle's chat template.
"""

import argparse
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import median
from typing import Any

from common import DEMO_PROMPTS, report

from specexport.bench.meter import Meter
from specexport.bench.methods import Cell
from specexport.bench.prompts import read_prompts
from specexport_runtime import SamplingParams, SpecEngine

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
    add("--measure", action="store_true", help="measure cost curves first, in place of learning from rounds")
    add("--chat", action="store_true")
    add("--json", type=Path)
    return parser.parse_args()


def options_of(way: str) -> dict[str, Any]:
    """Arguments of a request."""
    name, _, number = way.partition(":")
    if name == "default":
        return {}
    if name == "plain":
        return {"drafter": "none"}
    return {"drafter": name} | ({"num_speculative_tokens": int(number)} if number else {})


class Bench:
    """Runs of one engine.

    Args:
        engine: the engine.
        size: its rows.
        args: the command line.
    """

    def __init__(self, engine: SpecEngine, size: int, args: argparse.Namespace) -> None:
        self.engine, self.size, self.args = engine, size, args
        self.ways = args.ways.split(",")
        self.different = self._salts = 0

    def run(self, domain: str, prompts: Seq[Any]) -> dict[str, Any]:
        """Every way on one domain: tokens/s of the rounds by name, one for each repeat."""
        wanted = [result.token_ids for result in self._generate("plain", prompts, self.args.tokens, None)]
        for way in self.ways:  # bindings and memory
            if way != "plain":
                self._generate(way, prompts, WARMUP_TOKENS, None)
        rates: dict[str, list[float]] = {way: [] for way in self.ways}
        drafted: dict[str, list[int]] = {}
        for repeat in range(self.args.repeats):
            turn = repeat * 2 % len(self.ways)
            for way in [*self.ways[turn:], *self.ways[:turn]]:
                meter = Meter(self.engine)
                results = self._generate(way, prompts, self.args.tokens, meter)
                cell = Cell(way, way, True, True, self.size, 0, 0.0, domain, "continuous")
                record = meter.record(cell, repeat, results)
                rates[way].append(record.decode_tokens_per_second or record.tokens_per_second)
                self.different += sum(r.token_ids != tokens for r, tokens in zip(results, wanted, strict=True))
                drafted[way] = [
                    sum(getattr(r.stats, key) for r in results) for key in ("drafted", "accepted", "rounds")
                ]
        return {"domain": domain, "batch_size": self.size, "tokens_per_second": rates, "drafted": drafted}

    def _generate(self, way: str, prompts: Seq[Any], tokens: int, meter: Meter | None) -> list[Any]:
        self._salts += 1
        request: dict[str, Any] = {
            "prompts": list(prompts),
            "params": SamplingParams(max_tokens=tokens, ignore_eos=True),
            "cache_salt": str(self._salts),
            **options_of(way),
        }
        return self.engine.generate(**request) if meter is None else meter.generate(request)


def describe(record: dict[str, Any]) -> tuple[str, str]:
    """A row of the table."""
    rates = record["tokens_per_second"]

    def ratio(way: str, other: str) -> float:
        return median(a / b for a, b in zip(rates[way], rates[other], strict=True))

    fixed = [way for way in rates if way != "default"]
    parts = [f"{way} {median(values):.1f}" for way, values in rates.items()]
    if "plain" in rates:
        parts += [f"{way}/plain {ratio(way, 'plain'):.2f}" for way in rates if way != "plain"]
    if "default" in rates and fixed:
        best = max(fixed, key=lambda way: median(rates[way]))
        parts.append(f"default/best ({best}) {ratio('default', best):.3f}")
    parts += [f"{way}: {a} of {d} in {n} rounds" for way, (d, a, n) in record["drafted"].items() if d]
    return f"{record['domain']}, batch {record['batch_size']}", "; ".join(parts)


def main() -> None:
    """Measure and report."""
    args = parse_args()
    records: list[dict[str, Any]] = []
    different = 0
    for size in map(int, args.batch_sizes.split(",")):
        engine = SpecEngine.load(
            args.bundle, max_num_seqs=size, adaptive=True if args.measure else None, share_threads=True
        )
        try:
            bench = Bench(engine, size, args)
            for item in args.prompts.split(","):
                name, _, path = item.partition("=")
                count = max(args.num_prompts, size)
                texts: list[Any] = [prompt.text for prompt in read_prompts([Path(path)])][args.skip :][:count]
                if args.chat:
                    texts = [engine.encode_chat([{"role": "user", "content": text}]) for text in texts]
                records.append(bench.run(name, [texts[i % len(texts)] for i in range(count)]))
                print(*describe(records[-1]), sep=": ", flush=True)
            different += bench.different
        finally:
            engine.close()
    rows = [*map(describe, records), ("texts that differ from plain decoding", str(different))]
    title = f"{args.bundle.name}, no flags against every choice, {args.tokens} tokens, {args.repeats} repeats"
    report(title, rows, {"records": records, "different": different}, args.json)


if __name__ == "__main__":
    main()

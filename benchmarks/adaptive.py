"""A draft length (K) that is chosen in every round, against every fixed one; and what the worst draft costs.

python benchmarks/adaptive.py BUNDLE --drafter lookup --prompts code=code.jsonl,math=math.jsonl,chat=chat.jsonl
python benchmarks/adaptive.py BUNDLE --drafter draft-model --adversarial --batch-sizes 1,16

Without --adversarial: for each domain and batch size, plain decoding, every K of --lookaheads and `auto`, in turns that
begin at another place in each repeat. Ratios are medians of the ratios within the repeats; the best and the worst K are
those with the highest and the lowest median.

With --adversarial drafts are wrong: the draft engine (or the target's, while layers are off) answers with the token
behind the one it means, so no draft token is right; lookup gets a reference in which long pieces of the text are
followed by a wrong token, so its longest matches fail (shorter ones in its own text may be right). `auto` is compared
with plain decoding.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from common import DEMO_PROMPTS, report
from turns import measure_in_turns, ratio, read_domains

from specexport.bench.methods import AUTO
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.engine_load import load_engine_parts
from specexport_runtime.engine_options import EngineOptions

MATCH = 16  # tokens before each wrong one


class Way(NamedTuple):
    """One way to decode: K, 0 for plain decoding, ``AUTO`` for a K that is chosen."""

    drafter: str
    lookahead: int

    @property
    def name(self) -> str:
        """For tables."""
        return {0: "plain", AUTO: "auto"}.get(self.lookahead, f"K={self.lookahead}")


class WrongDraft:
    """An executor that answers with the token behind the one it means, at its true cost.

    Args:
        executor: the engine.
        gated: it is a target: only while some of its layers are off.
    """

    def __init__(self, executor: Any, *, gated: bool) -> None:
        self._executor, self._wrong, self._gated = executor, not gated, gated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """The runtime sets counters of engines: they belong to the wrapped one."""
        if name in ("_executor", "_wrong", "_gated"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._executor, name, value)

    def set_layers(self, mask: Any) -> None:
        """Layers are off: a draft begins."""
        self._executor.set_layers(mask)
        self._wrong = self._gated and mask is not None

    def execute(self, want: str = "logits") -> Any:
        """The answer, moved by one token."""
        output = self._executor.execute(want)
        if not self._wrong:
            return output
        return (output + 1) % self.vocab_size if want == "token_ids" else np.roll(output, 1, axis=1)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("bundle", type=Path)
    add("--drafter", choices=["draft-model", "lookup", "self"], default="lookup")
    add("--prompts", default=f"demo={DEMO_PROMPTS}", help="NAME=FILE,…: one domain each")
    add("--num-prompts", type=int, default=4, help="of each domain; a larger batch has one a row")
    add("--tokens", type=int, default=96)
    add("--lookaheads", default="1,2,4,6,8")
    add("--batch-sizes", default="1,8")
    add("--repeats", type=int, default=5)
    add("--threads", type=int, default=2)
    add("--adversarial", action="store_true")
    add("--json", type=Path)
    return parser.parse_args()


def load_engine(args: argparse.Namespace, size: int) -> SpecEngine:
    """An adaptive engine; with --adversarial one whose drafts are wrong."""
    options = EngineOptions(
        max_num_seqs=size, num_threads=args.threads, share_threads=True, enable_prefix_caching=False
    )
    parts = load_engine_parts(args.bundle, options)
    if args.adversarial and args.drafter == "draft-model":
        parts = parts._replace(draft=WrongDraft(parts.draft, gated=False))  # type: ignore[arg-type]  # it passes all else on
    if args.adversarial and args.drafter == "self":
        parts = parts._replace(target=WrongDraft(parts.target, gated=True))  # type: ignore[arg-type]
    return SpecEngine(parts, options)


def trap(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> list[int]:
    """Before every token of a text what precedes it, and then another token: longer matches than the text's own."""
    tokens = [*prompt[-MATCH:], *output]
    starts = range(len(tokens) - len(output), len(tokens))
    return [t for i in starts for t in (*tokens[max(i - MATCH, 0) : i], (tokens[i] + 1) % vocab_size)]


def requests_of(engine: SpecEngine, texts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """By way what makes its requests, see ``measure_in_turns``."""
    ks = [AUTO] if args.adversarial else [*map(int, args.lookaheads.split(",")), AUTO]
    traps = None
    if args.adversarial and args.drafter == "lookup":
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
        wanted = [result.token_ids for result in engine.generate(list(texts), params, drafter="none")]
        vocab = engine.target.vocab_size
        traps = [trap(engine.encode(text), ids, vocab) for text, ids in zip(texts, wanted, strict=True)]

    def make(way: Way, tokens: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "prompts": list(texts),
            "params": SamplingParams(max_tokens=tokens, ignore_eos=True),
            "drafter": way.drafter,
            "num_speculative_tokens": "auto" if way.lookahead == AUTO else way.lookahead or None,
        }
        return request | ({"references": traps} if traps is not None and way.lookahead else {})

    ways = [Way("none", 0), *(Way(args.drafter, k) for k in ks)]
    return {way.name: partial(make, way) for way in ways}


def describe(record: dict[str, Any]) -> tuple[str, str]:
    """A row of the table."""
    rates = {name: median(values) for name, values in record["tokens_per_second"].items()}
    fixed = [name for name in rates if name.startswith("K=")]
    parts = [f"{name} {rate:.1f}" for name, rate in rates.items()]
    parts.append(f"auto/plain {ratio(record, 'auto', 'plain'):.3f}")
    if fixed:
        best, worst = max(fixed, key=rates.__getitem__), min(fixed, key=rates.__getitem__)
        record["best"], record["worst"] = best, worst
        parts.append(f"auto/best ({best}) {ratio(record, 'auto', best):.3f}")
        parts.append(f"auto/worst ({worst}) {ratio(record, 'auto', worst):.3f}")
    drafted, accepted, _ = record["counts"]["auto"]
    parts.append(f"auto drafted {drafted}, accepted {accepted}")
    return f"{record['domain']}, batch {record['batch_size']}, tokens/s", "; ".join(parts)


def main() -> None:
    """Measure and report."""
    args = parse_args()
    records: list[dict[str, Any]] = []
    for size in map(int, args.batch_sizes.split(",")):
        engine = load_engine(args, size)
        try:
            for domain, texts in read_domains(args.prompts, max(args.num_prompts, size)).items():
                requests = requests_of(engine, texts, args)
                found = measure_in_turns(engine, requests, size=size, tokens=args.tokens, repeats=args.repeats)
                records.append({"domain": domain, **found})
        finally:
            engine.close()
    different = sum(record["different"] for record in records)
    kind = "drafts that are wrong" if args.adversarial else "chosen against fixed K"
    rows = [*map(describe, records), ("texts that differ from plain decoding", str(different))]
    title = f"{args.bundle.name}, drafter {args.drafter}, {kind}, {args.tokens} tokens, {args.repeats} repeats"
    report(title, rows, {"records": records, "different": different}, args.json)


if __name__ == "__main__":
    main()

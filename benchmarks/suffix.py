"""Suffix drafting: what its store costs, and how much longer its drafts are than those of lookup where requests repeat.

python benchmarks/suffix.py                      # the store alone: microseconds and bytes a token
python benchmarks/suffix.py engines/demo         # and 200 similar requests: edits of one file, repeated questions

The texts of a run are the same with every drafter; what differs is how many rounds they take. Counts do not depend on
how busy the machine is; microseconds do.
"""

import argparse
import random
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from common import DEMO_PROMPTS, read_prompts, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.drafters.suffix import best_path
from specexport_runtime.drafters.suffix_store import SuffixStore

NUM_TOKENS = 1_000_000
TEXT = 400  # tokens of a text
PROBES = 50  # texts that are not kept
VOCAB = 50_000


def synthetic_texts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Texts out of 20,000 phrases of which few are frequent."""
    phrases = [rng.integers(0, VOCAB, rng.integers(3, 20)).tolist() for _ in range(20_000)]
    texts: list[list[int]] = []
    for _ in range(count):
        text: list[int] = []
        while len(text) < TEXT:
            text += phrases[min(int(rng.zipf(1.2)), len(phrases)) - 1]
        texts.append(text[:TEXT])
    return texts


def measure_store() -> dict[str, float]:
    """Microseconds a token for keeping texts and for drafting, and megabytes."""
    texts = synthetic_texts(np.random.default_rng(0), NUM_TOKENS // TEXT + PROBES)
    probes = [texts.pop() for _ in range(PROBES)]
    store = SuffixStore(2 * NUM_TOKENS)
    start = time.perf_counter()
    for text in texts:
        store.add("", text)
    store.settle()
    kept = time.perf_counter() - start
    times, matches = [], 0
    for text in probes:
        for end in range(40, TEXT, 40):
            start = time.perf_counter()
            found = store.find("", text[:end], least=2, most=64, width=8)
            if found is not None:
                matches += 1
                best_path(found.continuations)
            times.append(time.perf_counter() - start)
    return {
        "us_per_token_kept": 1e6 * kept / store.num_tokens,
        "us_per_draft": 1e6 * float(np.median(times)),
        "us_per_draft_p99": 1e6 * float(np.percentile(times, 99)),
        "megabytes": store.num_bytes / 1e6,
        "matches": matches / len(times),
    }


def similar_requests(count: int, rng: random.Random) -> dict[str, list[str]]:
    """Prompts of two kinds: small edits of one file, and questions of which most were asked before."""
    prompts = read_prompts(DEMO_PROMPTS, 100)
    lines = Path(random.__file__).read_text(encoding="utf-8").splitlines()[60:140]
    edits = []
    for _ in range(count):
        edited = list(lines[: rng.randrange(12, len(lines))])
        at = rng.randrange(len(edited))
        edited[at] = edited[at].replace("self", "this", 1) if "self" in edited[at] else edited[at] + "  # checked"
        edits.append("\n".join(edited[-40:]) + "\n")
    questions = [rng.choice(prompts) for _ in range(count)]
    return {"edits of one file": edits, "repeated questions": questions}


def measure_requests(bundle: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    """Mean accepted length of the second half of the requests, by drafter."""
    engine = SpecEngine.load(bundle, enable_prefix_caching=False, max_num_seqs=1)
    params = SamplingParams(max_tokens=tokens)
    rows = []
    try:
        for kind, prompts in similar_requests(count, random.Random(0)).items():
            texts, row = [], {"requests": kind}
            for drafter in ("none", "lookup", "suffix"):
                results = [engine.generate(prompt, params, drafter=drafter, cache_salt=kind)[0] for prompt in prompts]
                texts.append([result.token_ids for result in results])
                late = [result.stats for result in results[count // 2 :]]
                row[drafter] = sum(stats.num_generated_tokens for stats in late) / sum(stats.rounds for stats in late)
                lengths = [stats.mean_accepted_length for stats in late if stats.mean_accepted_length]
                row[f"{drafter}_accepted"] = mean(lengths) if lengths else 1.0
            row["equal"] = texts[0] == texts[1] == texts[2]
            rows.append(row)
    finally:
        engine.close()
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=200, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens of a request")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    store = measure_store()
    rows = [
        ("keeping a token, segments joined", f"{store['us_per_token_kept']:.2f} µs"),
        ("a draft, median / 99th percentile", f"{store['us_per_draft']:.0f} / {store['us_per_draft_p99']:.0f} µs"),
        ("contexts that matched", f"{store['matches']:.0%}"),
        ("a million tokens", f"{store['megabytes']:.1f} MB"),
    ]
    record: dict[str, Any] = {"store": store}
    if args.bundle is not None:
        record["requests"] = measure_requests(args.bundle, args.requests, args.tokens)
        for row in record["requests"]:
            rows.append(
                (
                    f"{row['requests']}, second half of {args.requests}: tokens a round, lookup → suffix",
                    f"{row['lookup']:.2f} → {row['suffix']:.2f} ({row['suffix'] / row['lookup']:.2f}×)",
                )
            )
            rows.append(
                (
                    "mean accepted length, lookup → suffix",
                    f"{row['lookup_accepted']:.2f} → {row['suffix_accepted']:.2f} "
                    f"({row['suffix_accepted'] / row['lookup_accepted']:.2f}×), texts equal: {row['equal']}",
                )
            )
    report("Suffix drafting", rows, record, args.json)


if __name__ == "__main__":
    main()

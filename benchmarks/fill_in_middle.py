"""Gaps in files of Python's standard library, filled in by default decoding and by plain decoding in turns.

    python benchmarks/fill_in_middle.py engines/qwen-coder

A seed chooses the files and in each a gap of 5 to 15 lines; the model sees the lines before and after it. No run
copies from another. Of each gap the median of the ratios within the repeats counts; told are the median and the least
of the gaps, of the tokens a second after the prompt, and of the whole request, whose prompt is read anew.
"""

import argparse
import random
import sysconfig
from pathlib import Path

from common import median, report

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.requests.stats import RequestStats

TOLD = ("tokens a second", "whole requests")


def gaps_of(count: int, seed: int, before: int, behind: int) -> list[tuple[str, str]]:
    """Prefixes and suffixes of so many lines at most."""
    chance, found = random.Random(seed), list[tuple[str, str]]()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for path in chance.sample(files, len(files)):
        lines, size = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True), chance.randint(5, 15)
        if len(lines) >= before + behind and len(found) < count:
            at = chance.randint(before // 2, len(lines) - size - behind // 2)
            found.append(("".join(lines[max(at - before, 0) : at]), "".join(lines[at + size :][:behind])))
    return found


def rates_of(stats: RequestStats) -> tuple[float, ...]:
    """Of one request, as ``TOLD`` names them."""
    return (stats.num_generated_tokens - 1) / (stats.decode_s or 1.0), stats.tokens_per_second or 0.0


def main() -> None:
    """Fill all gaps each way, and print the ratios to plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bundle", type=Path)
    add("--ways", default="default", help="default (no option), or drafters: lookup,draft-model")
    add("--gaps", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--lines", type=int, nargs=2, default=(60, 40), metavar=("BEFORE", "BEHIND"))
    add("--tokens", type=int, default=160)
    add("--repeats", type=int, default=3)
    add("--json", type=Path)
    args = parser.parse_args()
    options = {way: {} if way == "default" else {"drafter": way} for way in ("none", *args.ways.split(","))}
    ratios: dict[str, list[tuple[float, ...]]] = {way: [] for way in options}
    lengths, different, params = [], 0, SamplingParams(max_tokens=args.tokens)
    with SpecEngine.load(args.bundle, max_num_seqs=1) as engine:
        for number, gap in enumerate(gaps_of(args.gaps, args.seed, *args.lines)):
            prompt, texts = engine.encode_middle(*gap), list[str]()
            rates: dict[str, list[tuple[float, ...]]] = {way: [] for way in options}
            for repeat in range(args.repeats):
                for way in [*options][:: 1 if repeat % 2 else -1]:
                    salt = f"{number} {repeat} {way}"
                    result = engine.generate(prompt, params, cache_salt=salt, **options[way])[0]
                    rates[way].append(rates_of(result.stats))
                    texts.append(result.text)
            lengths.append(len(result.token_ids))
            different += len(set(texts)) - 1
            for way, own in rates.items() if lengths[-1] > 1 else ():
                each = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(own, rates["none"], strict=True)]
                ratios[way].append(tuple(map(median, zip(*each, strict=True))))
    rows = [("tokens of a middle, median", f"{median(lengths):.0f}"), ("texts that differ", str(different))]
    for way, found in list(ratios.items())[1:]:
        for told, values in zip(TOLD, zip(*found, strict=True), strict=True):
            rows.append((f"{way}, {told}", f"{median(values):.2f}x, least {min(values):.2f}x"))
    report(f"Fill in the middle, {args.bundle.name}", rows, {"ratios": ratios, "lengths": lengths}, args.json)


if __name__ == "__main__":
    main()

"""Ways to decode that are measured in turns: for defaults.py; its prompts also for the others."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from specexport.bench.methods import Cell
from specexport.bench.prompts import read_prompts
from specexport.bench.runner import Meter
from specexport_runtime import SpecEngine

WARMUP_TOKENS = 16


def read_domains(prompts: str, count: int, skip: int = 0) -> dict[str, list[str]]:
    """Texts of each domain; repeated where there are too few.

    Args:
        prompts: ``NAME=FILE,…``.
        count: texts of each.
        skip: texts of each file that are left out.
    """
    domains = {}
    for item in prompts.split(","):
        name, _, path = item.partition("=")
        texts = [prompt.text for prompt in read_prompts([Path(path)])][skip:][:count]
        domains[name] = [texts[i % len(texts)] for i in range(count)]
    return domains


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

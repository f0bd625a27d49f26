"""What a bundle with a head drafts, against what it should, and that texts stay plain decoding's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specexport.verify.goodness_of_fit import assess_outcomes
from specexport.verify.logit_tree import LogitTree, Partition, make_conditional
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.sampling.sampler import Sampler
from tests.support.fakes.rounds import opened
from tests.support.models.head_bundles import Watch

Wanted = Callable[[list[int], int, int], list[int]]
DEPTH, RUNS = 3, 400
PROMPTS = [[5, 9, 200, 17, 8], [3, 77], [250] * 4 + [12, 13, 14, 15, 16], [9, 8, 7]]


def check_drafts(bundle: Path, wanted: Wanted, lookahead: int = 3, **options: Any) -> int:
    """Every greedy draft is ``wanted(text, length, limit)``, and texts are plain decoding's; the longest draft."""
    with opened(bundle, **options) as engine:
        return check_drafts_of(engine, wanted, lookahead, load_manifest(bundle).vocabulary.size)


def check_drafts_of(
    engine: SpecEngine, wanted: Wanted, lookahead: int, limit: int, *, tokens: int = 14, least: int = 60
) -> int:
    """The same of an open engine for three sequences; at least ``least`` draft tokens are compared."""
    found = drafted_and_wanted(engine, wanted, lookahead, limit, tokens=tokens)
    for drafted, expected in found:
        assert drafted == expected
    assert sum(len(drafted) for drafted, _ in found) > least
    return max(len(drafted) for drafted, _ in found)


def drafted_and_wanted(
    engine: SpecEngine, wanted: Wanted, lookahead: int, limit: int, *, tokens: int = 14
) -> list[tuple[list[int], list[int]]]:
    """Each greedy draft of ragged batches, and the one that was wanted; the text is plain decoding's."""
    watch = Watch()
    engine.add_observer(watch)
    check_text(engine, PROMPTS, SamplingParams(max_tokens=tokens, ignore_eos=True), [lookahead])
    return [(drafted, wanted(before, len(drafted), limit)) for before, drafted in watch.rounds if drafted]


def check_text(
    engine: SpecEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams],
    lookaheads: Iterable[int | str | None], drafter: str = "head", **way: Any,
) -> list[list[Any]]:  # fmt: skip
    """Texts with drafts are those of plain decoding; gives the statistics of each text, for each lookahead."""
    plain = [result.token_ids for result in engine.generate(prompts, params, drafter="none")]
    stats = []
    for lookahead in lookaheads:
        found = engine.generate(prompts, params, drafter=drafter, num_speculative_tokens=lookahead, **way)
        assert [result.token_ids for result in found] == plain, lookahead
        stats.append([result.stats for result in found])
    return stats


class Odds:
    """Whether sampled texts after a prompt follow the target: chi-square over their first tokens together."""

    def __init__(self, engine: SpecEngine, prompt: list[int], params: SamplingParams) -> None:
        tree = LogitTree(engine.target, prompt)
        self._prompt, self._params = prompt, params
        self._partition = Partition(make_conditional(tree, Sampler(params, prompt, tree.vocab_size)), DEPTH, RUNS)

    def fit(self, engine: SpecEngine, params: SamplingParams | None = None, **way: Any) -> bool:
        """``params`` are for texts that are not to fit."""
        each = [replace(params or self._params, seed=i, max_tokens=DEPTH + 1, ignore_eos=True) for i in range(RUNS)]
        results = engine.generate([self._prompt] * RUNS, each, **way)
        outcomes = [tuple(result.token_ids[:DEPTH]) for result in results]
        return assess_outcomes("engine", str(way), 0, self._partition, outcomes, DEPTH, 1e-4).passed


def accepted(bundle: Path, prompts: Sequence[Any], drafter: str = "head") -> float:
    """The share of draft tokens that the target accepts, at K = 3; the text is plain decoding's."""
    with opened(bundle) as engine:
        (stats,) = check_text(engine, prompts, SamplingParams(max_tokens=24, ignore_eos=True), [3], drafter)
    return sum(each.accepted for each in stats) / sum(each.drafted for each in stats)

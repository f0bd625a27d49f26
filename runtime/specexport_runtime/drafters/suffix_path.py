"""Which of many continuations to draft: the path with the most expected accepted tokens.

Source: suffix decoding (Oliaro et al. 2024, "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model
Inference"): the chance of a token is taken as the count of its node over the count of its parent, and the score of a
path is the sum over its tokens of the products of these chances.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class Path(NamedTuple):
    """A draft."""

    score: float  # expected number of accepted tokens, if the past foretells the future
    tokens: list[int]
    chances: list[float]  # of each, that it is accepted and all before it are


def best_path(continuations: Seq[Seq[int]]) -> Path:
    """The path through a trie of continuations, each at most as long as a draft may be, with the highest score.

    A tie goes to the continuation that comes first. Each continuation is looked at once a depth, and no longer once it
    is alone.
    """
    return _best([each for each in continuations if len(each)], 0, 1.0, len(continuations))


def _best(live: list[Seq[int]], depth: int, chance: float, count: int) -> Path:
    """The best path from ``depth`` on, reached with ``chance``, among those ``live`` of the ``count`` that got here."""
    if not live:
        return Path(0.0, [], [])
    if len(live) == 1:
        rest = list(live[0][depth:])
        passed = chance / count
        return Path(passed * len(rest), rest, [passed] * len(rest))
    groups: dict[int, list[Seq[int]]] = {}
    for each in live:
        groups.setdefault(each[depth], []).append(each)
    best = Path(-1.0, [], [])
    for token, group in groups.items():
        passed = chance * len(group) / count
        further = _best([each for each in group if len(each) > depth + 1], depth + 1, passed, len(group))
        score = passed + further.score
        if score > best.score:
            best = Path(score, [token, *further.tokens], [passed, *further.chances])
    return best

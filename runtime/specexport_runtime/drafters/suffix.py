"""Suffix drafting: copy what followed the same words before, in this text and in texts that were generated earlier.

Source: SuffixDecoding (Oliaro et al. 2024, "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model
Inference"). A request's own text is searched as by lookup; what earlier requests of the same scope were given, and the
corpus that the engine was loaded with, in a :class:`SuffixStore` (REST, He et al. 2023, drafts from a corpus alone).

Of many continuations the path with the most expected accepted tokens is drafted: the chance of a token is taken as the
count of its node over the count of its parent, and the score of a path is the sum over its tokens of the products of
these chances. A draft that may be a tree has the likeliest tokens of the other continuations as branches.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specexport_runtime.drafters.base import Drafter, DrafterKind, DrafterTraits
from specexport_runtime.drafters.continuations import Continuations, count_branch_room
from specexport_runtime.drafters.lookup import DEFAULT_COPY_LENGTH, LookupDrafter
from specexport_runtime.drafters.suffix_segment import DEPTH
from specexport_runtime.drafters.suffix_store import DEFAULT_MEMORY_MB, SuffixStore, tokens_for_megabytes
from specexport_runtime.requests.records import DraftEnd, DraftPrefix, Proposal
from specexport_runtime.requests.request import Request

SUFFIX = "suffix"
"""Name of this drafter in draft plans."""
_FACTOR, _OFFSET = 1.0, 0.0
"""A draft from the store has at most ``factor · match + offset`` tokens (SuffixDecoding, section 4: alpha · p)."""
_MIN_CHANCE = 0.1  # a draft ends before a token that is less likely than this to be reached
_MAX_PLACES = 64  # newest continuations that a path is chosen from
_MIN_MATCH = 2  # of the store: a single token is followed by anything


class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrence of a request's last tokens, wherever that was.

    - The request's own text and reference are searched as by :class:`LookupDrafter`. Where the store knows a longer
      suffix, the draft is the path through what followed there that promises the most accepted tokens.
    - A request with a ``scope`` finds what earlier requests of the same scope were given, and the corpus. What it is
      given is kept in its turn, when it has finished. One without finds the corpus alone and leaves nothing behind.
    - Drafts have no distribution, for sampled requests too: one draw of the target decides, whatever was kept of whom.
    - How long a draft may be follows from the length of the match, of ``match_length`` tokens at least. Of an adaptive
      request as much is tested as what became of earlier drafts promises.
    """

    traits = DrafterTraits(
        default_lookahead=DEFAULT_COPY_LENGTH, is_free=True, takes_reference=True, remembers=True, goes_on=True
    )

    def __init__(self, store: SuffixStore, *, match_length: int = _MIN_MATCH) -> None:
        self.store = store
        self._own = LookupDrafter(match_length)
        self._least = max(match_length, _MIN_MATCH)

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[DraftPrefix] | None = None
    ) -> list[Proposal]:
        """Up to ``lookaheads[i]`` tokens for each request; see ``Drafter.propose``."""
        own = self._own.propose(requests, lookaheads, begun)
        return [
            self._choose_longer(req, lookahead, proposal, [] if begun is None else begun[i].tokens)
            if lookahead > 0
            else proposal
            for i, (req, lookahead, proposal) in enumerate(zip(requests, lookaheads, own, strict=True))
        ]

    def commit(self, requests: Sequence[Request]) -> None:
        """Keep what finished requests were given, each with the end of its prompt, by which it will be found."""
        self._own.commit(requests)
        for req in requests:
            if req.finish_reason is not None and req.scope is not None and _is_planned(req):
                self.store.add(req.scope, req.tokens[-(req.num_generated + DEPTH) :])

    def _choose_longer(self, req: Request, lookahead: int, own: Proposal, begun: list[int]) -> Proposal:
        """The request's own draft, or one from the store if more tokens match there."""
        least = max(self._least, own.match_length + 1)
        if least > DEPTH:
            return own._replace(drafter=SUFFIX) if own.tokens else own
        known = [*req.tokens[-DEPTH:], *begun] if begun else req.tokens
        found = self.store.find(req.scope, known, least=least, most=_MAX_PLACES, width=lookahead)
        if found is not None:
            path = best_path(found.continuations)
            most = lookahead if req.adaptive else min(lookahead, int(_FACTOR * found.length + _OFFSET))
            tokens = path.tokens[: min(most, sum(chance >= _MIN_CHANCE for chance in path.chances))]
            if tokens:
                end: DraftEnd = "lookahead" if len(tokens) == most else "text"
                whole, places = [*begun, *tokens], tuple(range(len(begun)))
                room = count_branch_room(req, len(tokens))
                branches = _build_continuations(whole, begun, found.continuations).branches(room) if room else ()
                return Proposal(whole, None, end, SUFFIX, found.length, forced=places, branches=branches)
        return own._replace(drafter=SUFFIX) if own.tokens else own


def _build_continuations(chain: list[int], begun: list[int], continuations: Sequence[Sequence[int]]) -> Continuations:
    """A draft from the store among the ``continuations`` after ``begun``: how many of them come to each token."""
    found, share = Continuations(chain), 1.0 / len(continuations)
    for each in continuations:
        whole = [*begun, *each]
        found.add(whole, [share] * len(whole))
    return found


def _is_planned(req: Request) -> bool:
    return any(stage.drafter == SUFFIX for stage in req.draft_plan)


KIND = DrafterKind(
    SuffixDrafter.traits,
    lambda parts: SuffixDrafter(
        parts.store or SuffixStore(tokens_for_megabytes(DEFAULT_MEMORY_MB)), match_length=parts.match_length
    ),
    lambda _offer: None,
    method="suffix",
    config_keys=frozenset(["prompt_lookup_min"]),
)


class Path(NamedTuple):
    """A draft."""

    score: float  # expected number of accepted tokens, if the past foretells the future
    tokens: list[int]
    chances: list[float]  # of each, that it is accepted and all before it are


def best_path(continuations: Sequence[Sequence[int]]) -> Path:
    """The path through continuations with the highest score, at most as long as a draft may be."""
    return _search_path([each for each in continuations if len(each)], 0, 1.0, len(continuations))


def _search_path(live: list[Sequence[int]], depth: int, chance: float, count: int) -> Path:
    """The best path from ``depth`` on, reached with ``chance``, among those ``live`` of the ``count`` that got here."""
    if not live:
        return Path(0.0, [], [])
    if len(live) == 1:
        rest = list(live[0][depth:])
        passed = chance / count
        return Path(passed * len(rest), rest, [passed] * len(rest))
    groups: dict[int, list[Sequence[int]]] = {}
    for each in live:
        groups.setdefault(each[depth], []).append(each)
    best = Path(-1.0, [], [])
    for token, group in groups.items():
        passed = chance * len(group) / count
        further = _search_path([each for each in group if len(each) > depth + 1], depth + 1, passed, len(group))
        score = passed + further.score
        if score > best.score:
            best = Path(score, [token, *further.tokens], [passed, *further.chances])
    return best

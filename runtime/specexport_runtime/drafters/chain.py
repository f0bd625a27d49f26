"""Several drafters behind one: each sequence names those it wants, and the first that finds something drafts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specexport_runtime.drafters.base import (
    Drafter,
    DrafterTraits,
    FeatureDrafter,
    PrefixDrafter,
    SimilarityDrafter,
    as_continuing,
    as_feature_drafter,
    as_prefix_drafter,
    as_similarity,
    can_restart,
    prefill_seconds_of,
    restart,
)
from specexport_runtime.drafters.forced import BegunDrafts, begin_drafts, shorten
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.requests.records import Allowed, Asked, Proposal
from specexport_runtime.requests.request import Request


class ChainDrafter:
    """Walks each sequence's ``draft_plan`` until a stage proposes something.

    A plan of ``(lookup, draft-model)`` copies text where it can and asks the model where it cannot. An empty plan is
    plain decoding, so a chain of no drafters serves engines that never draft.

    What a grammar forces comes before all stages: it begins the draft, for any stage to continue, and is a draft by
    itself if none does.

    Sequences that wait for the same drafter share one call, at whatever place it has in their plans; a drafter that
    none waits for is not called. Free ones are called before others, so that sequences they have nothing for can still
    join another's call. All drafters hear of commits and rows: one that was not asked in some rounds catches up from
    what it has seen of a sequence.
    """

    traits = DrafterTraits(default_lookahead=1)  # of itself; plans ask the drafters behind it

    def __init__(self, drafters: Mapping[str, Drafter] | None = None, lengths: Controller | None = None) -> None:
        self.drafters = dict(sorted((drafters or {}).items(), key=lambda item: not item[1].traits.is_free))
        self.lengths = lengths

    @property
    def engine_seconds(self) -> float:
        """Seconds spent inside the engines of all drafters since creation."""
        return sum(drafter.engine_seconds for drafter in self.drafters.values())

    @property
    def prefill_seconds(self) -> float:
        """Of these, in steps that only read prompts."""
        return sum(prefill_seconds_of(drafter) for drafter in self.drafters.values())

    def propose(self, sequences: Sequence[Request], lookaheads: Sequence[int]) -> list[Proposal]:
        """Draft tokens for each sequence, in ascending rows; see ``Drafter.propose``.

        ``lookaheads`` are the room of each sequence: a stage drafts at most the smaller of this and its own lookahead.
        SpecexportError: a plan names a drafter that is not here.
        """
        begun = begin_drafts(sequences, lookaheads)
        proposals = [Proposal([], end="none") for _ in sequences] if begun is None else begun.alone()
        plans = [
            [(name, min(own, room)) for name, own in seq.draft_plan if min(own, room) > 0]
            for seq, room in zip(sequences, lookaheads if begun is None else begun.rooms, strict=True)
        ]
        traces: dict[int, list[Asked]] = {i: [] for i, seq in enumerate(sequences) if seq.trace is not None}
        lengths = self.lengths if any(seq.adaptive for seq in sequences) else None
        if lengths is not None and begun is not None:
            lengths.begun(sum([len(each.tokens) for each in begun.drafts]))
        while any(plans):
            name = self._next({plan[0][0] for plan in plans if plan})
            limits = [plan[0][1] if plan and plan[0][0] == name else 0 for plan in plans]
            found, allowed = self._ask(name, sequences, limits, lengths, begun)
            for i, limit in enumerate(limits):
                if not limit:
                    continue
                seq, proposal = sequences[i], found[i]
                settled = bool(proposal.tokens) or proposal.error is not None
                plans[i] = [] if settled else plans[i][1:]
                if settled:
                    proposals[i] = proposal if proposal.drafter == name else proposal._replace(drafter=name)
                if i in traces:
                    traces[i].append(Asked(name, *self._allowed(seq, name, limit, allowed[i])))
        if begun is not None:
            proposals = begun.extend(proposals)
        for i, asked in traces.items():
            promised = () if lengths is None or not sequences[i].adaptive else lengths.promises(sequences[i], asked)
            proposals[i] = proposals[i]._replace(asked=tuple(asked), promised=promised)
        return proposals

    def _ask(
        self,
        name: str,
        sequences: Sequence[Request],
        limits: Sequence[int],
        lengths: Controller | None,
        begun: BegunDrafts | None,
    ) -> tuple[list[Proposal], Sequence[Allowed | None]]:
        """Drafts of one drafter, as long as they may be."""
        drafter = self.drafters[name]
        if lengths is None:
            return _drafts_of(drafter, sequences, limits, begun), [None] * len(limits)
        if drafter.traits.is_free:
            found = _drafts_of(drafter, sequences, limits, begun)
            allowed = lengths.cut(name, sequences, found, limits)
            cut = [
                proposal
                if proposal.num_own <= most.lookahead
                else shorten(proposal, len(proposal.forced) + most.lookahead, "lookahead")
                for proposal, most in zip(found, allowed, strict=True)
            ]
            return cut, allowed
        allowed = lengths.allow(name, sequences, limits)
        most = [each.lookahead for each in allowed]
        # Nobody drafts: a true bypass, the drafter does not even hear of it.
        if not any(most):
            return [_NOTHING] * len(most), allowed
        start = time.perf_counter()
        found = _drafts_of(drafter, sequences, most, begun)
        lengths.drafted(name, sequences, found, time.perf_counter() - start)
        return found, allowed

    @staticmethod
    def _allowed(seq: Request, name: str, limit: int, allowed: Allowed | None) -> Allowed:
        """For the trace: what a sequence was allowed, and why."""
        if allowed is not None and seq.adaptive:
            return allowed
        own = next(lookahead for drafter, lookahead in seq.draft_plan if drafter == name)
        return Allowed(limit, "fixed" if limit == own else "room")

    def _next(self, wanted: set[str]) -> str:
        for name in self.drafters:
            if name in wanted:
                return name
        raise SpecexportError(f"no drafter is named {' or '.join(sorted(wanted))}; there is {list(self.drafters)}.")

    def commit(self, sequences: Sequence[Request]) -> None:
        """Tell every drafter; see ``Drafter.commit``."""
        for drafter in self.drafters.values():
            drafter.commit(sequences)

    def move_row(self, source: int, destination: int) -> None:
        """Tell every drafter; see ``Drafter.move_row``."""
        for drafter in self.drafters.values():
            drafter.move_row(source, destination)

    def release_row(self, row: int) -> None:
        """Tell every drafter; see ``Drafter.release_row``."""
        for drafter in self.drafters.values():
            drafter.release_row(row)

    def can_restart(self, sequence: Request) -> bool:
        """Whether every drafter of the sequence's plan can go on when it was paused."""
        return all(can_restart(self.drafters[name], sequence) for name, _ in sequence.draft_plan)

    def restart(self, sequence: Request) -> None:
        """Tell every drafter, and what chooses their lengths; see ``RestartingDrafter``."""
        for drafter in self.drafters.values():
            restart(drafter, sequence)
        if self.lengths is not None:
            self.lengths.restarted(sequence)

    def snapshot(self, sequence: Request) -> Mapping[str, Any]:
        """What each drafter has of a sequence's row, by name; see ``PrefixDrafter``."""
        return {name: drafter.snapshot(sequence) for name, drafter in self._keeping()}

    def usable(self, sequence: Request, kept: Mapping[str, Any], count: int) -> int:
        """How many of ``count`` common tokens every drafter can go on from; see ``PrefixDrafter``."""
        planned = {name for name, _ in sequence.draft_plan}
        for name, drafter in self._keeping():
            if name in planned:
                count = drafter.usable(sequence, kept[name], count)
        return count

    def adopt(self, sequence: Request, kept: Mapping[str, Any], count: int) -> None:
        """Tell the drafters that keep rows; see ``PrefixDrafter``."""
        for name, drafter in self._keeping():
            drafter.adopt(sequence, kept[name], count)

    def copy_row(self, source: int, destination: int, kept: Mapping[str, Any]) -> None:
        """Tell the drafters that keep rows; see ``PrefixDrafter``."""
        for name, drafter in self._keeping():
            drafter.copy_row(source, destination, kept[name])

    def swap_rows(self, one: int, other: int, kept: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]) -> None:
        """Tell the drafters; see ``PrefixDrafter``. To those that do not keep rows a sequence may have moved."""
        of_one, of_other = kept
        for name, drafter in self.drafters.items():
            keeping = as_prefix_drafter(drafter)
            if keeping is not None:
                keeping.swap_rows(one, other, (of_one and of_one[name], of_other and of_other[name]))
            elif of_one is None:
                drafter.move_row(one, other)

    def forget_row(self, row: int) -> None:
        """Tell every drafter; those that do not keep rows are told that the sequence is done."""
        for drafter in self.drafters.values():
            keeping = as_prefix_drafter(drafter)
            (drafter.release_row if keeping is None else keeping.forget_row)(row)

    def _keeping(self) -> Iterator[tuple[str, PrefixDrafter]]:
        for name, drafter in self.drafters.items():
            keeping = as_prefix_drafter(drafter)
            if keeping is not None:
                yield name, keeping

    def wants_similarity(self, sequence: Request) -> bool:
        """Whether a drafter of the sequence's plan does."""
        return any(True for _ in self._curious(sequence))

    def note_similarity(self, sequence: Request, similarity: Float32Array) -> None:
        """Tell the drafters of the sequence's plan that want to know."""
        for drafter in self._curious(sequence):
            drafter.note_similarity(sequence, similarity)

    def wants_features(self, sequence: Request) -> bool:
        """Whether a drafter of the sequence's plan does."""
        return any(True for _ in self._reading(sequence))

    def note_features(self, sequence: Request, start: int, features: Float32Array) -> None:
        """Tell the drafters of the sequence's plan that want to know."""
        for drafter in self._reading(sequence):
            drafter.note_features(sequence, start, features)

    def _reading(self, sequence: Request) -> Iterator[FeatureDrafter]:
        """The drafters of a sequence's plan that read features of it."""
        for name, _ in sequence.draft_plan:
            drafter = as_feature_drafter(self.drafters[name])
            if drafter is not None and drafter.wants_features(sequence):
                yield drafter

    def _curious(self, sequence: Request) -> Iterator[SimilarityDrafter]:
        """The drafters of a sequence's plan that want to know its similarity."""
        for name, _ in sequence.draft_plan:
            drafter = as_similarity(self.drafters[name])
            if drafter is not None and drafter.wants_similarity(sequence):
                yield drafter


_NOTHING = Proposal([], end="none")


def _drafts_of(
    drafter: Drafter, sequences: Sequence[Request], limits: Sequence[int], begun: BegunDrafts | None
) -> list[Proposal]:
    """What a drafter proposes, within the grammars of the sequences."""
    if begun is None:
        return drafter.propose(sequences, limits)
    continuing = as_continuing(drafter)
    if continuing is None:
        limits = [0 if each.tokens else limit for each, limit in zip(begun.drafts, limits, strict=True)]
        return begun.fit(drafter.propose(sequences, limits))
    return begun.fit(continuing.propose(sequences, limits, begun.drafts))

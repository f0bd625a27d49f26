"""How far to draft: the seam between the chain of drafters and whatever chooses K round by round.

A sequence that is not ``adaptive`` drafts as far as each stage of its plan says, and nothing here is called for it.
For the others a :class:`DraftLength` chooses in every round, for every stage, between 0 (a true bypass: that drafter is
not called) and the stage's lookahead. ``goodput.GoodputLength`` is the one there is.

Choices may depend on tests that were performed (how many draft tokens passed, and whether one failed), on lengths, and
on numbers that are fixed while sampled sequences have their length chosen. Never on draft tokens that were discarded,
and of measured time only on what was measured before the first of those sequences began (``RandomStream`` says why).
They do depend on other sequences: with an adaptive length the sampled text of a seed may depend on who shares the batch
or came before; its distribution does not, and greedy text never changes.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from specexport_runtime.sequences.records import Allowed, StepLoad

if TYPE_CHECKING:
    from specexport_runtime.sequences.records import Asked, Promise, Proposal
    from specexport_runtime.sequences.sequence import Sequence


class DraftLength(Protocol):
    """Chooses how far adaptive sequences draft."""

    def begin_round(self, load: StepLoad) -> None:
        """A round with adaptive sequences begins."""
        ...

    def begun(self, num_forced: int) -> None:
        """Drafts begin with so many tokens in this round that are sure to be accepted; called before all stages."""
        ...

    def allow(self, drafter: str, sequences: "Seq[Sequence]", limits: Seq[int]) -> list[Allowed]:
        """How far each sequence may draft with a drafter that costs time; called before it drafts.

        Args:
            drafter: the stage's drafter.
            sequences: all that draft in this round, in ascending rows.
            limits: most tokens of each: the stage's lookahead or the sequence's room; 0 for those that do not wait for
                this drafter. Sequences that are not adaptive draft up to it.
        """
        ...

    def cut(
        self, drafter: str, sequences: "Seq[Sequence]", proposals: "Seq[Proposal]", limits: Seq[int]
    ) -> list[Allowed]:
        """How much of each draft is worth testing, where drafting itself costs nothing; called after it.

        Args:
            drafter: the stage's drafter.
            sequences: as :meth:`allow`.
            proposals: its drafts, of up to ``limits[i]`` tokens.
            limits: as :meth:`allow`.
        """
        ...

    def stays_plain(self, sequences: "Seq[Sequence]") -> bool:
        """Whether nothing has changed since nobody drafted, and nothing is to be tried: then nobody need be asked."""
        ...

    def note_plain(self, sequences: "Seq[Sequence]") -> None:
        """All were asked in this round, and nobody drafts."""
        ...

    def promises(self, sequence: "Sequence", asked: "Seq[Asked]") -> "tuple[Promise, ...]":
        """What plain decoding and each stage of a plan promise in this round, for those who look on.

        Nothing is decided by it, and nothing remembered. A stage of which nothing is known, or that found nothing to
        copy, is left out.

        Args:
            sequence: an adaptive one that keeps a trace.
            asked: the stages that were considered.
        """
        ...

    def observe(self, sequence: "Sequence", proposal: "Proposal", accepted: int, *, rejected: bool) -> None:
        """What became of an adaptive sequence's draft; called once a round, before the next begins.

        Args:
            sequence: its tokens already end with what the round gave it.
            proposal: what was tested.
            accepted: tests passed.
            rejected: a test failed, which ended them.
        """
        ...

    def drafted(self, drafter: str, sequences: "Seq[Sequence]", proposals: "Seq[Proposal]", seconds: float) -> None:
        """A drafter that costs time was called.

        Args:
            drafter: its name.
            sequences: as :meth:`allow`.
            proposals: what it gave.
            seconds: it took.
        """
        ...

    def restarted(self, sequence: "Sequence") -> None:
        """A sequence was paused: what drafters had read of it may be gone."""
        ...

    def took(self, sequences: "Seq[Sequence]", drafted: int, seconds: float) -> None:
        """A round is over, and all its drafts were observed.

        Args:
            sequences: all that got a token of the target's own.
            drafted: draft tokens of all of them.
            seconds: verification took.
        """
        ...


def concerns_lengths(drafting: "Seq[Sequence]") -> bool:
    """Whether a step counts for a ``DraftLength``: a sequence that drafts in it is adaptive or keeps a trace.

    Args:
        drafting: sequences that get a token of the target's own.
    """
    return any(seq.adaptive or seq.trace is not None for seq in drafting)


def step_load(drafting: "Seq[Sequence]", prompts: "Seq[Sequence]", prompt_tokens: int, num_soon: int = 0) -> StepLoad:
    """What a step holds before anything is drafted.

    Args:
        drafting: sequences that get a token of the target's own.
        prompts: sequences with a chunk of their prompt in the step; those whose prompt ends are among ``drafting``.
        prompt_tokens: of these chunks together.
        num_soon: see :class:`StepLoad`.
    """
    busy = [*drafting, *(seq for seq in prompts if seq not in drafting)] if prompts else drafting
    entries = sum([len(seq.tokens) for seq in busy])
    return StepLoad(len(busy), len(busy) - len(prompts) + prompt_tokens, len(drafting), entries, num_soon)


def learn_from_tests(sequence: "Sequence", proposal: "Proposal", accepted: int, lengths: DraftLength | None) -> None:
    """Tell what decides about the length of drafts what became of one.

    Args:
        sequence: its tokens already end with what the round gave it.
        proposal: what was tested.
        accepted: tests passed; if that is not all of them, the next one failed.
        lengths: chooses the length for adaptive sequences.
    """
    rejected = accepted < len(proposal.tokens)
    # A draft that could not end early, a copy for example, tells nothing of one that could.
    if sequence.draft_exit is not None and proposal.gamma is not None:
        sequence.draft_exit.observe(*proposal.own_tests(accepted))
    if sequence.adaptive and lengths is not None:
        lengths.observe(sequence, proposal, accepted, rejected=rejected)

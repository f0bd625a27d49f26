"""What decoding tells a controller of drafts: what a step holds, and what became of drafts."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specexport_runtime.sequences.records import StepLoad

if TYPE_CHECKING:
    from specexport_runtime.lookahead.controller import Controller
    from specexport_runtime.sequences.records import Proposal
    from specexport_runtime.sequences.sequence import Sequence


def concerns_lengths(drafting: "Seq[Sequence]") -> bool:
    """Whether a step counts for a controller: a sequence that drafts in it is adaptive or keeps a trace.

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


def learn_from_tests(sequence: "Sequence", proposal: "Proposal", accepted: int, lengths: "Controller | None") -> None:
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

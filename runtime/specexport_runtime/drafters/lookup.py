"""Lookup drafting: copy what followed the same words before. No draft model, no training.

LLMA (Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large Language Models") copies
from a reference text; prompt lookup copies from the prompt and the output. This drafter does both.
"""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from specexport_runtime.drafters.base import DrafterKind, DrafterTraits
from specexport_runtime.drafters.suffix_index import SuffixIndex
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sequences.records import Begun, DraftEnd, Proposal
from specexport_runtime.sequences.sequence import Sequence

DEFAULT_MATCH_LENGTH = 2
DEFAULT_COPY_LENGTH = 7
"""Match and copy length as EMS-SD uses them with LLMA (Ni et al. 2025)."""

_SEPARATOR = -1  # between reference and prompt; it is no token id and occurs once, so no match can contain it


class LookupDrafter:
    """Drafts the tokens that followed the longest earlier occurrence of a sequence's last tokens.

    - The text is the sequence's reference, if it has one, then its prompt and output. A match has at least
      ``match_length`` tokens. The longest wins; among equals the most recent, so output before prompt before reference.
    - A copy that reaches the end of the text goes on into what it has just copied (as in LZ77), so periodic text
      drafts its full length. A copy from the reference ends where the reference ends; no match runs across that border.
    - Copied tokens have no distribution: the proposal is one-hot, for sampled sequences too.

    The gate keeps bad copies short, because in a large batch each rejected token costs compute. While fewer than half
    of the recent matches foretold their next token, a copy is no longer than its match. The gate looks at the text
    alone: never at other sequences, nor at drafts that were discarded, nor at where rounds began (``RandomStream`` says
    why). With a reference, where copying is expected, it starts open. Adaptive sequences do without the gate: how much
    of a copy they test is chosen by what became of earlier copies. ``gate=False`` copies the full length after every
    match, as in the paper. A ``match_length`` of less than 1 is an InvalidRequestError.
    """

    traits = DrafterTraits(default_lookahead=DEFAULT_COPY_LENGTH, is_free=True, takes_reference=True, goes_on=True)
    engine_seconds = 0.0

    def __init__(self, match_length: int = DEFAULT_MATCH_LENGTH, *, gate: bool = True) -> None:
        if match_length < 1:
            raise InvalidRequestError(f"match_length is {match_length}.", "give at least 1.")
        self.match_length = match_length
        self.gate = gate
        # By sequence, not by row: nothing to do when rows move, and a dropped sequence takes its index along.
        self._indexes: WeakKeyDictionary[Sequence, SuffixIndex] = WeakKeyDictionary()

    def propose(
        self, sequences: Seq[Sequence], lookaheads: Seq[int], begun: Seq[Begun] | None = None
    ) -> list[Proposal]:
        """Up to ``lookaheads[i]`` copied tokens for each sequence; see ``ContinuingDrafter.propose``."""
        return [
            self._copy(
                self._updated_index(seq),
                lookahead,
                [] if begun is None else begun[i].tokens,
                gated=self.gate and not seq.adaptive,
            )
            if lookahead > 0
            else _NOTHING
            for i, (seq, lookahead) in enumerate(zip(sequences, lookaheads, strict=True))
        ]

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Drop what finished sequences no longer need; new tokens are read at the next proposal."""
        for seq in sequences:
            if seq.finish_reason is not None:
                self._indexes.pop(seq, None)

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to move: state belongs to sequences, not to rows."""

    def release_row(self, row: int) -> None:
        """Nothing to drop: state belongs to sequences, not to rows."""

    def _updated_index(self, seq: Sequence) -> SuffixIndex:
        index = self._indexes.get(seq)
        before = len(seq.reference) + 1 if seq.reference else 0
        if index is None:
            index = self._indexes[seq] = SuffixIndex(self.match_length)
            index.extend(seq.reference)
            if seq.reference:
                index.append(_SEPARATOR)
                index.extend(seq.tokens)
                index.hit_rate = 1.0
        index.extend(seq.tokens[len(index.tokens) - before :])
        return index

    def _copy(self, index: SuffixIndex, count: int, begun: list[int], *, gated: bool) -> Proposal:
        matched, place = index.match_behind(begun)
        if matched < self.match_length:
            return _NOTHING
        end: DraftEnd = "lookahead"
        if gated and index.hit_rate < 0.5 and matched < count:
            count, end = matched, "exit"
        copied = index.tokens[place : place + count]
        if len(copied) < count:  # the end of the text: what was copied so far repeats
            copied += begun
            copied = (copied * (count // len(copied) + 1))[:count]
        if _SEPARATOR in copied:
            copied, end = copied[: copied.index(_SEPARATOR)], "text"
        if not copied:
            return _NOTHING
        return Proposal([*begun, *copied], None, end, "lookup", matched, forced=tuple(range(len(begun))))


_NOTHING = Proposal([], end="none")

KIND = DrafterKind(
    LookupDrafter.traits,
    lambda parts: LookupDrafter(match_length=parts.match_length),
    lambda _offer: None,
    method="ngram",
    config_keys=frozenset(["prompt_lookup_min"]),
)

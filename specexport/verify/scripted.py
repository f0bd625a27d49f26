"""A drafter that follows a script, with mistakes at known places: no model decides what the verify step gets to see."""

from collections.abc import Sequence as Seq

from specexport_runtime.sequences.records import DrafterTraits, Proposal
from specexport_runtime.sequences.sequence import Sequence


class ScriptedDrafter:
    """Proposes the next tokens of a known output, some of them changed.

    The right drafts before a mistake number 0, 1, 2, … K in turn, unequal between sequences, so that every accepted
    length occurs beside every other in one step, whatever the draft model is worth.

    ``outputs`` are the expected ones, by ``Sequence.index``; a changed token is the next id, modulo V.
    """

    traits = DrafterTraits(default_lookahead=1)
    engine_seconds = 0.0

    def __init__(self, outputs: Seq[Seq[int]], vocab_size: int, lookahead: int) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._lookahead = lookahead
        self._turn = 0

    def propose(self, sequences: Seq[Sequence], lookaheads: Seq[int]) -> list[Proposal]:
        """Up to ``lookaheads[i]`` tokens of sequence i's script, the mistake moving on from round to round."""
        self._turn += 1
        return [
            Proposal(self._draft(seq, min(limit, self._lookahead)))
            for seq, limit in zip(sequences, lookaheads, strict=True)
        ]

    def _draft(self, seq: Sequence, limit: int) -> list[int]:
        start = seq.num_generated
        tokens = list(self._outputs[seq.index][start : start + limit])
        wrong = (self._turn + 2 * seq.index) % (limit + 1)
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self._vocab_size
        return tokens

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing to forget."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def release_row(self, row: int) -> None:
        """Nothing to drop."""

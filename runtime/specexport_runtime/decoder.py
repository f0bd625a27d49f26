"""The decoding round: draft, verify, accept, commit. One loop for every way to draft; plain decoding drafts nothing.

A running sequence has exactly one token that the target has not seen: the last one committed. A round feeds it, with
the draft tokens behind it, and gets the target's distribution after each of them (Chen et al. 2023, algorithm 2). Each
sequence accepts its own number of tokens; nothing is advanced by what another accepted.
"""

import time
from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from specexport_runtime.accept import Verdict, accept_greedy, accept_sampled
from specexport_runtime.batch import ModelRunner, RowWork
from specexport_runtime.drafters.base import Drafter, Proposal
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.sequence import NO_ROW, Sequence
from specexport_runtime.stats import PhaseTimes

_EMPTY = Proposal([])


class RoundEvent(NamedTuple):
    """What one round did for one sequence.

    Attributes:
        sequence: the sequence; its ``finish_reason`` says whether it is done.
        tokens: tokens committed: ``accepted`` draft tokens, then the target's own (unless the text ended before it).
        drafted: draft tokens tested.
        accepted: of these, accepted and committed.
        is_bonus: the target's own token follows a fully accepted draft; otherwise it corrects the draft.
    """

    sequence: Sequence
    tokens: list[int]
    drafted: int
    accepted: int
    is_bonus: bool


class Decoder:
    """Decodes many sequences at once over one target and one drafter.

    Sequences wait in first-come order for a cache row. Running sequences hold rows 0…n-1; when one finishes, the last
    row moves into the hole.

    Args:
        target: the target model.
        drafter: where draft tokens come from.
        lookahead: most draft tokens a round (K); 0 is plain decoding.
        max_num_seqs: most sequences at a time; at most the target's cache rows.
    """

    def __init__(
        self, target: ModelRunner, drafter: Drafter, *, lookahead: int, max_num_seqs: int | None = None
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.lookahead = lookahead
        self.max_num_seqs = min(max_num_seqs or target.executor.num_rows, target.executor.num_rows)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.times = PhaseTimes()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it starts when a cache row is free."""
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def step(self) -> list[RoundEvent]:
        """Admit what fits, then run one round for all running sequences.

        Returns:
            one event for each sequence that got tokens; a sequence that was admitted may appear twice.
        """
        events = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            events.append(self._admit(self.waiting.popleft()))
        if self.running:
            events.extend(self._round())
        return events

    def cancel(self) -> None:
        """Drop every sequence, waiting or running, and free its row."""
        for seq in (*self.running, *self.waiting):
            seq.finish_reason = seq.finish_reason or "cancelled"
        self.waiting.clear()
        while self.running:
            self._retire(self.running[-1])

    def check(self) -> None:
        """Assert the invariants between rounds.

        Raises:
            SpecexportError: a row number, a cache length or the drafter's state is wrong.
        """
        self.target.kv.check()
        for row, seq in enumerate(self.running):
            if seq.row != row or self.target.kv.kv_len(row) != len(seq.tokens) - 1:
                raise SpecexportError(
                    f"row {row} holds sequence {seq.index} (row {seq.row}) with kv_len {self.target.kv.kv_len(row)} "
                    f"for {len(seq.tokens)} tokens."
                )
        for row in range(len(self.running), self.target.kv.num_rows):
            if self.target.kv.kv_len(row):
                raise SpecexportError(f"row {row} has no sequence but {self.target.kv.kv_len(row)} committed entries.")

    def _admit(self, seq: Sequence) -> RoundEvent:
        """Prefill one sequence in a free row; its last chunk is a round of its own and gives the first token."""
        start = time.perf_counter()
        seq.stats.start_time = start
        seq.row = len(self.running)
        self.running.append(seq)
        head = (len(seq.tokens) - 1) // self.target.max_chunk * self.target.max_chunk
        self.target.prefill(seq.row, seq.tokens[:head])
        self.times.prefill += time.perf_counter() - start
        return self._verify([seq], [_EMPTY])[0]

    def _round(self) -> list[RoundEvent]:
        engines_before = self._engine_seconds()
        start = time.perf_counter()
        lookaheads = [min(self.lookahead, seq.room_for_drafts) for seq in self.running]
        proposals = self.drafter.propose(self.running, lookaheads)
        self.times.draft += time.perf_counter() - start
        events = self._verify(self.running, proposals)
        self.times.total += time.perf_counter() - start
        self.times.engine += self._engine_seconds() - engines_before
        self.times.rounds += 1
        return events

    def _engine_seconds(self) -> float:
        return self.target.executor.engine_seconds + self.drafter.engine_seconds

    def _verify(self, sequences: Seq[Sequence], proposals: Seq[Proposal]) -> list[RoundEvent]:
        start = time.perf_counter()
        sequences = list(sequences)  # finished ones leave self.running below
        first_row = sequences[0].row
        kv_len = self.target.kv.kv_len
        work = [
            RowWork(seq.tokens[kv_len(row) :] + proposal.tokens, len(proposal.tokens) + 1)
            for row, (seq, proposal) in enumerate(zip(sequences, proposals, strict=True), start=first_row)
        ]
        logits = self.target.step(first_row, work)
        executed = time.perf_counter()
        verdicts = self._accept(sequences, proposals, logits)
        events = [self._commit(*item) for item in zip(sequences, proposals, verdicts, strict=True)]
        self.drafter.commit(sequences)
        for seq in reversed(sequences):
            if seq.finish_reason is not None:
                self._retire(seq)
        self.times.verify += executed - start
        self.times.accept += time.perf_counter() - executed
        return events

    def _accept(self, sequences: Seq[Sequence], proposals: Seq[Proposal], logits: Float32Array) -> list[Verdict]:
        # One argmax serves all rows; rows of sampled sequences are so few that skipping them would not pay.
        greedy = _argmax(logits) if any(seq.sampler.is_plain_greedy for seq in sequences) else []
        verdicts = []
        start = 0
        for seq, proposal in zip(sequences, proposals, strict=True):
            end = start + len(proposal.tokens) + 1
            if seq.sampler.is_plain_greedy:
                verdicts.append(accept_greedy(proposal.tokens, greedy[start:end]))
            else:
                verdicts.append(_accept_processed(seq, proposal, logits[start:end]))
            start = end
        return verdicts

    def _commit(self, seq: Sequence, proposal: Proposal, verdict: Verdict) -> RoundEvent:
        tokens = [*proposal.tokens[: verdict.accepted], verdict.next_token]
        taken = seq.commit(tokens)
        accepted = min(verdict.accepted, taken)
        seq.stats.record_round(len(proposal.tokens), accepted, taken)
        # Everything but the newest token is in the cache; entries of rejected tokens stay uncounted.
        self.target.kv.commit(seq.row, len(seq.tokens) - 1)
        is_bonus = bool(proposal.tokens) and verdict.is_bonus and taken == len(tokens)
        return RoundEvent(seq, tokens[:taken], len(proposal.tokens), accepted, is_bonus)

    def _retire(self, seq: Sequence) -> None:
        row = seq.row
        self.target.release_row(row)
        self.drafter.release_row(row)
        last = self.running.pop()
        if last is not seq:
            self.target.move_row(last.row, row)
            self.drafter.move_row(last.row, row)
            last.row = row
            self.running[row] = last
        seq.row = NO_ROW


def _argmax(logits: Float32Array) -> list[int]:
    tokens = logits.argmax(axis=1)
    # argmax returns the first NaN if there is one, so this one look finds any NaN of the step.
    best = logits[np.arange(len(tokens)), tokens]
    if np.isnan(best).any():
        raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
    result: list[int] = tokens.tolist()
    return result


def _accept_processed(seq: Sequence, proposal: Proposal, logits: Float32Array) -> Verdict:
    """Acceptance where logits processing depends on the history: each row sees the draft tokens before it."""
    drafted = proposal.tokens
    if seq.sampler.is_greedy:
        targets = [seq.sampler.greedy_token(row, drafted[:j]) for j, row in enumerate(logits)]
        return accept_greedy(drafted, targets)
    return accept_sampled(
        drafted,
        proposal.distributions,
        lambda j: seq.sampler.distribution(logits[j], drafted[:j]),
        lambda j: seq.random.draws(seq.num_generated + j),
    )

"""The decoding round: draft, verify, accept, commit. One loop for every way to draft; plain decoding drafts nothing.

A sequence that is decoding has exactly one token that the target has not seen: the last one committed. A round feeds
it, with the draft tokens behind it, and gets the target's distribution after each of them (Chen et al. 2023,
algorithm 2). Each sequence accepts its own number of tokens (EMS-SD, Ni et al. 2025). Prompts of sequences that have
just arrived are fed in chunks, in the same packed step.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.prefixes import Prefixes
from specexport_runtime.decoding.scheduler import Scheduler
from specexport_runtime.decoding.scores import bound_scored, note_scores
from specexport_runtime.decoding.sharing import go_alone
from specexport_runtime.decoding.told_step import told_step
from specexport_runtime.drafters.base import Drafter, as_prefix_drafter, can_restart, prefill_seconds_of, restart
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import NO_TOKEN, Float32Array, StepOutput, Want, argmax_ids
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.round import step_load
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from specexport_runtime.sampling.accept import Verdict, accept_greedy
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.grammar import MaskAhead
from specexport_runtime.sampling.logprobs import logprobs_of
from specexport_runtime.sequences.records import Proposal, StepLoad
from specexport_runtime.sequences.sequence import NO_ROW, RoundEvent, Sequence
from specexport_runtime.sequences.stats import PaddingStats, PhaseTimes
from specexport_runtime.watch.observe import EngineLoad, Observers, RoundRecord
from specexport_runtime.watch.trace import RoundTracer

__all__ = ["Decoder", "RoundEvent"]


class Decoder:
    """Decodes many sequences at once over one target and one drafter."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        *,
        max_num_seqs: int | None = None,  # None takes all cache rows of the target
        max_num_batched_tokens: int = 512,  # of one step; cut to what the target's engine takes
        lengths: Controller | None = None,  # chooses how far adaptive sequences draft
        tracer: RoundTracer | None = None,
        reuses_prefixes: bool = False,
        pace: Pace | None = None,
        memory: MemoryBudget | None = None,  # None: only the number of cache rows is bounded
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.memory = memory or MemoryBudget([target])
        self.lengths = lengths
        self.tracer = tracer or RoundTracer()
        self.observers = Observers()
        rows, limit = target.executor.num_rows, target.executor.max_num_tokens
        self.scheduler = Scheduler(
            min(max_num_seqs or rows, rows),
            max_num_batched_tokens=min(max_num_batched_tokens, limit or max_num_batched_tokens),
            pace=pace,
            can_resume=lambda seq: can_restart(drafter, seq),
        )
        self._pace = pace if pace is not None and pace.is_on else None
        self._preemptions, self._sat_out = 0, False
        keeping = as_prefix_drafter(drafter)
        self.prefixes: Prefixes | None = None
        if reuses_prefixes and keeping is not None:
            self.prefixes = Prefixes(target, keeping, self.memory)
        self._masks = MaskAhead()
        self.times = PhaseTimes()
        self.padding = PaddingStats()
        # Padding a whole batch to the width of a prompt chunk helps nobody: the padded method prefills apart.
        self._mixes_prefill = target.unpad_kv and target.unpad_input

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it starts when a cache row is free."""
        self.scheduler.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return self.scheduler.has_work

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a cache row."""
        return self.scheduler.running

    def step(self) -> list[RoundEvent]:
        """Admit what fits, then run one packed step: a round for all that decode, with prompt chunks of the others.

        Each sequence that got tokens or failed has one event. An exception inside one sequence's acceptance, text or
        sampling ends that sequence alone, with its ``error`` set. An exception of an engine leaves this method; call
        :meth:`fail` then.
        """
        start = time.perf_counter()
        engines_before = self.target.executor.engine_seconds + self.drafter.engine_seconds
        ready, chunks = self._schedule()
        self.times.schedule += time.perf_counter() - start
        if not ready and not chunks:
            return []
        drafting = self._with_ending_prompts(ready, chunks) if chunks else ready
        load, prompt_tokens = None, sum(chunks.values())
        reread, self._preemptions, preemptions = self._reread(chunks), 0, self._preemptions
        counts = any(seq.adaptive or seq.trace is not None for seq in drafting)
        if counts or self.observers:
            soon = min(len(self.scheduler.running) + len(self.scheduler.waiting), self.scheduler.num_rows)
            load = step_load(drafting, [self._in_row(row) for row in chunks], prompt_tokens, soon)
        # Being watched must not change how far anybody drafts: only rounds that count for lengths are told to them.
        proposals = self._propose(drafting, load if counts else None)
        drafted = time.perf_counter()
        events = self._verify(ready, proposals, chunks)
        if counts and self.lengths is not None:
            tokens = sum([len(proposal.tokens) for proposal in proposals.values()])
            self.lengths.took(drafting, tokens, time.perf_counter() - drafted)
        if load is not None:
            seconds = time.perf_counter() - start
            plain_seconds = self.tracer.record(events, load, seconds)
            record = RoundRecord(events, prompt_tokens, seconds, plain_seconds, reread, preemptions)
            self.observers.round_done(record)
        if self._pace is not None:
            self._pace.note(time.perf_counter() - start, prompt_tokens, len(ready))
        if ready:
            self.times.total += time.perf_counter() - start
            self.times.engine += self.target.executor.engine_seconds + self.drafter.engine_seconds - engines_before
            self.times.rounds += 1
        return events

    def _with_ending_prompts(self, ready: list[Sequence], chunks: Mapping[int, int]) -> list[Sequence]:
        """Who drafts: the step that ends a prompt does too, however it was cut, or that would change a seed's draws."""
        return sorted([*ready, *self._ending(chunks)], key=lambda seq: seq.row)

    def _ending(self, chunks: Mapping[int, int]) -> list[Sequence]:
        """Sequences whose prompt ends in a step."""
        return [seq for row, chunk in chunks.items() if self._pending(seq := self._in_row(row)) == chunk]

    def _first_tokens_first(
        self, ready: list[Sequence], chunks: dict[int, int]
    ) -> tuple[list[Sequence], dict[int, int]]:
        """The step as it is, or only what first tokens in it must not wait for; see ``go_alone``."""
        alone = [] if self._sat_out else go_alone(ready, self._ending(chunks))
        self._sat_out = bool(alone)
        return ([], {seq.row: chunks[seq.row] for seq in alone}) if alone else (ready, chunks)

    def _schedule(self) -> tuple[list[Sequence], dict[int, int]]:
        """The sequences that decode in this step, and the prompt tokens of the other rows."""
        ready = [seq for seq in self.scheduler.rows if seq is not None and seq.is_decoding]
        if len(ready) == len(self.scheduler.rows) and not self.scheduler.can_admit(self._pending):
            return ready, {}  # most rounds: everybody decodes, and nobody can come
        self.scheduler.place(
            _busy(ready), self._pending, self._move_row, self._begin, self._is_early, self._fits, self._pause
        )
        ready = [seq for seq in self.running if seq.is_decoding]
        busy, limit = _busy(ready), self.target.executor.max_num_tokens
        if limit is not None:  # who has one token to read drafts behind it
            busy += _busy([seq for seq in self.running if not seq.is_decoding and self._pending(seq) == 1])
        # An engine of fixed sizes takes a whole verify step, but maybe not the smallest prompt chunk beside it.
        if self._mixes_prefill and (limit is None or busy + self.scheduler.min_prefill_tokens <= limit):
            return self._first_tokens_first(ready, self._share(busy))
        chunks = self._share(0)
        return ([], dict([next(iter(chunks.items()))])) if chunks else (ready, chunks)

    def _share(self, busy_tokens: int) -> dict[int, int]:
        """Prompt tokens of each row in this step."""
        chunks = self.scheduler.share(busy_tokens, self._pending, self.target.max_chunk)
        rows = {row: self._in_row(row) for row in chunks}
        if any(seq.is_scored for seq in rows.values()):
            chunks = bound_scored(chunks, rows)
        limit = self.target.executor.max_num_tokens
        if limit is not None:  # a prompt's end has a draft behind it: the last token waits where that does not fit
            left = limit - busy_tokens - sum(chunks.values())
            for seq in [each for each in self._ending(chunks) if chunks[each.row] > 1]:
                drafts = _busy([seq]) - 1
                waits = drafts > left
                chunks[seq.row] -= waits
                left += 1 if waits else -drafts
        return chunks

    def cancel(self, sequence: Sequence, error: Exception | None = None) -> None:
        """Drop one sequence, waiting or running, and free its row; one that has finished stays as it is.

        ``error`` is what ended it; None if its owner did.
        """
        if sequence.finish_reason is None:
            sequence.end("cancelled" if error is None else "error", error)
            self._retire(sequence)

    def fail(self, error: Exception) -> list[Sequence]:
        """End all running sequences with ``error``, forget their rows and return them; waiting ones stay queued."""
        failed = self.running
        for seq in failed:
            seq.end("error", error)
            self._retire(seq)
        self.target.reset()
        if self.prefixes is not None:
            self.prefixes.clear()
        return failed

    def check(self) -> None:
        """Assert the invariants between rounds; SpecexportError if a row number or a cache length is wrong."""
        self.target.kv.check()
        self.scheduler.check([self.target.kv.kv_len(row) for row in range(self.target.kv.num_rows)])
        self.memory.check()
        if self.prefixes is not None:
            self.prefixes.check(self.running)

    @property
    def load(self) -> EngineLoad:
        """How busy it is; may be asked from any thread."""
        kv, rows, running = self.target.kv, self.scheduler.num_rows, self.running
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(self.scheduler.waiting),
            max_num_seqs=rows,
            kv_entries=kv.num_committed,
            kv_capacity=rows * kv.capacity,
            num_prefixes=0 if self.prefixes is None else self.prefixes.num_kept,
            prefix_entries=0 if self.prefixes is None else self.prefixes.num_entries,
            kv_bytes_resident=self.memory.resident_bytes,
            kv_bytes_reserved=self.memory.bytes_of(self._reserved_rows(running)),
            kv_bytes_budget=self.memory.limit,
        )

    def _pending(self, seq: Sequence) -> int:
        """Tokens of a sequence that the target has not seen."""
        return len(seq.tokens) - (self.target.kv.kv_len(seq.row) if seq.row != NO_ROW else 0)

    def _fits(self, seq: Sequence) -> bool:
        """Whether there is memory for all that a sequence may come to need; alone, there always is (``check_pin``)."""
        running = self.running
        return not running or self.memory.fits(seq, self._reserved_rows(running))

    def _reserved_rows(self, running: Seq[Sequence]) -> list[int]:
        """Rows whose memory nobody else may have: of sequences that run, and of texts that are kept for good."""
        pinned = [] if self.prefixes is None else self.prefixes.pinned_rows
        return [*(row for seq in running if (row := seq.row) != NO_ROW), *pinned]

    def _begin(self, seq: Sequence) -> None:
        """A sequence was admitted."""
        if self.prefixes is not None:
            self.prefixes.begin(seq, self.running)
        else:
            self.memory.reserve(seq)
        self._note_read(seq)

    def _pause(self, seq: Sequence) -> None:
        """A sequence is about to lose its row."""
        seq.pause(self.target.kv.kv_len(seq.row))
        self._leave_row(seq)
        restart(self.drafter, seq)
        if self.lengths is not None:
            self.lengths.restarted(seq)
        self._preemptions += 1

    def _note_read(self, seq: Sequence) -> None:
        """A paused sequence goes on as soon as all but its newest token is in its row."""
        if seq.reads_again and self._pending(seq) == 1:
            seq.reads_again = False

    def _reread(self, chunks: Mapping[int, int]) -> int:
        """Tokens of a step's chunks that were read before a pause."""
        counts = [(self._in_row(row).num_read - self.target.kv.kv_len(row), count) for row, count in chunks.items()]
        return sum(min(count, max(known, 0)) for known, count in counts)

    def _is_early(self, seq: Sequence) -> bool:
        """Whether a sequence would read what another is just reading."""
        return self.prefixes is not None and self.prefixes.is_early(seq, self.running)

    def _move_row(self, source: int, destination: int) -> None:
        """Move a sequence's caches, of the target and of the drafter, to another row."""
        if self.prefixes is not None and self.prefixes.make_way(source, destination):
            return
        self.target.move_row(source, destination)
        self.drafter.move_row(source, destination)
        self.memory.swap(source, destination)

    def _in_row(self, row: int) -> Sequence:
        seq = self.scheduler.rows[row]
        if seq is None:
            raise SpecexportError(f"row {row} is empty.")
        return seq

    def _propose(self, sequences: Seq[Sequence], load: StepLoad | None) -> dict[int, Proposal]:
        """Draft for sequences that get logits in this step; by row."""
        start, read_before = time.perf_counter(), prefill_seconds_of(self.drafter)
        if load is not None and self.lengths is not None:
            self.lengths.begin_round(load)
        rooms = [seq.room_for_drafts for seq in sequences]
        proposals = self.drafter.propose(sequences, rooms) if sequences else []
        read = prefill_seconds_of(self.drafter) - read_before
        self.times.count_draft(time.perf_counter() - start, read, [proposal.num_own for proposal in proposals])
        return {seq.row: proposal for seq, proposal in zip(sequences, proposals, strict=True)}

    def _verify(
        self, ready: Seq[Sequence], proposals: Mapping[int, Proposal], chunks: Mapping[int, int]
    ) -> list[RoundEvent]:
        """One packed step of the target, and what follows from its logits."""
        start = time.perf_counter()
        engine_before = self.target.executor.engine_seconds
        rows = [*(seq.row for seq in ready), *chunks]
        first = min(rows)
        counts = {row: chunks.get(row, 1) for row in sorted(rows)}
        work = [self._work(row, counts.get(row, 0), proposals.get(row)) for row in range(first, max(rows) + 1)]
        # Where all that is read is greedy, a GPU need not send logits: the argmax is taken beside them.
        scored = {row: count for row, count in chunks.items() if self._in_row(row).is_scored}
        needed = scored or any(self._in_row(row).needs_logits for row in proposals)
        want: Want = "logits" if needed else "token_ids"
        sequences, prompts = [self._in_row(row) for row in counts], [self._in_row(row) for row in chunks]
        grammars = [
            (seq.sampler.grammar, proposals[seq.row].tokens)
            for seq in sequences
            if seq.sampler.grammar is not None and seq.row in proposals
        ]
        if grammars:
            self._masks.start(grammars)
        try:
            output = told_step(self.target, self.drafter, sequences, prompts, first, work, want)
        finally:
            if grammars:  # nobody may use a matcher while its masks are made
                self._masks.wait()
        executed = time.perf_counter()
        broken = self._score(scored, output, first)
        verified = []
        for row, count in counts.items():
            if row in proposals:
                verified += [seq for seq in [self._in_row(row)] if seq not in broken]
            else:  # a prompt with more to come
                self.target.kv.commit(row, self.target.kv.kv_len(row) + count)
                self._note_read(self._in_row(row))
        events = self._accept(verified, proposals, output, want, first, scored)
        events += [RoundEvent(seq, [], 0, 0, is_bonus=False) for seq in broken]
        if ready:
            self.padding.record_round([len(event.tokens) for event in events if event.sequence.row not in chunks])
            self.padding.input_tokens += sum(len(row.tokens) for row in work)
            self.padding.input_padding += self.target.step_padding
        self.drafter.commit(verified)
        for seq in [*verified, *broken]:
            if seq.finish_reason is not None:
                self._retire(seq)
        engine = self.target.executor.engine_seconds - engine_before
        self.times.count_step(start, executed, engine, is_round=bool(ready))
        return events

    def _work(self, row: int, count: int, proposal: Proposal | None) -> RowWork:
        """``count`` tokens that the target has not seen, and the draft behind them."""
        if not count:
            return IDLE
        seq, kv_len = self._in_row(row), self.target.kv.kv_len(row)
        known = seq.tokens[kv_len : kv_len + count]
        wanted = count if seq.is_scored else 1
        if proposal is None:
            return RowWork(known, wanted, adapter=seq.adapter)
        drafts = len(proposal.tokens)
        return RowWork(known + proposal.tokens, drafts + wanted, drafts=drafts, adapter=seq.adapter)

    def _score(self, scored: Mapping[int, int], output: StepOutput, first_row: int) -> list[Sequence]:
        """Keep log-probabilities of prompts, ``scored`` tokens of each row; returns the sequences that failed."""
        failed = []
        for row, count in scored.items():
            seq, begin = self._in_row(row), self.target.logit_starts[row - first_row]
            try:
                note_scores(seq, self.target.kv.kv_len(row), output[begin : begin + count])
            except Exception as error:  # whatever it is, it concerns this sequence alone
                seq.end("error", error)
                failed.append(seq)
        return failed

    def _accept(
        self,
        sequences: Seq[Sequence],
        proposals: Mapping[int, Proposal],
        output: StepOutput,
        want: Want,
        first_row: int,
        scored: Mapping[int, int],
    ) -> list[RoundEvent]:
        greedy: list[int] = []
        if any(seq.sampler.is_plain_greedy for seq in sequences):
            # One argmax serves all rows; rows of sampled sequences are so few that skipping them would not pay.
            greedy = (output if want == "token_ids" else argmax_ids(output)).tolist()
        events = []
        for seq in sequences:
            proposal = proposals[seq.row]
            # Rows of a prompt that is scored come first; its last one is that of the newest token.
            begin = self.target.logit_starts[seq.row - first_row] + max(scored.get(seq.row, 1) - 1, 0)
            end = begin + len(proposal.tokens) + 1
            try:
                if proposal.error is not None:
                    raise proposal.error
                if seq.sampler.is_plain_greedy:
                    verdict = accept_argmax(proposal, greedy[begin:end])
                else:
                    verdict = accept_processed(seq, proposal, output[begin:end])
                event = self._commit(seq, proposal, verdict)
                if seq.logprobs is not None:
                    seq.logprobs += logprobs_of(event.tokens, output[begin:end], seq.params.logprobs or 0)
                events.append(event)
            except Exception as error:  # whatever it is, it concerns this sequence alone
                seq.finish_reason = None  # half a commit may have set it
                seq.end("error", error)
                events.append(RoundEvent(seq, [], len(proposal.tokens), 0, is_bonus=False, proposal=proposal))
        return events

    def _commit(self, seq: Sequence, proposal: Proposal, verdict: Verdict) -> RoundEvent:
        tokens = [*proposal.tokens[: verdict.accepted], verdict.next_token]
        taken = seq.commit(tokens)
        accepted = min(verdict.accepted, taken)
        drafted, exited = len(proposal.tokens), proposal.end == "exit"
        seq.stats.record_round(drafted, accepted, taken, shares=proposal.shares(accepted), exited=exited)
        # Everything but the newest token is in the cache; entries of rejected tokens stay uncounted.
        self.target.kv.commit(seq.row, len(seq.tokens) - 1)
        is_bonus = bool(proposal.tokens) and verdict.is_bonus and taken == len(tokens)
        gamma = None if seq.draft_exit is None else seq.draft_exit.gamma
        # A draft that could not end early, a copy for example, tells nothing of one that could.
        if seq.draft_exit is not None and proposal.gamma is not None:
            seq.draft_exit.observe(*proposal.own_tests(verdict.accepted))
        if seq.adaptive and self.lengths is not None:
            self.lengths.observe(seq, proposal, verdict.accepted, rejected=verdict.accepted < drafted)
        return RoundEvent(seq, tokens[:taken], drafted, accepted, is_bonus, proposal, gamma)

    def _retire(self, seq: Sequence) -> None:
        if seq.row != NO_ROW:
            self._leave_row(seq)
        self.scheduler.retire(seq)

    def _leave_row(self, seq: Sequence) -> None:
        """A sequence's row keeps its text, if anybody may go on from it, or is cleared."""
        if self.prefixes is None or not self.prefixes.keep(seq):
            self.target.release_row(seq.row)
            self.drafter.release_row(seq.row)
            self.memory.free(seq.row)
        self.memory.settle()


def _busy(ready: Seq[Sequence]) -> int:
    """Tokens that sequences with one token to read may take in a step."""
    return sum([1 + min(seq.room_for_drafts, seq.max_lookahead) for seq in ready])


def accept_argmax(proposal: Proposal, greedy: Seq[int]) -> Verdict:
    """Accept K draft tokens by the target's K+1 greedy tokens; CheckFailedError if the logits held a NaN."""
    verdict = accept_greedy(proposal.tokens, greedy)
    if verdict.next_token == NO_TOKEN:
        raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
    return verdict


def accept_processed(seq: Sequence, proposal: Proposal, logits: Float32Array) -> Verdict:
    """Acceptance where logits processing depends on the history: each row sees the draft tokens before it.

    ``seq`` is without the round's tokens; ``logits`` are the target's raw ones [K+1, V]. NaN or +inf in them is a
    CheckFailedError, a ban of every token an InvalidRequestError.
    """
    drafted = proposal.tokens
    if seq.sampler.is_greedy:
        targets: list[int] = []
        while len(targets) <= len(drafted) and targets == drafted[: len(targets)]:
            targets.append(seq.sampler.greedy_token(logits[len(targets)], drafted[: len(targets)]))
        return accept_greedy(drafted, targets)
    return RULES[seq.acceptance](
        drafted,
        proposal.distributions,
        lambda j: seq.sampler.distribution(logits[j], drafted[:j]),
        seq.draws,
    )

"""The decoding round: draft, verify, accept, commit. One loop for every way to draft; plain decoding drafts nothing.

A request that is decoding has exactly one token that the target has not seen: the last one committed. A round feeds
it, with the draft tokens after it, and gets the target's distribution after each of them (Chen et al. 2023,
algorithm 2). Each request accepts its own number of tokens (EMS-SD, Ni et al. 2025). Prompts of requests that have
just arrived are fed in chunks, in the same packed step.
"""

import time
from collections.abc import Mapping
from operator import attrgetter

from specexport_runtime.decoding.memory_budget import MemoryBudget
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.prefix_files import PrefixFolder
from specexport_runtime.decoding.rows import Slots
from specexport_runtime.decoding.schedule import Scheduler
from specexport_runtime.decoding.verify import (
    accept,
    find_kept_path,
    fit_branches,
    make_row_work,
    make_target_rows,
    note_paths,
    run_target_step,
    score_prompts,
)
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.executors.logit_rows import LogitRows
from specexport_runtime.lookahead.controller import Controller
from specexport_runtime.lookahead.round import step_load
from specexport_runtime.packing.batch import IDLE, ModelRunner
from specexport_runtime.requests.records import Proposal, StepLoad
from specexport_runtime.requests.request import Request, RoundEvent
from specexport_runtime.requests.stats import PaddingStats, PhaseTimes
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.grammar import MaskAhead
from specexport_runtime.sampling.logprobs import compute_logprobs
from specexport_runtime.telemetry.observers import EngineLoad, Observers, RoundRecord
from specexport_runtime.telemetry.round_log import RoundTracer

__all__ = ["Decoder", "RoundEvent"]
_ROW = attrgetter("row")


class Decoder:
    """Decodes many requests at once over one target and one drafter."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        *,
        max_num_seqs: int | None = None,  # None takes all cache rows of the target
        max_num_batched_tokens: int = 512,  # of one step; cut to what the target's engine takes
        lengths: Controller | None = None,  # chooses how far adaptive requests draft
        tracer: RoundTracer | None = None,
        reuses_prefixes: bool = False,
        pace: Pace | None = None,
        memory: MemoryBudget | None = None,  # None: only the number of cache rows is bounded
        folder: PrefixFolder | None = None,  # where the texts are that rows keep, too
    ) -> None:
        self.target, self.drafter, self.lengths = target, drafter, lengths
        self.slots = Slots(
            target, drafter, max_num_seqs=max_num_seqs, memory=memory, reuses_prefixes=reuses_prefixes, folder=folder
        )
        self.scheduler = Scheduler(self.slots, max_num_batched_tokens=max_num_batched_tokens, pace=pace)
        self.tracer, self.observers = tracer or RoundTracer(), Observers()
        self.times, self.padding = PhaseTimes(), PaddingStats()
        self._pace = pace if pace is not None and pace.is_on else None
        self._masks = MaskAhead()

    def add(self, request: Request) -> None:
        """Queue a request; it starts when a cache row is free."""
        self.scheduler.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    @property
    def running(self) -> list[Request]:
        """Requests that hold a cache row."""
        return self.slots.running

    @property
    def load(self) -> EngineLoad:
        """How busy it is; may be asked from any thread."""
        return self.slots.load(len(self.scheduler.waiting))

    def check(self) -> None:
        """Assert the invariants between rounds; SpecexportError if a row number or a cache length is wrong."""
        self.slots.check()

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """Drop one request, waiting or running, for ``error`` or its owner; one that has finished stays as it is."""
        if request.finish_reason is None:
            request.end("cancelled" if error is None else "error", error)
            self.scheduler.retire(request)

    def fail(self, error: Exception) -> list[Request]:
        """End all running requests with ``error``, forget their rows and return them; waiting ones stay queued."""
        failed = self.running
        for req in failed:
            req.end("error", error)
        for req in failed:
            self.slots.leave(req)
        self.slots.clear()
        return failed

    def step(self) -> list[RoundEvent]:
        """Admit what fits, then run one packed step: a round for all that decode, with prompt chunks of the others.

        Each request that got tokens or failed has one event. An exception inside one request ends that request alone.
        An exception of an engine leaves this method; call :meth:`fail` then.
        """
        start = time.perf_counter()
        engines_before = self.target.executor.engine_seconds + self.drafter.engine_seconds
        ready, chunks = self.scheduler.plan()
        self.times.schedule += time.perf_counter() - start
        failed = [RoundEvent(req, [], 0, 0, is_bonus=False) for req in self.scheduler.failed]
        if not ready and not chunks:
            return failed
        # The step that ends a prompt drafts too, however the prompt was cut, or that would change a seed's draws.
        drafting = sorted([*ready, *self.slots.ending(chunks)], key=_ROW) if chunks else ready
        load, prompt_tokens = None, sum(chunks.values())
        reread = self.slots.num_reread(chunks) if chunks else 0
        preemptions, self.slots.preemptions = self.slots.preemptions, 0
        counts = any(req.adaptive or req.trace is not None for req in drafting)
        if counts or self.observers:
            soon = min(len(self.slots.placed) + len(self.scheduler.waiting), self.slots.max_num_seqs)
            load = step_load(drafting, [self.slots.at(row) for row in chunks], prompt_tokens, soon)
        # Being watched must not change how far a request drafts: they see only rounds that count for lengths.
        proposals = self._propose(drafting, load if counts else None)
        drafted = time.perf_counter()
        events = self._verify(ready, drafting, proposals, chunks)
        if counts and self.lengths is not None:
            tokens = sum([len(proposal.nodes) for proposal in proposals.values()])
            self.lengths.record_verify_seconds(tokens, time.perf_counter() - drafted)
        if load is not None:
            seconds = time.perf_counter() - start
            plain_seconds = self.tracer.record(events, load, seconds)
            record = RoundRecord(events, prompt_tokens, seconds, plain_seconds, reread, preemptions)
            self.observers.notify_round(record)
        if self._pace is not None:
            self._pace.record_step(time.perf_counter() - start, prompt_tokens, len(ready))
        if ready:
            self.times.total += time.perf_counter() - start
            self.times.engine += self.target.executor.engine_seconds + self.drafter.engine_seconds - engines_before
            self.times.rounds += 1
        return events + failed

    def _propose(self, requests: list[Request], load: StepLoad | None) -> dict[int, Proposal]:
        """Draft for requests that get logits in this step; by row."""
        start, read_before = time.perf_counter(), self.drafter.prefill_seconds
        if load is not None and self.lengths is not None:
            self.lengths.begin_round(load)
        rooms = [req.room_for_drafts for req in requests]
        proposals = self.drafter.propose(requests, rooms) if requests else []
        for i, (req, proposal) in enumerate(zip(requests, proposals, strict=True)):
            if proposal.branches:
                proposals[i] = fit_branches(self.target, req, proposal, self.slots.memory.max_entries(req.row))
        read = self.drafter.prefill_seconds - read_before
        self.times.count_draft(time.perf_counter() - start, read, [proposal.num_own for proposal in proposals])
        return {req.row: proposal for req, proposal in zip(requests, proposals, strict=True)}

    def _verify(
        self, ready: list[Request], drafting: list[Request], proposals: dict[int, Proposal], chunks: dict[int, int]
    ) -> list[RoundEvent]:
        """One packed step of the target, and what follows from its logits; prompts that end in it draft too."""
        start = time.perf_counter()
        engine_before = self.target.executor.engine_seconds
        prompts = [self.slots.at(row) for row in chunks]
        requests = sorted([*ready, *prompts], key=_ROW) if prompts else ready
        first = requests[0].row
        work = [IDLE] * (requests[-1].row - first + 1)
        for req in requests:
            work[req.row - first] = make_row_work(self.target, req, chunks.get(req.row, 1), proposals.get(req.row))
        # Where each tree's row begins in the step, and in its text.
        trees = {
            req.row: (sum([len(row.tokens) for row in work[: req.row - first]]), self.target.kv.kv_len(req.row))
            for req in drafting
            if proposals[req.row].branches
        }
        scored = {req.row: chunks[req.row] for req in prompts if req.is_scored}
        grammars = [(rule, proposals[req.row].tokens) for req in drafting if (rule := req.sampler.grammar) is not None]
        if grammars:
            self._masks.start(grammars)
        try:
            rows = run_target_step(self.target, self.drafter, requests, prompts, trees.keys(), first, work)
        finally:
            if grammars:  # a matcher may not be used while its masks are made
                self._masks.wait()
        executed = time.perf_counter()
        broken = score_prompts(self.target, prompts, scored, rows, first) if scored else []
        for row, count in chunks.items():
            if row not in proposals:  # a prompt with more to come
                self.slots.advance(row, count)
        verified = [req for req in drafting if req not in broken] if broken else drafting
        events = self._accept(verified, proposals, rows, first, scored)
        tested = [event for event in events if event.tokens and event.request.row in trees]
        note_paths(self.target, self.drafter, [find_kept_path(event, *trees[event.request.row]) for event in tested])
        events += [RoundEvent(req, [], 0, 0, is_bonus=False) for req in broken]
        if ready:
            self.padding.record_round([len(event.tokens) for event in events if event.request.row not in chunks])
            self.padding.input_tokens += sum(len(row.tokens) for row in work)
            self.padding.input_padding += self.target.step_padding
        self.drafter.commit(verified)
        for req in [*verified, *broken]:
            if req.finish_reason is not None:
                self.slots.leave(req)
        engine = self.target.executor.engine_seconds - engine_before
        self.times.count_step(start, executed, engine, is_round=bool(ready))
        return events

    def _accept(
        self,
        requests: list[Request],
        proposals: Mapping[int, Proposal],
        rows: LogitRows,
        first_row: int,
        scored: Mapping[int, int],
    ) -> list[RoundEvent]:
        # Rows of a prompt that is scored come first; its last one is that of the newest token.
        starts = {
            req.row: self.target.logit_starts[req.row - first_row] + scored.get(req.row, 1) - 1 for req in requests
        }
        events = []
        for req, target in zip(requests, make_target_rows(requests, proposals, rows, starts), strict=True):
            proposal = proposals[req.row]
            try:
                if proposal.error is not None:
                    raise proposal.error
                event = self._commit(req, proposal, accept(req, proposal, target))
                if req.logprobs is not None:
                    req.logprobs += compute_logprobs(event.tokens, target.logits(event.path), req.params.logprobs or 0)
                events.append(event)
            except Exception as error:  # whatever it is, it concerns this request alone
                req.finish_reason = None  # half a commit may have set it
                req.end("error", error)
                events.append(RoundEvent(req, [], len(proposal.nodes), 0, is_bonus=False, proposal=proposal))
        return events

    def _commit(self, req: Request, proposal: Proposal, verdict: Verdict) -> RoundEvent:
        nodes, before = proposal.nodes, len(req.tokens)
        tokens = [*[nodes[place] for place in verdict.places], verdict.next_token]
        taken = req.commit(tokens)
        accepted = min(verdict.accepted, taken)
        drafted, exited = len(nodes), proposal.end == "exit"
        event = RoundEvent(req, tokens[:taken], drafted, accepted, False, proposal, path=verdict.path)
        shares = proposal.shares(accepted, event.on_chain)
        req.stats.record_round(drafted, accepted, taken, shares=shares, exited=exited)
        req.drafters += event.drafters
        # Everything but the newest token is in the cache; entries of rejected tokens stay uncounted.
        if verdict.path is None:
            self.target.kv.commit(req.row, len(req.tokens) - 1)
        else:
            start = time.perf_counter()
            self.times.count_move(self.target.keep_path(req.row, before, verdict.path[: taken - 1]), start)
        req.num_agreed = min(before + event.on_chain, len(req.tokens) - 1)
        on_chain = verdict.on_chain(len(proposal.tokens))
        is_bonus = bool(nodes) and verdict.is_bonus and taken == len(tokens)
        gamma = None if req.draft_exit is None else req.draft_exit.gamma
        # A draft that could not end early, a copy for example, tells nothing of one that could.
        if req.draft_exit is not None and proposal.gamma is not None:
            req.draft_exit.observe(*proposal.count_own_tests(on_chain))
        if req.adaptive and self.lengths is not None:
            self.lengths.observe(req, proposal, before, on_chain, rejected=on_chain < len(proposal.tokens))
        return event._replace(is_bonus=is_bonus, gamma=gamma)

"""Decoding with acceptance forced to a chosen rate, while the draft model is still paid for."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.base import Begun, Drafter, DrafterTraits, Proposal
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import DraftPlan, Request
from specexport_runtime.sampling.params import SamplingParams


class ForcedDrafter(Drafter):
    """Lets another drafter work, then puts the target's own next tokens in place of what it said.

    Each token is the right one with probability ``rate``, and a wrong one otherwise, drawn for each place of a text
    separately: a seed gives the same draws whatever the batch. ``continuations`` are what the target says after each
    prompt, by sequence index: from a run without drafts. Ids below ``vocab_size`` may be drafted.
    """

    def __init__(
        self, inner: Drafter, continuations: Mapping[int, Sequence[int]], rate: float, vocab_size: int, seed: int = 0
    ) -> None:
        self.inner, self.rate, self.vocab_size = inner, rate, vocab_size
        self._continuations = continuations
        longest = max((len(tokens) for tokens in continuations.values()), default=0)
        self._right = {
            index: (np.random.default_rng([seed, index]).random(longest) < rate).tolist() for index in continuations
        }
        # sequences whose text left its continuation (another kernel, another rounding): from there on the inner
        # drafter's tokens stand
        self.departed: set[int] = set()

    @property
    def traits(self) -> DrafterTraits:
        """Those of the inner drafter."""
        return self.inner.traits

    @property
    def engine_seconds(self) -> float:
        """Seconds inside the inner drafter's engine."""
        return self.inner.engine_seconds

    def propose(
        self, requests: Sequence[Request], lookaheads: Sequence[int], begun: Sequence[Begun] | None = None
    ) -> list[Proposal]:
        """See ``Drafter.propose``."""
        proposals = self.inner.propose(requests, lookaheads, begun)
        return [self._force(seq, proposal) for seq, proposal in zip(requests, proposals, strict=True)]

    def _force(self, seq: Request, proposal: Proposal) -> Proposal:
        text, place = self._continuations[seq.index], seq.num_generated
        if seq.index in self.departed or seq.output != list(text[:place]):
            self.departed.add(seq.index)
            return proposal
        tokens = list(proposal.tokens)
        right = self._right[seq.index]
        for j in range(min(len(tokens), len(text) - place)):
            token = text[place + j]
            tokens[j] = token if right[place + j] else (token + 1) % self.vocab_size
        return Proposal(tokens)

    def commit(self, requests: Sequence[Request]) -> None:
        """See ``Drafter.commit``."""
        self.inner.commit(requests)

    def move_row(self, source: int, destination: int) -> None:
        """See ``Drafter.move_row``."""
        self.inner.move_row(source, destination)

    def release_row(self, row: int) -> None:
        """See ``Drafter.release_row``."""
        self.inner.release_row(row)


class Decoded(NamedTuple):
    """What one run did, from the moment every sequence had its first token until the first one was finished."""

    outputs: list[list[int]]  # whole continuations, by sequence
    seconds: float  # wall time
    tokens: int  # committed in that time, all sequences together
    rounds: int  # in that time
    host_seconds: float  # of ``seconds``, outside the engines
    tested: int  # draft tokens that were decided on: all accepted ones, and the first wrong one of a round
    accepted: int  # of these, accepted
    departed: int  # sequences that left their continuation

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of decided draft tokens that were accepted; None without any."""
        return self.accepted / self.tested if self.tested else None

    @property
    def host_us(self) -> float:
        """Microseconds of a round outside the engines."""
        return 1e6 * self.host_seconds / self.rounds if self.rounds else 0.0


def decode(
    target: Executor,  # with a row for each prompt
    prompts: Sequence[Sequence[int]],  # token ids
    num_tokens: int,  # to generate for each prompt
    *,
    draft: Executor | None = None,
    lookahead: int = 0,  # K; 0 decodes plainly
    rate: float | None = 1.0,  # probability that a draft token is right; None lets the draft say what it wants to
    continuations: Sequence[
        Sequence[int]
    ] = (),  # what plain decoding generated for each prompt; needed with a draft and a rate
    sampling: Mapping[str, Any] | None = None,  # sampling parameters, with a seed for each prompt; None is greedy
) -> Decoded:
    """Decode a batch; with ``draft`` and ``lookahead``, speculatively at a forced acceptance rate."""
    drafters: dict[str, Drafter] = {}
    forced: ForcedDrafter | None = None
    if draft is not None and lookahead:
        inner = ModelDrafter(ModelRunner(draft), vocab_size=draft.vocab_size, max_backlog=32)
        drafters["draft-model"] = inner
        if rate is not None:
            forced = ForcedDrafter(inner, dict(enumerate(continuations)), rate, target.vocab_size)
            drafters["draft-model"] = forced
    plan = DraftPlan((DraftStage("draft-model", lookahead),) if drafters else ())
    params = SamplingParams(**{"temperature": 0.0, **(sampling or {})}, max_tokens=num_tokens, ignore_eos=True)
    sequences = [
        Request(i, prompt, params, vocab_size=target.vocab_size, max_model_len=10**9, seed=i, plan=plan)
        for i, prompt in enumerate(prompts)
    ]
    decoder = Decoder(ModelRunner(target), ChainDrafter(drafters), max_num_seqs=len(prompts))
    for seq in sequences:
        decoder.add(seq)
    return _run(decoder, sequences, forced)


def _run(decoder: Decoder, sequences: Sequence[Request], forced: ForcedDrafter | None) -> Decoded:
    while decoder.has_work and not all(seq.num_generated for seq in sequences):
        decoder.step()
    begin = sum(seq.num_generated for seq in sequences)
    # Rounds before the first sequence finishes: the batch is full in all of them.
    rounds, tested, accepted, host, tokens, seconds = 0, 0, 0, 0.0, 0, 0.0
    start = time.perf_counter()
    is_full = not any(seq.finish_reason for seq in sequences)
    while decoder.has_work:
        total, engine = decoder.times.total, decoder.times.engine
        events = decoder.step()
        if not is_full:
            continue
        rounds += 1
        host += (decoder.times.total - total) - (decoder.times.engine - engine)
        seconds = time.perf_counter() - start
        tokens = sum(seq.num_generated for seq in sequences) - begin
        is_full = not any(seq.finish_reason for seq in sequences)
        for event in events if is_full else ():  # a text that ends cuts its last draft
            accepted += event.accepted
            tested += event.accepted + (event.drafted > event.accepted)
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    departed = len(forced.departed) if forced is not None else 0
    return Decoded([seq.output for seq in sequences], seconds, tokens, rounds, host, tested, accepted, departed)

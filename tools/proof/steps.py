"""Executors without an engine around them: single steps, timed or compared with another's, and whole decodes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specexport.compare import OutputCase, Reference, compare_case
from specexport.rounding import LogitTolerance
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.executors.base import Executor, Float32Array, Want
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork, step_shape
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.requests.request import DraftPlan, Request
from specexport_runtime.sampling.params import SamplingParams

Texts = Sequence[Sequence[int]]
LOGIT_TOLERANCE = LogitTolerance(2e-2, 2e-2)
"""Of float16, for logits of magnitude up to 1, in proportion beyond."""


def random_tokens(vocab: int, rows: int, count: int, seed: int = 3) -> list[list[int]]:
    """Token ids, [rows][count]."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, vocab, (rows, count)).tolist()
    return drawn


def fill(runner: ModelRunner, texts: Texts) -> None:
    """Feed and commit a text to each row, from row 0 on."""
    for row, tokens in enumerate(texts):
        runner.prefill(row, list(tokens))


def time_step(runner: ModelRunner, rows: int, new_tokens: int, *, repeats: int, seconds: float) -> float:
    """Median milliseconds of a step of ``new_tokens`` tokens on each of the first ``rows`` rows, for token ids alone.

    The entries it writes are not committed, so each repetition is the same step; the rows hold their past already.
    After six steps, one of which may record a graph, it is repeated up to ``repeats`` times: until ``seconds`` are
    over, but three times at least.
    """
    executor = runner.executor
    work = [RowWork(tokens, new_tokens) for tokens in random_tokens(executor.vocab_size, rows, new_tokens)]
    executor.capture([step_shape(0, work)])
    begin = time.perf_counter()
    for _ in range(6):
        runner.step(0, work, "token_ids")
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        runner.step(0, work, "token_ids")
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


# (tokens of each row, tokens of each that are kept): a prefill, then ragged verify steps of four rows, one of them idle
Script = Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
SCRIPT: Script = (
    ("prefill 17, 5, 40, 1", (17, 5, 40, 1), (17, 5, 40, 1)),
    ("verify 5, 1, 3, 5", (5, 1, 3, 5), (2, 1, 3, 5)),
    ("verify 1, 5, 0, 4", (1, 5, 0, 4), (1, 3, 0, 1)),
    ("verify 5, 5, 5, 5", (5, 5, 5, 5), (5, 1, 4, 2)),
    ("decode 1, 1, 1, 1", (1, 1, 1, 1), (1, 1, 1, 1)),
)


def compare_steps(reference: Executor, other: Executor, script: Script = SCRIPT) -> list[OutputCase]:
    """Run the same script of prefill and ragged verify steps on both, and compare every logit."""
    runners = [ModelRunner(reference), ModelRunner(other)]
    random = np.random.default_rng(11)
    found = []
    for what, counts, kept in script:
        # Few rows of logits a prompt, as engines with profiles have few; every row of a verify step.
        wanted = [min(count, 5) for count in counts]
        tokens = [random.integers(0, reference.vocab_size, count).tolist() for count in counts]
        work = [RowWork(ids, rows) if ids else IDLE for ids, rows in zip(tokens, wanted, strict=True)]
        logits = [_step(runner, work, kept, "logits").astype(np.float32) for runner in runners]
        wanted_rows, rows = ([((0, at), row) for at, row in enumerate(each)] for each in logits)
        found.append(compare_case(what, rows, Reference.of(wanted_rows), LOGIT_TOLERANCE))
    return found


def _step(runner: ModelRunner, work: Sequence[RowWork], kept: Sequence[int], want: Want) -> Float32Array:
    output = np.array(runner.step(0, work, want))
    for row, count in enumerate(kept):
        runner.kv.commit(row, runner.kv.kv_len(row) + count)
    return output


class Decoded(NamedTuple):
    """What one run did, from the moment every sequence had its first token until the first one was finished."""

    outputs: list[list[int]]  # whole continuations, by sequence
    seconds: float  # wall time
    rounds: int  # in that time
    host_seconds: float  # of ``seconds``, outside the engines
    tested: int  # draft tokens that were decided on: all accepted ones, and the first wrong one of a round
    accepted: int  # of these, accepted

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
    prompts: Texts,  # token ids
    num_tokens: int,  # to generate for each prompt
    *,
    draft: Executor | None = None,
    lookahead: int = 0,  # K; 0 decodes plainly
    sampling: Mapping[str, Any] | None = None,  # sampling parameters, with a seed for each prompt; None is greedy
) -> Decoded:
    """Decode a batch without an engine around it; with ``draft`` and ``lookahead``, speculatively."""
    drafters: dict[str, Drafter] = {}
    if draft is not None and lookahead:
        drafters["draft-model"] = ModelDrafter(ModelRunner(draft), vocab_size=draft.vocab_size, max_backlog=32)
    plan = DraftPlan((DraftStage("draft-model", lookahead),) if drafters else ())
    params = SamplingParams(**{"temperature": 0.0, **(sampling or {})}, max_tokens=num_tokens, ignore_eos=True)
    sequences = [
        Request(i, prompt, params, vocab_size=target.vocab_size, max_model_len=10**9, plan=plan, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    decoder = Decoder(ModelRunner(target), ChainDrafter(drafters), max_num_seqs=len(prompts))
    for seq in sequences:
        decoder.add(seq)
    return _run(decoder, sequences)


def _run(decoder: Decoder, sequences: Sequence[Request]) -> Decoded:
    while decoder.has_work and not all(seq.num_generated for seq in sequences):
        decoder.step()
    # Rounds before the first sequence finishes: the batch is full in all of them.
    rounds, tested, accepted, host, seconds = 0, 0, 0, 0.0, 0.0
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
        is_full = not any(seq.finish_reason for seq in sequences)
        for event in events if is_full else ():  # a text that ends cuts its last draft
            accepted += event.accepted
            tested += event.accepted + (event.drafted > event.accepted)
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    return Decoded([seq.output for seq in sequences], seconds, rounds, host, tested, accepted)

"""A step of the target, and what its logits say: of drafts, and of prompts that are scored."""

from collections.abc import Mapping, Sequence

from specexport_runtime.drafters.base import Drafter, as_feature_drafter, as_similarity
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.base import NO_TOKEN, Float32Array, StepOutput, Want, as_featured, as_gated
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.records import Proposal
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.accept import Verdict, accept_greedy
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.logprobs import logprobs_of


def row_work(target: ModelRunner, seq: Request, count: int, proposal: Proposal | None) -> RowWork:
    """``count`` tokens that the target has not seen, and the draft behind them."""
    kv_len = target.kv.kv_len(seq.row)
    known = seq.tokens[kv_len : kv_len + count]
    wanted = count if seq.is_scored else 1
    if proposal is None:
        return RowWork(known, wanted, adapter=seq.adapter)
    drafts = len(proposal.tokens)
    return RowWork(known + proposal.tokens, drafts + wanted, drafts=drafts, adapter=seq.adapter)


def told_step(
    target: ModelRunner,
    drafter: Drafter,
    sequences: Sequence[Request],  # all that have tokens in the step
    prompts: Sequence[Request],  # of these, all with a chunk of their prompt
    first_row: int,
    work: Sequence[RowWork],
    want: Want,
) -> StepOutput:
    """A step of the target, as ``ModelRunner.step`` has it; the drafter is told what it wants to know of it.

    Similarities of prompts and features of all that is read cost a little, so both are off in all steps that bring
    nothing that is wanted, and off again however the step ends.
    """
    asks, reads = as_similarity(drafter) if prompts else None, as_feature_drafter(drafter)
    measured = [] if asks is None else [seq for seq in prompts if asks.wants_similarity(seq)]
    gated = as_gated(target.executor) if measured else None
    featured = as_featured(target.executor) if reads is not None else None
    read = [] if featured is None or reads is None else [seq for seq in sequences if reads.wants_features(seq)]
    if gated is None and not read:
        return target.step(first_row, work, want)
    try:
        if gated is not None:
            gated.measure_similarity(True)
        if featured is not None:
            featured.want_features(bool(read))
        output = target.step(first_row, work, want)
        similarity = None if gated is None else gated.similarity
    finally:
        if gated is not None:
            gated.measure_similarity(False)
        if featured is not None:
            featured.want_features(False)
    starts = [0]
    for row in work:
        starts.append(starts[-1] + len(row.tokens))
    if asks is not None and similarity is not None:
        for seq in measured:
            begin = starts[seq.row - first_row]
            # Of a prompt that ends here and has a draft behind it, the draft tokens are no part.
            end = begin + min(len(work[seq.row - first_row].tokens), len(seq.tokens) - target.kv.kv_len(seq.row))
            asks.note_similarity(seq, similarity[:, begin:end])
    if reads is not None and featured is not None and read:
        features = featured.features
        for seq in read:
            begin, end = starts[seq.row - first_row : seq.row - first_row + 2]
            reads.note_features(seq, target.kv.kv_len(seq.row), features[begin:end])
    return output


def score_prompts(
    target: ModelRunner, prompts: Sequence[Request], scored: Mapping[int, int], output: StepOutput, first_row: int
) -> list[Request]:
    """Keep log-probabilities of prompts, ``scored`` tokens of each row; returns the sequences that failed."""
    failed = []
    for seq in prompts:
        if seq.row in scored:
            begin = target.logit_starts[seq.row - first_row]
            try:
                note_scores(seq, target.kv.kv_len(seq.row), output[begin : begin + scored[seq.row]])
            except Exception as error:  # whatever it is, it concerns this sequence alone
                seq.end("error", error)
                failed.append(seq)
    return failed


def note_scores(seq: Request, start: int, logits: Float32Array) -> None:
    """Keep the log-probabilities of the prompt's tokens behind those of a chunk, from its logits [n, V].

    ``start`` is the number of tokens before the chunk. CheckFailedError: the logits hold NaN or +inf.
    """
    if seq.prompt_logprobs is None:
        return
    following = seq.tokens[start + 1 : min(start + 1 + len(logits), seq.num_prompt_tokens)]
    seq.prompt_logprobs += logprobs_of(following, logits[: len(following)], seq.params.prompt_logprobs or 0)


def accept_argmax(proposal: Proposal, greedy: Sequence[int]) -> Verdict:
    """Accept K draft tokens by the target's K+1 greedy tokens; CheckFailedError if the logits held a NaN."""
    verdict = accept_greedy(proposal.tokens, greedy)
    if verdict.next_token == NO_TOKEN:
        raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
    return verdict


def accept_processed(seq: Request, proposal: Proposal, logits: Float32Array) -> Verdict:
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

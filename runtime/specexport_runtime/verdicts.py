"""What the target's output of a step says about one sequence's draft."""

from collections.abc import Sequence as Seq

from specexport_runtime.accept import Verdict, accept_greedy, accept_sampled
from specexport_runtime.drafters.base import Proposal
from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.base import NO_TOKEN, Float32Array
from specexport_runtime.sequence import Sequence


def accept_argmax(proposal: Proposal, greedy: Seq[int]) -> Verdict:
    """Acceptance where nothing but the argmax of the raw logits is wanted.

    Args:
        proposal: K draft tokens.
        greedy: the target's greedy tokens at their K+1 positions.

    Raises:
        CheckFailedError: the logits held a NaN.
    """
    verdict = accept_greedy(proposal.tokens, greedy)
    if verdict.next_token == NO_TOKEN:
        raise CheckFailedError("the target's logits contain NaN.", "run `specexport verify` on this bundle.")
    return verdict


def accept_processed(seq: Sequence, proposal: Proposal, logits: Float32Array) -> Verdict:
    """Acceptance where logits processing depends on the history: each row sees the draft tokens before it.

    Args:
        seq: the sequence, before the round's tokens.
        proposal: K draft tokens.
        logits: [K+1, V] raw logits of the target.

    Raises:
        CheckFailedError: the logits hold NaN or +inf.
        InvalidRequestError: every token is banned.
    """
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

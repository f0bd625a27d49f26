"""Drawing outcomes of speculative decoding on recorded distributions: drafting, testing, resampling, no engine."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specexport.verify.logit_tree import Conditional, Path
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.distribution import Distribution, one_hot, sample_token
from specexport_runtime.sampling.rng import Draws, RandomStream

AcceptFunction = Callable[
    [Seq[int], Seq[Distribution] | None, Callable[[int], Distribution], Callable[[int], Draws]], Verdict
]
"""The form of :func:`specexport_runtime.sampling.accept.accept_sampled`, the rule that is tested."""

_UNSEEN = one_hot(0)


def accept_everything(
    drafted: Seq[int],
    draft_distributions: Seq[Distribution] | None,  # noqa: ARG001  # the signature of accept_sampled
    target_distribution: Callable[[int], Distribution],
    draws: Callable[[int], Draws],
) -> Verdict:
    """A wrong acceptance rule: the control that shows what the test can see."""
    last = len(drafted)
    return Verdict(last, sample_token(target_distribution(last), draws(last).resample), is_bonus=True)


def draw_outcome(
    target: Conditional,
    draft: Conditional | None,
    stream: RandomStream,
    accept: AcceptFunction,
    *,
    depth: int,
    lookahead: int,
) -> Path:
    """The first ``depth`` tokens of a speculative decoding, round by round as the decoder does it.

    Args:
        target: the target's distributions.
        draft: the draft's; None drafts the target's likeliest token and says so with a one-hot distribution.
        stream: random numbers by position.
        accept: the acceptance rule.
        depth: tokens wanted.
        lookahead: most draft tokens a round.
    """
    tokens: Path = ()
    while len(tokens) < depth:
        tokens = _draw_round(tokens, target, draft, stream, accept, lookahead, depth)
    return tokens[:depth]


def _draw_round(
    known: Path,
    target: Conditional,
    draft: Conditional | None,
    stream: RandomStream,
    accept: AcceptFunction,
    lookahead: int,
    depth: int,
) -> Path:
    path, distributions = known, []
    count = min(lookahead, depth - len(known))
    for _ in range(count):
        if draft is None:
            likeliest = target(path)
            index = int(likeliest.probs.argmax())
            token = index if likeliest.token_ids is None else int(likeliest.token_ids[index])
        else:
            distributions.append(draft(path))
            token = sample_token(distributions[-1], stream.draws(len(path)).draft)
        path = (*path, token)
    verdict = accept(
        path[len(known) :],
        None if draft is None else distributions,
        # A token beyond the outcome needs no distribution.
        lambda j: target(path[: len(known) + j]) if len(known) + j < depth else _UNSEEN,
        lambda j: stream.draws(len(known) + j),
    )
    return (*path[: len(known) + verdict.accepted], verdict.next_token)

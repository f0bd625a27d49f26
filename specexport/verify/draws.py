"""Drawing outcomes of speculative decoding on recorded distributions: drafting, testing, resampling, no engine."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specexport.verify.logit_tree import Conditional, Path
from specexport_runtime.sampling.accept import Verdict
from specexport_runtime.sampling.distribution import Distribution, one_hot, sample_token
from specexport_runtime.sampling.rng import Draws, RoundDraws

AcceptFunction = Callable[
    [Seq[int], Seq[Distribution] | None, Callable[[int], Distribution], Callable[[int], Draws]], Verdict
]
"""The form of the rules in ``specexport_runtime.sampling.block.RULES``."""

_UNSEEN = one_hot(0)


def accept_everything(
    drafted: Seq[int],
    draft_distributions: Seq[Distribution] | None,  # noqa: ARG001  # the signature of a rule
    target_distribution: Callable[[int], Distribution],
    draws: Callable[[int], Draws],
) -> Verdict:
    """A wrong acceptance rule: the control that shows what the test can see."""
    last = len(drafted)
    return Verdict(last, sample_token(target_distribution(last), draws(last).resample), is_bonus=True)


def draw_outcome(
    target: Conditional,
    draft: Conditional | None,
    draws: RoundDraws,  # random numbers by place in a round
    accept: AcceptFunction,
    *,
    depth: int,
    lookahead: int,  # most draft tokens a round
) -> Path:
    """The first ``depth`` tokens of a speculative decoding, round by round as the decoder does it.

    A ``draft`` of None drafts the target's likeliest token and stands for a one-hot distribution.
    """
    tokens: Path = ()
    while len(tokens) < depth:
        tokens = _draw_round(tokens, target, draft, draws, accept, lookahead, depth)
    return tokens[:depth]


def _draw_round(
    known: Path,
    target: Conditional,
    draft: Conditional | None,
    draws: RoundDraws,
    accept: AcceptFunction,
    lookahead: int,
    depth: int,
) -> Path:
    path, distributions = known, []
    count = min(lookahead, depth - len(known))
    for place in range(count):
        if draft is None:
            likeliest = target(path)
            index = int(likeliest.probs.argmax())
            token = index if likeliest.token_ids is None else int(likeliest.token_ids[index])
        else:
            distributions.append(draft(path))
            token = sample_token(distributions[-1], draws(place).draft)
        path = (*path, token)
    verdict = accept(
        path[len(known) :],
        None if draft is None else distributions,
        # A token beyond the outcome needs no distribution.
        lambda j: target(path[: len(known) + j]) if len(known) + j < depth else _UNSEEN,
        draws,
    )
    draws.end_round(verdict.accepted + 1)
    return (*path[: len(known) + verdict.accepted], verdict.next_token)

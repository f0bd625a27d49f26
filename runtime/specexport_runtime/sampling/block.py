"""Acceptance of a draft as a block: as exact as one token at a time, and never fewer tokens in the mean.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2 and theorems 1 and 2. A likely token
after an unlikely one can save both: a test that fails does not end the tests, the *last* that passes counts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.sampling.accept import Verdict, accept_sampled, draft_probability, normalised, residual
from specexport_runtime.sampling.distribution import Distribution, sample_token
from specexport_runtime.sampling.rng import Draws


class Chances(NamedTuple):
    """How likely the first tokens of a draft stay, of 0, 1, 2 … of them, up to where no more matters.

    It is 0 in front of a token that was not drawn and is what the target goes on with: the text does not end there.
    """

    targets: list[Distribution]  # that were looked at
    found: list[float]


def accept_block(
    drafted: Sequence[
        int
    ],  # K tokens; K may depend on the tokens that are kept in it, and on nothing that was left out
    draft_distributions: Sequence[Distribution | None] | None,
    # As for ``accept_sampled``, but called after tokens that are not kept in the end too; never after one that the
    # target cannot give.
    target_distribution: Callable[[int], Distribution],
    # The uniforms of new position j. Tokens are kept or not by what comes after them too, so that no later round may
    # look at any of these again (``RoundDraws``).
    draws: Callable[[int], Draws],
    chances: Chances | None = None,  # of these arguments, where they are known
) -> Verdict:
    """Accept draft tokens up to the last whose test passes, and after them draw from max(0, r p - q).

    r is the chance that the tokens so far stay, given what they are: r = 1 before the first, and min(1, r p(x)/q(x))
    after token x, however many follow: how often a place is reached has no bias by a draft's length. After a token
    that was not drawn r stays as it is, and the draft ends in front of it, if it is not what is drawn from p. Where
    nothing was drawn (copies) the rule is ``accept_sampled``. CheckFailedError: a draft token has probability 0.
    """
    if draft_distributions is None or all(draft is None for draft in draft_distributions):
        return accept_sampled(drafted, draft_distributions, target_distribution, draws)
    targets, found = chances or find_chances(drafted, draft_distributions, target_distribution, draws)
    last = len(drafted)
    for kept, chance in tested_places(found, draws):
        if kept == len(targets):
            targets.append(target_distribution(kept))
        draft = None if kept == last else draft_distributions[kept]
        if draft is None:
            token = sample_token(targets[kept], draws(kept).resample)
            if kept < last and token == drafted[kept]:
                continue
            return Verdict(kept, token, is_bonus=kept == last)
        masses = residual(targets[kept], draft, chance)
        mass = float(masses.sum())
        # With a chance of 1 it passes whatever was drawn: at the latest in front of all tokens.
        if chance == 1.0 or draws(kept - 1).accept * (mass + 1.0 - chance) < mass:
            break
    return Verdict(kept, sample_token(normalised(targets[kept], masses), draws(kept).resample), is_bonus=False)


def find_chances(
    drafted: Sequence[int],
    draft_distributions: Sequence[Distribution | None],
    target_distribution: Callable[[int], Distribution],
    draws: Callable[[int], Draws],
) -> Chances:
    """See :class:`Chances`; arguments and errors as of :func:`accept_block`.

    A draft ends where only a draft comes to, and there is no distribution: it is an error if the text ends there.
    """
    probabilities = [
        1.0 if draft is None else draft_probability(draft, token, j)
        for j, (token, draft) in enumerate(zip(drafted, draft_distributions, strict=True))
    ]
    targets: list[Distribution] = []
    chances = [1.0]
    for j, token in enumerate(drafted):
        try:
            targets.append(target_distribution(j))
        except (CheckFailedError, InvalidRequestError):
            break
        if draft_distributions[j] is None:
            if sample_token(targets[j], draws(j).resample) != token:
                break
            chances[j:] = [0.0, chances[j]]
            continue
        chance = chances[-1] * targets[j].probability(token) / probabilities[j]
        if not chance > 0.0:
            break
        chances.append(min(1.0, chance))
        if not _may_pass(chances[-1], probabilities, j + 1, draws):
            break
    return Chances(targets, chances)


def tested_places(chances: Sequence[float], draws: Callable[[int], Draws]) -> Iterator[tuple[int, float]]:
    """Places and their chances, the last first, whose test may pass: none does more often than its tokens stay."""
    for kept in range(len(chances) - 1, -1, -1):
        chance = chances[kept]
        if chance == 1.0 or draws(kept - 1).accept < chance:
            yield kept, chance


def _may_pass(chance: float, probabilities: Sequence[float], start: int, draws: Callable[[int], Draws]) -> bool:
    """Whether a test from place ``start`` on passes if p(x) is 1 there; else no row of the target matters any more."""
    for place in range(start, len(probabilities)):
        chance /= probabilities[place]
        if chance >= 1.0 or draws(place).accept < chance:
            return True
    return False


RULES = {"block": accept_block, "token": accept_sampled}
"""How sampled drafts are accepted, by the name that a request gives."""
DEFAULT_RULE = "block"

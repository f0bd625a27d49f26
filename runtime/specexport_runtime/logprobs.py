"""Log-probabilities of generated tokens under the target, as it was before temperature, penalties and truncation."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probability of one generated token, and the most likely ones in its place.

    They are of the target's own distribution: the softmax of its raw logits.

    Attributes:
        token_id: the token that was chosen.
        logprob: its natural log-probability.
        top: the most likely token ids with theirs, the likeliest first; on a tie the lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

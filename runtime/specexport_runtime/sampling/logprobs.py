"""Log-probabilities of generated tokens under the target, as it was before temperature, penalties and truncation."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport_runtime.sampling.truncation import check_peak

if TYPE_CHECKING:
    from specexport_runtime.sampling.distribution import Float32Array


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the most likely ones in its place, by the softmax of raw logits."""

    token_id: int  # that was chosen, or that the prompt has
    logprob: float  # natural logarithm
    rank: int  # among all tokens, from 1, the likeliest first; on a tie the lower id is the likelier
    top: tuple[tuple[int, float], ...] = ()  # the most likely token ids with theirs, of ranks 1, 2, …


def compute_logprobs(tokens: Sequence[int], logits: "Float32Array", count: int) -> list[TokenLogprobs]:
    """Log-probabilities, ranks and ``count`` likeliest of tokens chosen from raw ``logits`` [n, V], row by row."""
    return [_compute_row_logprobs(token, logits[j], count) for j, token in enumerate(tokens)]


def _compute_row_logprobs(token: int, row: "Float32Array", count: int) -> TokenLogprobs:
    peak = float(row.max())
    check_peak(peak, row)
    # No term exceeds 1 and the largest is 1: float32 terms are good to 1e-7 of the sum, which float64 adds up.
    log_sum = peak + math.log(float(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
    top = tuple((int(best), float(row[best]) - log_sum) for best in _find_likeliest(row, count))
    rank = 1 + int(np.count_nonzero(row > row[token])) + int(np.count_nonzero(row[:token] == row[token]))
    return TokenLogprobs(token, float(row[token]) - log_sum, rank, top)


def _find_likeliest(row: "Float32Array", count: int) -> list[int]:
    """Ids of the ``count`` largest logits, the largest first, on a tie the lower id; without sorting the vocabulary."""
    count = min(count, len(row))
    if not count:
        return []
    last = np.partition(row, len(row) - count)[len(row) - count]
    # All that tie with the last place are candidates, so that the lower ids among them win.
    candidates = np.flatnonzero(row >= last)
    best: list[int] = candidates[np.argsort(-row[candidates], kind="stable")[:count]].tolist()
    return best

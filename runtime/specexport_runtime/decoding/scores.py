"""Log-probabilities of prompts: which chunks of a step have them, and what the logits say.

A row of logits is as long as the vocabulary, so that a chunk of usual length would take hundreds of megabytes of them.
Prompts that are scored are read in short chunks, few at a time.
"""

from collections.abc import Mapping

from specexport_runtime.executors.base import Float32Array
from specexport_runtime.sampling.logprobs import logprobs_of
from specexport_runtime.sequences.sequence import Sequence

MOST_SCORED = 64
"""Tokens of a step that are scored."""


def bound_scored(chunks: Mapping[int, int], rows: Mapping[int, Sequence]) -> dict[int, int]:
    """Prompt tokens of each row, cut such that a step scores no more than ``MOST_SCORED``."""
    left, bounded = MOST_SCORED, {}
    for row, count in chunks.items():
        if not rows[row].is_scored:
            bounded[row] = count
        elif left:
            bounded[row] = min(count, left)
            left -= bounded[row]
    return bounded


def note_scores(seq: Sequence, start: int, logits: Float32Array) -> None:
    """Keep the log-probabilities of the prompt's tokens behind those of a chunk, from its logits [n, V].

    ``start`` is the number of tokens before the chunk. CheckFailedError: the logits hold NaN or +inf.
    """
    if seq.prompt_logprobs is None:
        return
    following = seq.tokens[start + 1 : min(start + 1 + len(logits), seq.num_prompt_tokens)]
    seq.prompt_logprobs += logprobs_of(following, logits[: len(following)], seq.params.prompt_logprobs or 0)

"""From logits to the distribution that tokens are drawn from, the same for draft rows and target rows."""

from collections.abc import Sequence as Seq

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.distribution import Distribution, Float32Array, Int64Array, one_hot, sample_token
from specexport_runtime.sampling.grammar import BoolArray, Grammar
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.penalties import LogitAdjuster
from specexport_runtime.sampling.rng import Draws, RandomStream
from specexport_runtime.sampling.truncation import check_peak, truncated_softmax

__all__ = ["Distribution", "Draws", "RandomStream", "Sampler", "SamplingParams", "sample_token"]


class Sampler:
    """Logits processing of one sequence: turns raw logits into a distribution (or a greedy token).

    Draft rows and target rows go through the same object with the same history, so what is drawn from and what is
    tested against cannot drift apart. The caller's logits are never changed. The order of processing is documented in
    ``SamplingParams``.

    ``vocab_size`` is V of the target; logits beyond it are padding and can never be drawn. InvalidRequestError: a token
    id in ``logit_bias`` is not below it.
    """

    def __init__(
        self, params: SamplingParams, prompt_tokens: Seq[int], vocab_size: int, grammar: Grammar | None = None
    ) -> None:
        for token in params.logit_bias:
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens.",
                    hint=f"use ids from 0 to {vocab_size - 1}.",
                )
        self.params = params
        self.grammar = grammar
        self._vocab_size = vocab_size
        self._adjuster = LogitAdjuster(params, prompt_tokens, vocab_size)

    @property
    def is_greedy(self) -> bool:
        """Nothing is drawn: use ``greedy_token``."""
        return self.params.is_greedy

    @property
    def is_plain_greedy(self) -> bool:
        """Greedy without penalties, bias or grammar: the argmax of the raw logits, so callers may batch it."""
        return self.is_greedy and not self._adjuster.active and self.grammar is None

    def append(self, tokens: Seq[int]) -> None:
        """Add committed output tokens to the history."""
        self._adjuster.append(tokens)
        if self.grammar is not None:
            self.grammar.consume(tokens)

    def distribution(self, logits: Float32Array, drafted: Seq[int] = ()) -> Distribution:
        """The distribution of the token after the committed ones and ``drafted``, from raw logits [V'].

        V' below ``vocab_size`` (a draft's smaller head) leaves the other ids out. CheckFailedError: the logits hold NaN
        or +inf. InvalidRequestError: every token is banned.
        """
        if self.is_greedy:
            return one_hot(self.greedy_token(logits, drafted))
        processed = self._adjusted(logits, drafted)
        allowed = None if self.grammar is None else self.grammar.allowed(drafted)
        if allowed is None:
            return truncated_softmax(processed, self.params)
        ids = _ids_of(allowed, processed)
        inside = truncated_softmax(processed[ids], self.params)
        return Distribution(ids if inside.token_ids is None else ids[inside.token_ids], inside.probs)

    def greedy_token(self, logits: Float32Array, drafted: Seq[int] = ()) -> int:
        """The most likely token after bias and penalties, the lowest id on a tie. Arguments as ``distribution``."""
        processed = self._adjusted(logits, drafted)
        token = _argmax(processed)
        allowed = None if self.grammar is None else self.grammar.allowed(drafted)
        if allowed is None or (token < len(allowed) and allowed[token]):
            return token
        ids = _ids_of(allowed, processed)
        return int(ids[_argmax(processed[ids])])

    def _adjusted(self, logits: Float32Array, drafted: Seq[int]) -> Float32Array:
        row = logits[: self._vocab_size]
        return self._adjuster.apply(row, drafted) if self._adjuster.active else row


def _ids_of(allowed: BoolArray, logits: Float32Array) -> Int64Array:
    """The ids [n] that a grammar allows, ascending: few as a rule, and then all that follows is quick.

    InvalidRequestError: there are none among the logits.
    """
    ids: Int64Array = allowed[: len(logits)].nonzero()[0]
    if not len(ids):
        raise InvalidRequestError("no token is possible: there are logits of none that the grammar allows.")
    return ids


def _argmax(logits: Float32Array) -> int:
    token = int(logits.argmax())  # the first NaN, if there is one, counts as the largest
    check_peak(float(logits[token]), logits)
    return token

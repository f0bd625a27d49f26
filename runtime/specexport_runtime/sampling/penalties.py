"""Logit bias and penalties: the part of logits processing that depends on the sequence's history."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import numpy as np

from specexport_runtime.sampling.distribution import Float32Array, Float64Array, Int64Array
from specexport_runtime.sampling.params import SamplingParams


class LogitAdjuster:
    """Applies bias and penalties of one sequence, and keeps the history that they need."""

    def __init__(self, params: SamplingParams, prompt_tokens: Seq[int], vocab_size: int) -> None:
        self._params = params
        self._penalises = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self._history = _TokenCounts(prompt_tokens if params.repetition_penalty != 1.0 else (), vocab_size)
        biases = sorted(params.logit_bias.items())
        self._bias_ids = np.array([token for token, _ in biases], dtype=np.int64)
        self._bias_values = np.array([value for _, value in biases], dtype=np.float64)

    @property
    def active(self) -> bool:
        """Whether ``apply`` can change any logit."""
        return self._penalises or len(self._bias_ids) > 0

    def append(self, tokens: Seq[int]) -> None:
        """Add committed output tokens to the history."""
        if self._penalises:
            for token in tokens:
                self._history.add(token)

    def apply(self, logits: Float32Array, drafted: Seq[int]) -> Float32Array:
        """A processed copy of ``logits`` [V'], where V' may be below V.

        ``drafted`` are the draft tokens after the committed output; they count as output.
        """
        processed = logits.copy()
        if len(self._bias_ids):
            ids = self._bias_ids[: self._bias_ids.searchsorted(len(logits))]
            processed[ids] = processed[ids] + self._bias_values[: len(ids)]
        if self._penalises:
            with self._history.including(drafted) as (ids, counts):
                known = slice(None) if len(logits) >= self._history.vocab_size else ids < len(logits)
                processed[ids[known]] = self._penalised(processed[ids[known]].astype(np.float64), counts[known])
        return processed

    def _penalised(self, logits: Float64Array, counts: Int64Array) -> Float64Array:
        """Logits of tokens in the history, of which ``counts`` occurrences are in the output (0: prompt only)."""
        params = self._params
        if params.repetition_penalty != 1.0:
            factors = np.where(logits > 0.0, 1.0 / params.repetition_penalty, params.repetition_penalty)
            logits = logits * factors
        if params.frequency_penalty != 0.0:
            logits = logits - params.frequency_penalty * counts
        if params.presence_penalty != 0.0:
            logits = logits - params.presence_penalty * (counts > 0)
        return logits


class _TokenCounts:
    """The distinct tokens of a sequence, each with how often it is in the output; grows by one token in O(1)."""

    def __init__(self, prompt_tokens: Seq[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._ids = np.unique(np.asarray(prompt_tokens, dtype=np.int64))
        self._size = len(self._ids)
        self._counts = np.zeros(self._size, dtype=np.int64)
        self._slots = {token: slot for slot, token in enumerate(self._ids.tolist())}

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 16, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(slot + 16, dtype=np.int64)])
            self._ids[slot] = token
            self._counts[slot] = 0
            self._size += 1
        self._counts[slot] += 1

    @contextmanager
    def including(self, drafted: Seq[int]) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Views (ids, output counts) as if ``drafted`` had been added; undone on exit."""
        committed = self._size
        for token in drafted:
            self.add(token)
        try:
            yield self._ids[: self._size], self._counts[: self._size]
        finally:
            for token in reversed(drafted):
                slot = self._slots[token]
                self._counts[slot] -= 1
                if slot >= committed and self._counts[slot] == 0:
                    del self._slots[token]
            self._size = committed

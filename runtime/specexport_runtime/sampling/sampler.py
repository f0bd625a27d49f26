"""From logits to the distribution that tokens are drawn from, the same for draft rows and target rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.device_rows import DeviceRow
from specexport_runtime.executors.host_rows import HostRows, open_host_rows
from specexport_runtime.executors.logit_rows import LogitRow
from specexport_runtime.executors.row_kernels import NOTHING, RowAsk, RowRule, ask_whole_row
from specexport_runtime.sampling.device import FlatRowTracker, make_row_distribution, make_row_rule, to_host
from specexport_runtime.sampling.distribution import (
    Distribution,
    Float32Array,
    Float64Array,
    HostDistribution,
    Int64Array,
    one_hot,
    sample_token,
)
from specexport_runtime.sampling.grammar import BoolArray, TokenRules
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import Draws, RandomStream
from specexport_runtime.sampling.thinking_budget import BudgetRules
from specexport_runtime.sampling.truncation import check_peak, truncated_softmax

__all__ = ["Draws", "HostDistribution", "RandomStream", "Sampler", "SamplingParams", "sample_token"]


class Sampler:
    """Logits processing of one sequence: turns raw logits into a distribution (or a greedy token).

    Draft rows and target rows go through the same object with the same history, so what is drawn from and what is
    tested against cannot drift apart. Logits beyond ``vocab_size`` are padding. InvalidRequestError: a token id in
    ``logit_bias`` is.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: Sequence[int],
        vocab_size: int,
        grammar: TokenRules | None = None,  # which tokens may come next; None for any
    ) -> None:
        for token in params.logit_bias:
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens.",
                    hint=f"use ids from 0 to {vocab_size - 1}.",
                )
        self.params = params
        self._given = grammar
        self._vocab_size = vocab_size
        self._adjuster = LogitAdjuster(params, prompt_tokens, vocab_size)
        self._flat = FlatRowTracker()
        self._rules: dict[int, RowRule] = {}  # by width
        # Of rows that come as numbers, changed or not: by width, what cuts them and how; None where numpy does it.
        self._near: dict[int, tuple[HostRows, RowAsk] | None] = {}
        self._near_flat = FlatRowTracker()
        self.is_greedy = params.is_greedy
        """Nothing is drawn: use ``greedy_token``."""
        self._set_grammar()

    def _set_grammar(self) -> None:
        """Take the rules of the next round."""
        self.grammar = self._given.current if isinstance(self._given, BudgetRules) else self._given
        self.is_plain = not self._adjuster.active and self.grammar is None
        """Whether raw logits and the parameters say all: without penalties, bias or grammar."""
        self.is_plain_greedy = self.is_greedy and self.is_plain
        """The token is the argmax of the raw logits, so callers may batch it."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens to the history."""
        self._adjuster.append(tokens)
        if self._given is None:
            return
        self._given.consume(tokens)
        if isinstance(self._given, BudgetRules) and self._given.current is not self.grammar:
            self._set_grammar()
            self._rules.clear()
            self.__dict__.pop("is_uncut", None)

    @cached_property
    def is_uncut(self) -> bool:
        """Whether raw logits are drawn from at a temperature, and no more."""
        rule = self._rule(self._vocab_size)
        return rule.temperature > 0 and not (rule.cuts or rule.fetch)

    def _rule(self, width: int) -> RowRule:
        if not self.is_plain:
            rule = ask_whole_row(width).rule
        elif self.is_greedy:
            rule = NOTHING.rule
        else:
            rule = make_row_rule(self.params, self._vocab_size)._replace(width=min(width, self._vocab_size))
        self._rules[width] = rule
        return rule

    def ask(self, uniform: float, width: int, token: int = -1, slot: int = -1) -> RowAsk:
        """What to ask of a row of ``width`` logits; see ``device.make_row_rule``."""
        rule = self._rules.get(width) or self._rule(width)
        if rule.cuts or rule.fetch:
            return (
                ask_whole_row(width) if rule.cuts and self._flat.should_fetch_next() else RowAsk(rule, uniform, token)
            )
        return RowAsk(rule, uniform, token, slot)

    def make_row_distribution(self, row: LogitRow, drafted: Sequence[int] = ()) -> Distribution:
        """As :meth:`distribution`, of a row that was asked by :meth:`ask`, where it lies."""
        rule = row.ask.rule
        if not (rule.temperature and isinstance(row, DeviceRow)):
            return self.distribution(row.fetch(), drafted)
        if rule.cuts:
            self._flat.record(row)
        return make_row_distribution(row, self.params)

    def distribution(self, logits: Float32Array, drafted: Sequence[int] = ()) -> HostDistribution:
        """The distribution of the token after ``drafted``, from raw logits [V']; ids from V' on are left out.

        CheckFailedError: the logits hold NaN or +inf. InvalidRequestError: every token is banned.
        """
        if self.is_greedy:
            return one_hot(self.greedy_token(logits, drafted))
        allowed, ids = self.allowed_logits(logits, drafted)
        if ids is None:
            return self._softmax(allowed)
        inside = truncated_softmax(allowed, self.params)
        return HostDistribution(ids if inside.token_ids is None else ids[inside.token_ids], inside.probs)

    def _softmax(self, row: Float32Array) -> HostDistribution:
        """``truncated_softmax``, by the library of operators where that leaves few tokens."""
        width = len(row)
        if width not in self._near:
            rule = make_row_rule(self.params, width)
            rows = open_host_rows(width, 1) if rule.cuts else None
            self._near[width] = None if rows is None else (rows, RowAsk(rule))
        near = self._near[width]
        if near is None or self._near_flat.should_fetch_next():
            return truncated_softmax(row, self.params)
        rows, ask = near
        rows.begin(row[None])
        found = rows.query(0, ask)
        self._near_flat.record(found)
        return to_host(make_row_distribution(found, self.params))

    def greedy_token(self, logits: Float32Array, drafted: Sequence[int] = ()) -> int:
        """The most likely token after bias and penalties, the lowest id on a tie. Arguments as ``distribution``."""
        processed = self._adjusted(logits, drafted)
        token = _argmax(processed)
        allowed = None if self.grammar is None else self.grammar.allowed(drafted)
        if allowed is None or (token < len(allowed) and allowed[token]):
            return token
        ids = _list_allowed_ids(allowed, processed)
        return int(ids[_argmax(processed[ids])])

    def allowed_logits(self, logits: Float32Array, drafted: Sequence[int]) -> tuple[Float32Array, Int64Array | None]:
        """Logits after bias and penalties of the tokens [n] that a grammar allows, and their ids, ascending.

        None for ids: these are all tokens.
        """
        processed = self._adjusted(logits, drafted)
        allowed = None if self.grammar is None else self.grammar.allowed(drafted)
        if allowed is None:
            return processed, None
        ids = _list_allowed_ids(allowed, processed)
        return processed[ids], ids

    def _adjusted(self, logits: Float32Array, drafted: Sequence[int]) -> Float32Array:
        row = logits[: self._vocab_size]
        return self._adjuster.apply(row, drafted) if self._adjuster.active else row


def _list_allowed_ids(allowed: BoolArray, logits: Float32Array) -> Int64Array:
    """The ids [n] that a grammar allows, ascending: few as a rule. InvalidRequestError: none among the logits."""
    ids: Int64Array = allowed[: len(logits)].nonzero()[0]
    if not len(ids):
        raise InvalidRequestError("no token is possible: there are logits of none that the grammar allows.")
    return ids


def _argmax(logits: Float32Array) -> int:
    token = int(logits.argmax())  # the first NaN, if there is one, counts as the largest
    check_peak(float(logits[token]), logits)
    return token


class LogitAdjuster:
    """Applies bias and penalties of one sequence, and keeps the history that they need."""

    def __init__(self, params: SamplingParams, prompt_tokens: Sequence[int], vocab_size: int) -> None:
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

    def append(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens to the history."""
        if self._penalises:
            for token in tokens:
                self._history.add(token)

    def apply(self, logits: Float32Array, drafted: Sequence[int]) -> Float32Array:
        """A processed copy of ``logits`` [V'], where V' may be below V; ``drafted`` tokens count as output."""
        processed = logits.copy()
        if len(self._bias_ids):
            ids = self._bias_ids[: self._bias_ids.searchsorted(len(logits))]
            processed[ids] = processed[ids] + self._bias_values[: len(ids)]
        if self._penalises:
            with self._history.with_drafted(drafted) as (ids, counts):
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

    def __init__(self, prompt_tokens: Sequence[int], vocab_size: int) -> None:
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
    def with_drafted(self, drafted: Sequence[int]) -> Iterator[tuple[Int64Array, Int64Array]]:
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

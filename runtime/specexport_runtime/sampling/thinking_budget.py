"""A budget of thinking: when it is used up, the token that ends the thinking is the only one allowed, in drafts too.

All other tokens are left as they are, so that texts follow the target's distribution given that one, drafted or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.grammar import BoolArray, Grammar, TokenRules
from specexport_runtime.sampling.thinking import Thinking


@dataclass(frozen=True)
class ThinkingBudget:
    """Most tokens that a text thinks; an ``InvalidRequestError`` if that is no count."""

    num_tokens: int  # between the tokens that begin and end the thinking; 0: these two follow each other
    thinking: Thinking  # where it thinks

    def __post_init__(self) -> None:
        count = self.num_tokens
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InvalidRequestError(f"thinking_budget: {count!r:.80} tokens.", "give an integer of at least 0.")
        if not isinstance(self.thinking, Thinking):
            raise InvalidRequestError("thinking_budget: it has no Thinking.", "give ThinkingBudget(64, Thinking(end)).")


class BudgetRules:
    """``TokenRules`` of a text with a budget, in front of those of its form."""

    def __init__(self, budget: ThinkingBudget, vocab_size: int, form: Grammar | None, most_drafted: int) -> None:
        if budget.thinking.end >= vocab_size:
            raise InvalidRequestError(
                f"thinking_budget names token {budget.thinking.end}, but the vocabulary has {vocab_size} tokens.",
                f"use ids from 0 to {vocab_size - 1}.",
            )
        self._thinking, self._form, self._most_drafted = budget.thinking, form, most_drafted
        self._has_begun = budget.thinking.begin is None
        self._left: int | None = budget.num_tokens  # tokens that it may still think; None: it thinks no more
        self._end = np.zeros(vocab_size, np.bool_)
        self._end[budget.thinking.end] = True

    @property
    def current(self) -> TokenRules | None:
        """What the next round needs: the form's own rules (None for none) where no draft comes to the budget's end."""
        return self._form if self._left is None or self._left > self._most_drafted else self

    def allowed(self, drafted: Sequence[int]) -> BoolArray | None:
        """See ``TokenRules.allowed``."""
        if self._is_used_up(*self._parse_event(drafted)):
            return self._end
        return None if self._form is None else self._form.allowed(drafted)

    def cut(self, drafted: Sequence[int]) -> int:
        """See ``TokenRules.cut``."""
        place, most = (self._has_begun, self._left), 0
        for token in drafted:
            if self._is_used_up(*place) and token != self._thinking.end:
                break
            place, most = self._after(*place, token), most + 1
        return most if self._form is None else self._form.cut(drafted[:most])

    def forced(self, most: int, drafted: Sequence[int] = ()) -> list[int]:
        """See ``TokenRules.forced``."""
        if self._is_used_up(*self._parse_event(drafted)):
            return [self._thinking.end][:most]
        return [] if self._form is None else self._form.forced(most, drafted)

    def consume(self, tokens: Sequence[int]) -> None:
        """See ``TokenRules.consume``."""
        self._has_begun, self._left = self._parse_event(tokens)
        if self._form is not None:
            self._form.consume(tokens)

    def _is_used_up(self, has_begun: bool, left: int | None) -> bool:
        return has_begun and left == 0

    def _parse_event(self, tokens: Sequence[int]) -> tuple[bool, int | None]:
        """Whether the thinking has begun after ``tokens``, and what is left of its budget."""
        place = self._has_begun, self._left
        for token in tokens if self._left is not None else ():
            place = self._after(*place, token)
        return place

    def _after(self, has_begun: bool, left: int | None, token: int) -> tuple[bool, int | None]:
        if left is None:
            return has_begun, None
        if has_begun:
            return True, None if token == self._thinking.end else max(left - 1, 0)
        if token == self._thinking.begin:
            return True, left
        return False, left if token in self._thinking.between else None

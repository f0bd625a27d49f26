"""Models that think before they answer: a grammar that begins where the thinking ends, also inside a draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.grammar import BoolArray, Grammar

_Place = Literal["before", "thinking", "after", "a line after", "answer"]
_NEXT: dict[_Place, _Place] = {"after": "a line after", "a line after": "answer"}


@dataclass(frozen=True)
class Thinking:
    """Where a text thinks, as token ids; an InvalidRequestError if one of them is none."""

    end: int  # ends the thinking, ``</think>`` say
    begin: int | None = None  # begins it. None: the prompt has, so the text is in the middle of it
    between: tuple[int, ...] = ()  # of these two may stand between the end and what follows: line breaks

    def __post_init__(self) -> None:
        given = [self.end, *self.between, *(() if self.begin is None else (self.begin,))]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
            raise InvalidRequestError(f"thinking: {given} are no token ids.", "give the ids of the tokens themselves.")


class GrammarAfterThinking(Grammar):
    """A grammar after a free part, as in ``Grammar``.

    Before the token that ends the thinking every token is allowed, but for tokens that end the text. From there on the
    grammar rules. A text may also follow the grammar at once. All of this holds place by place, so that a draft may run
    across the border.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: Sequence[int], thinking: Thinking) -> None:
        super().__init__(matcher, vocab_size, eos_token_ids)
        self._thinking = thinking
        self._stage: _Place = "thinking" if thinking.begin is None else "before"
        self._free: BoolArray | None = None
        self._border: BoolArray | None = None

    def allowed(self, drafted: Sequence[int]) -> BoolArray | None:
        """See ``Grammar.allowed``."""
        if self._has_ended:
            return None
        place, free = self._find_stage(drafted)
        if any(token in self._eos for token in drafted[:free]):
            return None
        if place == "thinking":
            return self._make_free_mask()
        if free < len(drafted) or place == "answer":
            return super().allowed(drafted[free:])
        if self._border is None:
            first = super().allowed(())
            self._border = np.zeros(self._vocab_size, np.bool_) if first is None else first.copy()
        allowed = self._border.copy()
        more = self._thinking.between if place in _NEXT else (self._thinking.begin,)
        allowed[[token for token in more if token is not None and token < len(allowed)]] = True
        return allowed

    def cut(self, drafted: Sequence[int]) -> int:
        """See ``Grammar.cut``."""
        if self._has_ended:
            return 0
        _, free = self._find_stage(drafted)
        for count, token in enumerate(drafted[:free]):
            if token in self._eos:
                return count + bool(self._make_free_mask()[token])
        return free + (super().cut(drafted[free:]) if free < len(drafted) else 0)

    def forced(self, most: int, drafted: Sequence[int] = ()) -> list[int]:
        """See ``Grammar.forced``; nothing while the text may still think, or break a line."""
        stage, free = self._find_stage(drafted)
        if self._has_ended or stage != "answer" or any(token in self._eos for token in drafted[:free]):
            return []
        return super().forced(most, drafted[free:])

    def consume(self, tokens: Sequence[int]) -> None:
        """See ``Grammar.consume``."""
        if self._has_ended:
            return
        self._stage, free = self._find_stage(tokens)
        if any(token in self._eos for token in tokens[:free]):
            self._has_ended = True
        elif free < len(tokens):
            super().consume(tokens[free:])

    def _find_stage(self, tokens: Sequence[int]) -> tuple[_Place, int]:
        """Where the text is after ``tokens``, and how many of them are before the grammar's first."""
        place = self._stage
        for count, token in enumerate(tokens):
            if place == "before" and token == self._thinking.begin:
                place = "thinking"
            elif place == "thinking":
                place = "after" if token == self._thinking.end else "thinking"
            elif place in _NEXT and token in self._thinking.between and not self._can_answer_begin_with(token):
                place = _NEXT[place]
            else:
                return "answer", count
        return place, len(tokens)

    def _can_answer_begin_with(self, token: int) -> bool:
        first = super().allowed(())
        return first is not None and bool(first[token])

    def _make_free_mask(self) -> BoolArray:
        if self._free is None:
            self._free = np.ones(self._vocab_size, np.bool_)
            first = super().allowed(())
            for token in self._eos:
                if token < self._vocab_size:
                    self._free[token] = first is not None and first[token]
        return self._free

"""The grammar of one text: which tokens may come next, after the committed ones and any draft.

Other tokens are left out before anything chooses among them, for draft and target alike, at every place of a
verify step. So a text follows the target's distribution given that each token is allowed, with and without drafts.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import CheckFailedError, InvalidRequestError

_log = logging.getLogger(__name__)

BoolArray = npt.NDArray[np.bool_]


class TokenRules(Protocol):
    """Which tokens may come next in one text; see :class:`Grammar` for what its methods mean."""

    def allowed(self, drafted: Sequence[int]) -> BoolArray | None:
        """Which tokens may follow ``drafted``: [V]; None for all."""

    def cut(self, drafted: Sequence[int]) -> int:
        """How many draft tokens are allowed."""

    def forced(self, most: int, drafted: Sequence[int] = ()) -> list[int]:
        """Tokens that must follow ``drafted``, at most ``most``."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""


class Grammar:
    """Where a text is in its grammar, by a ``llguidance.LLMatcher`` at its beginning that nothing else uses.

    The matcher may stand after draft tokens, whose masks are kept for testing. ``eos_token_ids`` end a text, where the
    grammar lets it end. ``first`` [V] are tokens that the text may begin with; None for all.
    """

    def __init__(
        self, matcher: Any, vocab_size: int, eos_token_ids: Sequence[int], first: BoolArray | None = None
    ) -> None:
        self._beginning, self._said = matcher, list[int]()
        self._matcher, self._vocab_size, self._eos = matcher.deep_copy(), vocab_size, tuple(eos_token_ids)
        self._first = first
        self._drafted: list[int] = []
        self._masks: list[BoolArray | None] = [None]
        """Behind each number of tokens of ``_drafted``, from 0."""
        self._place = 0
        """How many of these tokens the matcher has after it."""
        self._has_ended = False

    def allowed(self, drafted: Sequence[int]) -> BoolArray | None:
        """Which tokens may follow ``drafted``: [V]; None after the end of the text, where nothing is wanted.

        CheckFailedError: a draft token is not allowed. InvalidRequestError: the grammar is too complex.
        """
        return None if self._is_over(drafted) else self._mask(drafted)

    def cut(self, drafted: Sequence[int]) -> int:
        """How many draft tokens the grammar allows, to the end of the text at most."""
        if self._has_ended:
            return 0
        end = self._count_before_end(drafted)
        said = drafted[:end]
        known = _count_shared_tokens(self._drafted[: self._place], said)
        self._move_matcher(known)
        if not self._matcher.is_stopped():  # then it takes no token any more, though the end of the text is allowed
            known += self._matcher.validate_tokens(list(said[known:]))
            self._check()
        if known < end or end == len(drafted):
            return known
        return end + bool(self._mask(said)[drafted[end]])

    def forced(self, most: int, drafted: Sequence[int] = ()) -> list[int]:
        """Tokens that a text of this grammar goes on with after ``drafted``, whatever it says; at most ``most``.

        Where nothing can follow, that is its end. It is the only token that may not be the one that is allowed: a model
        may have others that end a text. Errors are as for :meth:`allowed`.
        """
        if most <= 0 or self._is_over(drafted):
            return []
        self._set_drafted(drafted)
        self._move_matcher(len(drafted))
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()[:most]]
        tokens = tokens[: self._count_before_end(tokens)]
        if len(tokens) < most:
            self._set_drafted([*drafted, *tokens])
            self._move_matcher(len(drafted) + len(tokens))
            if self._matcher.is_stopped():
                self._check()
                tokens.append(self._eos[0])
        return tokens

    def consume(self, tokens: Sequence[int]) -> None:
        """Tokens were committed; CheckFailedError if one of them is not allowed."""
        if self._has_ended:
            return
        end = self._count_before_end(tokens)
        tokens, self._has_ended = tokens[:end], end < len(tokens)
        known = _count_shared_tokens(self._drafted[: self._place], tokens)
        self._move_matcher(known)
        if not self._matcher.consume_tokens(list(tokens[known:])):
            self._check()
            raise CheckFailedError("a token was committed that the grammar does not allow.")
        if self._has_ended and not self._matcher.is_accepting():
            raise CheckFailedError("the end of a text was committed where its grammar does not end.")
        self._said += tokens
        self._drafted, self._masks, self._place = [], [None], 0
        self._first = self._first if not tokens else None

    def _is_over(self, drafted: Sequence[int]) -> bool:
        """Whether the text has ended, or ends in a draft."""
        return self._has_ended or self._count_before_end(drafted) < len(drafted)

    def _count_before_end(self, tokens: Sequence[int]) -> int:
        """How many tokens come before the first that ends the text."""
        return next((count for count, token in enumerate(tokens) if token in self._eos), len(tokens))

    def _mask(self, drafted: Sequence[int]) -> BoolArray:
        self._set_drafted(drafted)
        mask = self._masks[len(drafted)]
        if mask is None:
            self._move_matcher(len(drafted))
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check()
            mask = self._masks[len(drafted)] = bits[: self._vocab_size].view(np.bool_)
            if not self._matcher.is_accepting():
                mask[list(self._eos)] = False  # `<[^5]>` means them too
            if self._first is not None and not drafted:
                mask &= self._first
        return mask

    def _set_drafted(self, drafted: Sequence[int]) -> None:
        """Masks are of these tokens from now on, or of more that begin with them."""
        same = _count_shared_tokens(self._drafted, drafted)
        if same == len(drafted):
            return
        self._move_matcher(min(self._place, same))
        self._drafted[same:] = drafted[same:]
        self._masks[same + 1 :] = [None] * (len(drafted) - same)

    def _move_matcher(self, place: int) -> None:
        """Let the matcher have so many of the draft tokens after it."""
        if place < self._place:
            self._matcher.rollback(self._place - place)
            self._place = place
        for token in self._drafted[self._place : place]:
            if not self._matcher.consume_token(token):
                self._check()
                raise CheckFailedError(f"draft token {token} is not allowed by the grammar.")
            self._place += 1

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = explain_refusal(self._matcher.get_error().splitlines()[0])
            # Perhaps of a place that only a draft comes to: this matcher would keep it.
            self._matcher, self._place = self._beginning.deep_copy(), 0
            self._matcher.consume_tokens(self._said)
            if reason.startswith("NoExtension"):
                reason = "this model has no token for what comes next"
            raise InvalidRequestError(f"the grammar cannot be followed: {reason}.", "give a simpler schema or grammar.")


def explain_refusal(message: str) -> str:
    """Why a matcher refuses, in one line; what it says of a failure of its own goes to the log."""
    if message.startswith("panic"):
        _log.warning("the matcher failed: %.300s", message.splitlines()[0])
        return "it is more than the matcher can take"
    return " ".join(message.split())[:300].rstrip(".")


def _count_shared_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count


class MaskAhead:
    """Makes the masks of a verify step while the target runs: matchers and engines leave Python's lock alone."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Future[None] | None = None

    def start(self, wanted: Sequence[tuple[TokenRules, Sequence[int]]]) -> None:
        """Begin with the masks after each number of draft tokens, of all rows."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "specexport-masks")
        self._coming = self._pool.submit(_make_masks, wanted)

    def wait(self) -> None:
        """Until they are made. What goes wrong comes up again where a mask is used."""
        if self._coming is not None:
            self._coming.exception()
            self._coming = None


def _make_masks(wanted: Sequence[tuple[TokenRules, Sequence[int]]]) -> None:
    for grammar, drafted in wanted:
        with suppress(CheckFailedError, InvalidRequestError):
            for count in range(grammar.cut(drafted) + 1):
                grammar.allowed(drafted[:count])

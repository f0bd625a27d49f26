"""The grammar of one text: which tokens may come next, behind the committed ones and any draft.

The mask goes onto the logits before anything that chooses among them, for draft and target alike, at every place of a
verify step. So a text follows the target's distribution given that each token is allowed, with and without drafts.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.sampling.distribution import Float32Array

BoolArray = npt.NDArray[np.bool_]


class Grammar:
    """Where a text is in its grammar.

    The matcher may stand behind draft tokens; :meth:`consume` takes it back to the committed ones.

    Args:
        matcher: a ``llguidance.LLMatcher`` at the beginning of the text; this object's own.
        vocab_size: V.
        eos_token_ids: ids that end a text, where the grammar lets it end.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, frozenset(eos_token_ids)
        self._behind: list[int] = []
        self._masks: list[BoolArray | None] = [None]
        self._has_ended = False

    def mask(self, logits: Float32Array, drafted: Seq[int]) -> Float32Array:
        """A copy of ``logits`` [V'] with minus infinity for tokens that may not follow ``drafted``.

        Raises:
            CheckFailedError: a draft token is not allowed.
            InvalidRequestError: the grammar is too complex.
        """
        allowed = self.allowed(drafted)
        if allowed is None:
            return logits
        masked: Float32Array = np.where(allowed[: len(logits)], logits, np.float32(-np.inf))
        if len(logits) > len(allowed):
            masked = np.concatenate([masked, np.full(len(logits) - len(allowed), -np.inf, np.float32)])
        return masked

    def allowed(self, drafted: Seq[int]) -> BoolArray | None:
        """Which tokens may follow ``drafted``: [V]; None behind the end of the text, where nothing is wanted.

        Raises:
            CheckFailedError: a draft token is not allowed.
            InvalidRequestError: the grammar is too complex.
        """
        if self._has_ended or any(token in self._eos for token in drafted):
            return None
        count = len(drafted)
        if self._behind[:count] != list(drafted) or count >= len(self._masks):
            self._stand_behind(drafted)
        mask = self._masks[count]
        if mask is None:
            self._stand_behind(drafted)
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check()
            mask = self._masks[count] = bits[: self._vocab_size].view(np.bool_)
        return mask

    def cut(self, drafted: Seq[int]) -> int:
        """How many draft tokens the grammar allows, to the end of the text at most."""
        if self._has_ended:
            return 0
        self._stand_behind(())
        for count, token in enumerate(drafted):
            if token in self._eos:
                drafted = drafted[: count + 1]
                break
        valid: int = self._matcher.validate_tokens(list(drafted))
        return valid

    def forced(self, most: int) -> list[int]:
        """Tokens that a text of this grammar goes on with, whatever it says; at most ``most``."""
        if self._has_ended:
            return []
        self._stand_behind(())
        return [int(token) for token in self._matcher.compute_ff_tokens()[:most]]

    def consume(self, tokens: Seq[int]) -> None:
        """Tokens were committed.

        Raises:
            CheckFailedError: one of them is not allowed.
        """
        if self._has_ended:
            return
        for count, token in enumerate(tokens):
            if token in self._eos:
                tokens, self._has_ended = tokens[:count], True
                break
        self._stand_behind(())
        if not self._matcher.consume_tokens(list(tokens)):
            self._check()
            raise CheckFailedError("a token was committed that the grammar does not allow.")
        self._masks = [None]

    def _stand_behind(self, drafted: Seq[int]) -> None:
        wanted = list(drafted)
        same = 0
        for mine, other in zip(self._behind, wanted, strict=False):
            if mine != other:
                break
            same += 1
        if len(self._behind) > same:
            self._matcher.rollback(len(self._behind) - same)
            del self._behind[same:], self._masks[same + 1 :]
        for token in wanted[same:]:
            if not self._matcher.consume_token(token):
                self._check()
                raise CheckFailedError(f"draft token {token} is not allowed by the grammar.")
            self._behind.append(token)
            self._masks.append(None)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(
                f"the grammar cannot be followed: {self._matcher.get_error().splitlines()[0]}.",
                "give a simpler schema or grammar.",
            )


class MaskAhead:
    """Makes the masks of a verify step while the target runs: matchers and engines leave Python's lock alone."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Future[None] | None = None

    def start(self, wanted: Seq[tuple[Grammar, Seq[int]]]) -> None:
        """Begin with the masks behind each number of draft tokens, of all rows."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "specexport-masks")
        self._coming = self._pool.submit(_make_masks, wanted)

    def wait(self) -> None:
        """Until they are made. What goes wrong comes up again where a mask is used."""
        if self._coming is not None:
            self._coming.exception()
            self._coming = None


def _make_masks(wanted: Seq[tuple[Grammar, Seq[int]]]) -> None:
    for grammar, drafted in wanted:
        for count in range(len(drafted) + 1):
            try:
                grammar.allowed(drafted[:count])
            except (CheckFailedError, InvalidRequestError):
                break

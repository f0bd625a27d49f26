"""A matcher that is given up when it takes too long: a large form may have a place to which its trial did not come."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from specexport_runtime.errors import InvalidRequestError

MAX_S = 2.0  # of one call, by the clock; all rows of a round wait for it
_BRIEF = frozenset({"deep_copy", "get_error", "is_accepting", "is_error", "is_stopped"})


class Watched:
    """A ``llguidance.LLMatcher``, with its methods; InvalidRequestError from the first call on that takes too long.

    That call goes on, unheard, on a thread of its own. Only masks are made without Python's lock: others end first.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._pool = matcher, ThreadPoolExecutor(1, "specexport-matcher")
        self._is_given_up = False

    def deep_copy(self) -> "Watched":
        """Another at the same place."""
        return Watched(self._call("deep_copy"))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        if not self._is_given_up:
            method = getattr(self._matcher, name)
            if name in _BRIEF:
                return method(*args)
            try:
                return self._pool.submit(method, *args).result(MAX_S)
            except TimeoutError:
                self._is_given_up = True
        raise InvalidRequestError(
            f"the grammar cannot be followed: a token takes more than {MAX_S:g} seconds.",
            "give a simpler schema or grammar.",
        )

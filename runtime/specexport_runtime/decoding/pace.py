"""How many prompt tokens a step may have, and whose come first, by the times that an operator wants to keep.

Time to first token: a prompt that cannot have its first token within the budget any more, or never could, yields to
prompts that can; of these the oldest has the nearest deadline. So short prompts overtake the chunks of a long one,
which goes on with what is left: the oldest always gets a share (``schedule``).

Time between tokens: a step that decodes takes no more prompt tokens than fit into the budget beside its round.

What a prompt token and a round cost is learned from the steps that were made. It decides nothing but the sizes of
chunks, and these change no token that comes out, only the time that a step takes.
"""

import time
from collections.abc import Callable

from specexport_runtime.requests.request import Request

_WEIGHT = 0.2  # of the newest step


class Pace:
    """The budgets, and what steps cost."""

    def __init__(
        self,
        ttft_budget_s: float | None = None,  # seconds from submission to the first token; None for no such budget
        itl_budget_s: float | None = None,  # seconds between two rounds of a request that decodes; None for none
        clock: Callable[[], float] = time.perf_counter,  # seconds, of the clock of ``RequestStats.submit_time``
    ) -> None:
        self.ttft_budget_s, self.itl_budget_s = ttft_budget_s, itl_budget_s
        self._clock = clock
        self._round: float | None = None  # seconds; None before the first
        self._token: float | None = None  # seconds of a prompt token; None before the first

    @property
    def is_on(self) -> bool:
        """Whether there is any budget."""
        return self.ttft_budget_s is not None or self.itl_budget_s is not None

    def record_step(self, seconds: float, prompt_tokens: int, num_decoding: int) -> None:
        """Learn from the seconds of a step, drafting included, and the prompt tokens that it read."""
        if not prompt_tokens:
            self._round = _smooth(self._round, seconds)
            return
        rest = seconds - ((self._round or 0.0) if num_decoding else 0.0)
        self._token = _smooth(self._token, max(rest, 0.0) / prompt_tokens)

    def is_late(self, req: Request, unread: int) -> bool:
        """Whether a first token will come too late, even if only the ``unread`` tokens of its prompt are read."""
        if self.ttft_budget_s is None or req.num_generated:
            return False
        there = self._clock() + unread * (self._token or 0.0)
        return there > req.stats.submit_time + self.ttft_budget_s

    def most(self, tokens: int, num_decoding: int) -> int:
        """Of the prompt ``tokens`` that a step has room for, the number that it has time for; at least one."""
        if self.itl_budget_s is None or not num_decoding or not self._token:
            return tokens
        return min(tokens, max(1, int((self.itl_budget_s - (self._round or 0.0)) / self._token)))


def _smooth(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)

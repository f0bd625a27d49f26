"""What rounds really take, against what cost curves promised: curves that are wrong are mended while requests run.

A machine that is busy slows everything, so seconds alone say nothing. Two ratios decide about drafting, and both are
measured in pairs, within rounds and between rounds that follow one another:

- what a draft step takes beside the target's step of the same round;
- what the draft tokens add to the target's step beside what it takes without them.

A ratio that is off by more than a fifth replaces the one in use. Times must not decide about a draft whose random
numbers are still to be used (``RandomStream`` says why), so the caller says when nothing sampled is under way; until
then what was learned waits.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
WRONG = 1.2
"""A ratio is mended when it is off by this factor."""
_MEMORY = 0.97  # weight that is left of a round after the next
_FIRST = 8.0  # rounds (they fade) before a ratio that is a little off is mended; one that is far off needs fewer
_FAR, _FEW = 2.0, 2.8
_STIFFNESS = 1.0  # rounds that the ratio in use counts for
_VARIED = 0.01  # relative variance of draft lengths that suffices
_EARLY, _SELDOM = (4, 8), 16
_WIDEST = 20.0  # a ratio is never mended beyond this
_HICCUP = 3.0  # a round that takes so much longer than usual says nothing
_KEEP_EVERY_S = 10.0


class RoundSeconds(NamedTuple):
    """One round: what the curves said, and what it took. All in seconds, those of the curves as they were measured.

    Attributes:
        num_rows: rows of the step.
        base: the curve's, of the target's step without draft tokens.
        extra: the curve's, of what the draft tokens add to it.
        target: the target's step took.
        drafts: by drafter, the curve's and the real ones of its steps; by :func:`reading_of` a drafter those of
            reading what it had missed.
    """

    num_rows: int
    base: float
    extra: float
    target: float
    drafts: Mapping[str, tuple[float, float]] = {}


@dataclass
class _Pairs:
    """Faded sums of a drafter's rounds: the curve's and the real seconds of its steps, and of the target's."""

    rounds: float = 0.0
    promised: float = 0.0
    taken: float = 0.0
    base: float = 0.0
    extra: float = 0.0
    target: float = 0.0

    def add(self, promised: float, taken: float, paired: RoundSeconds) -> None:
        if self.rounds >= _FIRST and taken > _HICCUP * promised * self.taken / self.promised:
            self.rounds -= 0.5  # unless it goes on
            return
        values = (1.0, promised, taken, paired.base, paired.extra, paired.target)
        for name, value in zip(_PAIR_FIELDS, values, strict=True):
            setattr(self, name, _MEMORY * getattr(self, name) + value)


_PAIR_FIELDS = ("rounds", "promised", "taken", "base", "extra", "target")


@dataclass
class _Steps:
    """Faded sums of the target's steps of one size, each divided by its base: a line of seconds over extra."""

    rounds: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    skipped: int = 0
    same: int = 0
    pairs: dict[str, _Pairs] = field(default_factory=dict)

    def add(self, x: float, y: float) -> None:
        self.rounds = _MEMORY * self.rounds + 1.0
        self.x = _MEMORY * self.x + x
        self.xx = _MEMORY * self.xx + x * x
        self.y = _MEMORY * self.y + y
        self.xy = _MEMORY * self.xy + x * y

    def fit(self, ratio: float) -> tuple[float, float]:
        """Level and slope of the line; the slope is drawn towards ``ratio`` times the level."""
        weight = _STIFFNESS * self.xx / self.rounds
        a, b, c = self.rounds + weight * ratio * ratio, self.x - weight * ratio, self.xx + weight
        determinant = a * c - b * b
        if self.xx <= 0 or determinant <= 1e-9 * a * c:
            level = self.y / (self.rounds + ratio * self.x)
            return level, ratio * level
        return (c * self.y - b * self.xy) / determinant, (a * self.xy - b * self.y) / determinant


class LearnedCosts:
    """Ratios by which cost curves are mended, by the number of rows.

    Args:
        known: what :meth:`to_json` gave in an earlier life; None begins with the curves as they are.
        is_measured: the curves were measured on this machine, so that their level means seconds.
        keep: called with :meth:`to_json` after a change, seldom: keeps it for the next life.
        clock: seconds; tests bring their own.

    Attributes:
        version: counts the changes.
    """

    def __init__(
        self,
        known: Any = None,
        *,
        is_measured: bool = True,
        keep: Callable[[dict[str, Any]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = 0
        self._is_measured = is_measured
        self._steps: dict[int, _Steps] = {}
        self._ratios: dict[str, dict[int, float]] = _read(known)
        self._due: dict[tuple[str, int], float] = {}
        self._keep, self._clock, self._kept = keep, clock, -math.inf

    def extra_ratio(self, num_rows: int) -> float:
        """By what the seconds that draft tokens add to the target's step are multiplied."""
        return self._ratio(_EXTRA, num_rows)

    def draft_ratio(self, drafter: str, num_rows: int) -> float:
        """By what the seconds of a drafter's steps are multiplied."""
        return self._ratio(drafter, num_rows)

    def reading_ratio(self, drafter: str, num_rows: int) -> float:
        """By what the seconds that a drafter needs to read what it missed are multiplied."""
        name = reading_of(drafter)
        return self._ratio(name if name in self._ratios else drafter, num_rows)

    def level(self, num_rows: int) -> float | None:
        """Real seconds of the target's plain step over the curve's, lately; None if that is not known."""
        steps = _nearest(self._steps, num_rows)
        if steps is None or steps.rounds < 1:
            return 1.0 if self._is_measured else None
        return steps.fit(self.extra_ratio(num_rows))[0]

    def is_unknown(self, drafter: str) -> bool:
        """Whether nobody has seen on this machine what a drafter's steps cost."""
        if self._is_measured or drafter in self._ratios:
            return False
        return all(drafter not in each.pairs or each.pairs[drafter].rounds < _FEW for each in self._steps.values())

    def wants_shorter(self, num_rows: int) -> bool:
        """Whether a shorter draft would tell something: all steps of this size had the same number of draft tokens.

        From them nobody can tell what a draft token adds. The answer depends on how many rounds there were, and how
        long their drafts; not on times.
        """
        steps = self._steps.get(_size(num_rows))
        if steps is None or not steps.x or steps.rounds * steps.xx - steps.x**2 > _VARIED * steps.rounds * steps.xx:
            return False
        steps.same += 1
        return steps.same in _EARLY or not steps.same % _SELDOM

    def observe(self, taken: RoundSeconds) -> None:
        """A round was executed. Changes nothing by itself, see :meth:`adopt`."""
        size = _size(taken.num_rows)
        steps = self._steps.setdefault(size, _Steps())
        used = self.extra_ratio(taken.num_rows)
        x, y = taken.extra / taken.base, taken.target / taken.base
        if steps.rounds >= _FIRST and self._is_hiccup(steps, used, x, y):
            return
        steps.skipped = 0
        steps.add(x, y)
        for drafter, (promised, seconds) in taken.drafts.items():
            if promised > 0:
                steps.pairs.setdefault(drafter, _Pairs()).add(promised, seconds, taken)
        self._look(size, steps, used)

    @staticmethod
    def _is_hiccup(steps: _Steps, ratio: float, x: float, y: float) -> bool:
        level, slope = steps.fit(ratio)
        if y <= _HICCUP * (level + slope * x) or steps.skipped >= _FIRST:
            return False
        steps.skipped += 1
        return True

    @property
    def is_due(self) -> bool:
        """Whether something in use was found to be wrong."""
        return bool(self._due)

    def adopt(self) -> bool:
        """Use what was learned, if something in use is wrong; whether anything changed.

        To be called only where no draft depends on it whose random numbers are still to be used.
        """
        if not self._due:
            return False
        for (name, size), ratio in self._due.items():
            self._ratios.setdefault(name, {})[size] = ratio
        self._due.clear()
        self.version += 1
        now = self._clock()
        if self._keep is not None and now - self._kept >= _KEEP_EVERY_S:
            self._kept = now
            self._keep(self.to_json())
        return True

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {name: {str(size): ratio for size, ratio in each.items()} for name, each in self._ratios.items()}

    def _look(self, size: int, steps: _Steps, used: float) -> None:
        """Note ratios that are wrong, and forget those that are not any more."""
        level, slope = steps.fit(used)
        if level <= 0:
            return
        extra = used
        if steps.xx > 0:
            extra = _within(slope / level)
            self._note(_EXTRA, size, extra, used, steps.rounds)
        for drafter, pairs in steps.pairs.items():
            beside = pairs.target / (pairs.base + extra * pairs.extra)
            ratio = _within(pairs.taken / pairs.promised / beside)
            self._note(drafter, size, ratio, self._ratio(drafter, 1 << (size - 1)), pairs.rounds)

    def _note(self, name: str, size: int, ratio: float, used: float, rounds: float) -> None:
        off = max(ratio / used, used / ratio)
        # What was never seen here is kept even if it was believed: the next life need not find out again.
        is_new = not self._is_measured and name not in self._ratios and rounds >= _FIRST * _MEMORY**_FIRST
        if is_new or (off > WRONG and rounds >= (_FEW if off > _FAR else _FIRST * _MEMORY**_FIRST)):
            self._due[name, size] = ratio
        else:
            self._due.pop((name, size), None)

    def _ratio(self, name: str, num_rows: int) -> float:
        found = _nearest(self._ratios.get(name, {}), num_rows)
        return 1.0 if found is None else found


_EXTRA = "target"
"""Under which the target's ratio stands among those of the drafters."""


def reading_of(drafter: str) -> str:
    """Under which the ratio of reading stands: wide steps cost otherwise than those of a token."""
    return f"{drafter}/reading"


def _size(num_rows: int) -> int:
    """Steps of 1, 2–3, 4–7, 8–15 … rows are of a size."""
    return num_rows.bit_length()


def _nearest(by_size: Mapping[int, _T], num_rows: int) -> _T | None:
    size = _size(num_rows)
    return by_size[min(by_size, key=lambda known: abs(known - size))] if by_size else None


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / _WIDEST), _WIDEST)


def _read(known: Any) -> dict[str, dict[int, float]]:
    """Ratios from JSON; none where it is damaged: it can be learned again."""
    try:
        ratios = {str(name): {int(size): float(each[size]) for size in each} for name, each in (known or {}).items()}
    except (AttributeError, TypeError, ValueError):
        return {}
    fine = all(
        size >= 1 and 1 / _WIDEST <= ratio <= _WIDEST for each in ratios.values() for size, ratio in each.items()
    )
    return ratios if fine else {}

"""What rounds really take, against what cost curves promised: curves that are wrong are mended while requests run.

A machine that is busy slows everything, so seconds alone say nothing. Two ratios decide about drafting, and both are
measured in pairs, within rounds and between rounds that follow one another:

- what a draft step takes beside the target's step of the same round;
- what the draft tokens add to the target's step beside what it takes without them: by how much longer a step takes than
  the one before it that had fewer of them.

A ratio that is off by more than a fifth, and by more than chance explains, replaces the one in use. Times must not
decide about a draft whose random numbers are still to be used (``RandomStream`` says why), so the caller says when
nothing sampled is under way; until then what was learned waits.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

_T = TypeVar("_T")
WRONG = 1.2
"""A ratio is mended when it is off by this factor."""
_MEMORY = 0.97  # weight that is left of a round after the next
_FIRST = 8.0  # rounds before a ratio that is a little off is mended; that of a drafter which is far off needs fewer
_ENOUGH = _FIRST * _MEMORY**_FIRST  # the same: they fade
_FAR, _FEW, _FEW_READINGS = 2.0, 4.6, 2.8  # readings are long, and seldom
_SEEN = 3
_VARIED = 0.01  # relative variance of draft lengths that suffices
_CERTAIN, _CAUTION = 4.0, 2.0  # standard errors that a ratio must be off by, and that it is believed less than that
_GUESSED_NOISE, _GUESSES = 0.15, 4.0
"""Share of a step's seconds that chance is taken to move it by, and rounds that this guess counts for."""
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


class _Pairs(NamedTuple):
    """Sums over a drafter's rounds: the curve's and the real seconds of its steps, and of the target's."""

    rounds: float = 0.0
    promised: float = 0.0
    taken: float = 0.0
    base: float = 0.0
    extra: float = 0.0
    target: float = 0.0

    def is_far(self, promised: float, taken: float) -> bool:
        """Whether a round took so much longer than usual that it says nothing."""
        return self.rounds >= _FIRST and taken > _HICCUP * promised * self.taken / self.promised


class _Slope(NamedTuple):
    """How the target's steps grow with draft tokens.

    Attributes:
        level: real seconds of a plain step over the curve's.
        ratio: real seconds of draft tokens over the curve's, divided by ``level``.
        error: its standard error.
    """

    level: float
    ratio: float
    error: float


class _Line(NamedTuple):
    """Sums over the target's steps of one size: seconds (y) and what draft tokens add by the curve (x), over the base.

    With ``d``: differences to the step before. A machine that becomes slower and faster again hardly moves them.
    """

    rounds: float = 0.0
    x: float = 0.0
    y: float = 0.0
    dxx: float = 0.0
    dxy: float = 0.0
    dyy: float = 0.0

    def level(self, ratio: float) -> float:
        """Real seconds of a plain step over the curve's, if draft tokens take ``ratio`` times the curve's."""
        return self.y / (self.rounds + ratio * self.x)

    def slope(self) -> _Slope | None:
        """What the differences say; None if they say nothing."""
        if self.rounds < 1 or not _is_varied(self.rounds, self.x, self.dxx):
            return None
        slope = self.dxy / self.dxx
        level = (self.y - slope * self.x) / self.rounds
        if level <= 0:
            return None
        left = max(self.dyy - slope * self.dxy, 0.0) + _GUESSES * (_GUESSED_NOISE * level) ** 2
        error = math.sqrt(left / (self.rounds + _GUESSES) / self.dxx)
        return _Slope(level, slope / level, error / level)

    def is_far(self, ratio: float, x: float, y: float) -> bool:
        """Whether a step took so much longer than usual that it says nothing."""
        return self.rounds >= _FIRST and y > _HICCUP * self.level(ratio) * (1 + ratio * x)


class _Lengths(NamedTuple):
    """Sums over all steps of one size, whatever they took: what may decide about drafts that are still to be tested."""

    rounds: float = 0.0
    x: float = 0.0
    dxx: float = 0.0


def _is_varied(rounds: float, x: float, dxx: float) -> bool:
    """Whether steps that follow one another had different numbers of draft tokens."""
    return dxx * rounds > 2 * _VARIED * x**2


_Sums = TypeVar("_Sums", _Pairs, _Line, _Lengths)


@dataclass
class _Faded(Generic[_Sums]):
    """Sums that fade with every value added."""

    sums: _Sums
    far: int = 0

    def add(self, values: tuple[float, ...], *, is_far: bool) -> bool:
        """Add one value of each sum; not if it is far off, unless many in a row are: that is how it is now."""
        self.far = self.far + 1 if is_far else 0
        if 0 < self.far <= _FIRST:
            return False
        faded = (_MEMORY * old + new for old, new in zip(self.sums, values, strict=True))
        self.sums = type(self.sums)(*faded)
        return True


@dataclass
class _Steps:
    """Rounds of one size.

    ``last`` is x and y of the newest that counted, ``last_x`` that of the newest; None after a change of ``rows``: what
    curves of other row counts get wrong is no matter of draft tokens.
    """

    lengths: _Faded[_Lengths] = field(default_factory=lambda: _Faded(_Lengths()))
    line: _Faded[_Line] = field(default_factory=lambda: _Faded(_Line()))
    pairs: dict[str, _Faded[_Pairs]] = field(default_factory=dict)
    last: tuple[float, float] | None = None
    last_x: float | None = None
    rows: int = 0
    same: int = 0


class LearnedCosts:
    """Ratios by which cost curves are mended, by the number of rows.

    Args:
        known: what :meth:`to_json` gave in an earlier life; None begins with the curves as they are.
        is_measured: the curves were measured on this machine, so that their level means seconds.
        keep: called with :meth:`to_json` after a change, seldom, and by :meth:`flush`: keeps it for the next life.
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
        self._seen: dict[str, int] = {}
        self._ratios: dict[str, dict[int, float]] = _read(known)
        self._due: dict[tuple[str, int], float] = {}
        self._keep, self._clock, self._kept, self._is_kept = keep, clock, -math.inf, True

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
        if steps is None or steps.line.sums.rounds < 1:
            return 1.0 if self._is_measured else None
        return steps.line.sums.level(self.extra_ratio(num_rows))

    def is_unknown(self, drafter: str) -> bool:
        """Whether nobody has seen on this machine what a drafter's steps cost."""
        if self._is_measured or drafter in self._ratios:
            return False
        return self._seen.get(drafter, 0) < _SEEN

    def wants_shorter(self, num_rows: int) -> bool:
        """Whether a shorter draft would tell something: all steps of this size had the same number of draft tokens.

        From them nobody can tell what a draft token adds. The answer depends on how many rounds there were, and how
        long their drafts; not on times.
        """
        steps = self._steps.get(_size(num_rows))
        if steps is None:
            return False
        lengths = steps.lengths.sums
        if not lengths.x or _is_varied(*lengths):
            return False
        steps.same += 1
        return steps.same in _EARLY or not steps.same % _SELDOM

    def observe(self, taken: RoundSeconds) -> None:
        """A round was executed. Changes nothing by itself, see :meth:`adopt`."""
        size = _size(taken.num_rows)
        steps = self._steps.setdefault(size, _Steps())
        used = self.extra_ratio(taken.num_rows)
        x, y = taken.extra / taken.base, taken.target / taken.base
        # Whether a step took too long must not show in what decides about lengths, so that is counted first.
        if steps.rows != taken.num_rows:
            steps.rows, steps.last, steps.last_x = taken.num_rows, None, None
        dx = x - (x if steps.last_x is None else steps.last_x)
        steps.lengths.add((1.0, x, dx * dx), is_far=False)
        steps.last_x = x
        for drafter in taken.drafts:
            self._seen[drafter] = self._seen.get(drafter, 0) + 1
        before = steps.last or (x, y)
        dx, dy = x - before[0], y - before[1]
        if not steps.line.add((1.0, x, y, dx * dx, dx * dy, dy * dy), is_far=steps.line.sums.is_far(used, x, y)):
            return
        steps.last = x, y
        for drafter, (promised, seconds) in taken.drafts.items():
            if promised > 0:
                pairs = steps.pairs.setdefault(drafter, _Faded(_Pairs()))
                values = (1.0, promised, seconds, taken.base, taken.extra, taken.target)
                pairs.add(values, is_far=pairs.sums.is_far(promised, seconds))
        self._look(size, steps, used)
        if not self._is_kept and self._clock() - self._kept >= _KEEP_EVERY_S:
            self.flush()

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
        self._is_kept = False
        if self._clock() - self._kept >= _KEEP_EVERY_S:
            self.flush()
        return True

    def flush(self) -> None:
        """Keep for the next life what changed since it was kept last."""
        if self._is_kept:
            return
        self._kept, self._is_kept = self._clock(), True
        if self._keep is not None:
            self._keep(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {name: {str(size): ratio for size, ratio in each.items()} for name, each in self._ratios.items()}

    def _look(self, size: int, steps: _Steps, used: float) -> None:
        """Note ratios that are wrong, and forget those that are not any more."""
        extra, slope = used, steps.line.sums.slope()
        if slope is not None:
            off = slope.ratio - used
            is_certain = abs(off) > _CERTAIN * slope.error
            extra = _within(slope.ratio - math.copysign(_CAUTION * slope.error, off)) if is_certain else used
            self._note(_EXTRA, size, extra, used, steps.line.sums.rounds, _ENOUGH)
        for drafter, faded in steps.pairs.items():
            pairs = faded.sums
            beside = pairs.target / (pairs.base + extra * pairs.extra)
            ratio = _within(pairs.taken / pairs.promised / beside)
            few = _FEW_READINGS if drafter.endswith(_READING) else _FEW
            self._note(drafter, size, ratio, self._ratio(drafter, 1 << (size - 1)), pairs.rounds, few)

    def _note(self, name: str, size: int, ratio: float, used: float, rounds: float, few: float) -> None:
        off = max(ratio / used, used / ratio)
        # What was never seen here is kept even if it was believed: the next life need not find out again.
        is_new = not self._is_measured and name not in self._ratios and rounds >= _ENOUGH
        if is_new or (off > WRONG and rounds >= (few if off > _FAR else _ENOUGH)):
            self._due[name, size] = ratio
        else:
            self._due.pop((name, size), None)

    def _ratio(self, name: str, num_rows: int) -> float:
        found = _nearest(self._ratios.get(name, {}), num_rows)
        return 1.0 if found is None else found


_EXTRA = "target/drafts"
"""Under which the target's ratio stands among those of the drafters, none of which may have a slash in its name."""


_READING = "/reading"


def reading_of(drafter: str) -> str:
    """Under which the ratio of reading stands: wide steps cost otherwise than those of a token."""
    return drafter + _READING


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

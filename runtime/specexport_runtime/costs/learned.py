"""What rounds really take, against what cost curves promised: curves that are wrong are mended while requests run.

A machine that is busy slows everything, so seconds alone say nothing. Two ratios decide about drafting, and each round
gives a sample of them:

- what a draft step takes beside the target's step of the same round;
- what the draft tokens add to the target's step beside what it takes without them, from a round and the one before it
  that had other drafts. Of two steps ``level · (1 + ratio · x)`` that follow one another, the level falls out.

The weighted median of the newest samples counts, so a round that something disturbed moves it no further than any
other. A ratio that is off by more than a fifth, and by more than the order of the samples leaves to chance, replaces
the one in use. Times must not decide about a draft whose random numbers are still to be used (``RandomStream`` says
why), so the caller says when nothing sampled is under way; until then what was learned waits.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
WRONG = 1.2
"""A ratio is mended when it is off by this factor."""
_WINDOW, _LATELY = 128, 15  # samples that count for a ratio, and rounds for the level
_MEMORY = 0.97  # weight that is left of a round's length after the next
_NEW = 8  # samples from which a ratio is kept that agrees with what was believed
_SEEN = 3  # rounds after which a drafter is no stranger here
_VARIED = 0.01  # relative variance of draft lengths that suffices
_CERTAIN, _CERTAIN_STEPS, _CERTAIN_READINGS = 2.4, 2.2, 1.7
"""Standard deviations of the order of samples that lie between a ratio and another: of what draft tokens add, of draft
steps, of reading. Readings are long, and seldom: three that agree suffice, as do five steps."""
_SHARED = 0.6  # of samples from neighbouring rounds: each round is in two, and both mostly err to one side
_OFTEN, _PAIRS, _SELDOM = 4, 12, 16
"""Where all drafts have one length every fourth is shorter until so many pairs of rounds differed, later every 16th."""
_WIDEST = 20.0  # a ratio is never mended beyond this
_LEAST_EXTRA = 0.2  # the same for what draft tokens add: they are multiplied with all weights, however fast
_KEEP_EVERY_S = 10.0
_SOON, _LATER = 48, 8  # every round is looked at first, then every eighth: many samples take longer to order


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


class _Sample(NamedTuple):
    """What one round says of a ratio, and how much that weighs."""

    ratio: float
    weight: float


class _Lengths(NamedTuple):
    """Sums over all steps of one size, whatever they took: what may decide about drafts that are still to be tested.

    They fade. ``x`` is what draft tokens add by the curve, over the plain step; ``dxx`` squares of its differences, of
    which there were ``pairs``.
    """

    rounds: float = 0.0
    x: float = 0.0
    dxx: float = 0.0
    pairs: int = 0

    def after(self, x: float, dx: float) -> "_Lengths":
        """The sums with another step."""
        rounds, x, dxx = _MEMORY * self.rounds + 1, _MEMORY * self.x + x, _MEMORY * self.dxx + dx * dx
        return _Lengths(rounds, x, dxx, self.pairs + (dx != 0))

    @property
    def is_varied(self) -> bool:
        """Whether steps that follow one another had different numbers of draft tokens."""
        return self.dxx * self.rounds > 2 * _VARIED * self.x**2


class _Step(NamedTuple):
    """A step of the target.

    Attributes:
        num_rows: its rows.
        x: what its draft tokens add by the curve, over the plain step.
        y: its real seconds, likewise.
    """

    num_rows: int
    x: float
    y: float


class _Drafting(NamedTuple):
    """What a drafter took in one round.

    Attributes:
        step: the target's step of that round.
        promised: seconds of the drafter's steps by the curve.
        times: the real ones over those.
    """

    step: _Step
    promised: float
    times: float


@dataclass
class _Steps:
    """Rounds of one size."""

    lengths: _Lengths = field(default_factory=_Lengths)
    lately: deque[_Step] = field(default_factory=lambda: deque(maxlen=_LATELY))
    extra: deque[_Sample] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafts: dict[str, deque[_Drafting]] = field(default_factory=dict)
    same: int = 0
    count: int = 0

    def level(self, ratio: float) -> float:
        """Real seconds of a plain step over the curve's, if draft tokens take ``ratio`` times the curve's."""
        return median(step.y / (1 + ratio * step.x) for step in self.lately)


def _extra_sample(before: _Step, now: _Step) -> _Sample | None:
    """The ratio at which two steps differ by their draft tokens alone; None if they had as many, or other rows.

    ``before.y / now.y = (1 + ratio · before.x) / (1 + ratio · now.x)``.
    """
    few, many = sorted((before, now), key=lambda step: step.x)
    if few.num_rows != many.num_rows or few.x == many.x:
        return None
    grown, rest = many.y - few.y, few.y * many.x - many.y * few.x
    return _Sample(grown / rest if rest > 0 else math.inf, many.x - few.x)


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
        return self._ratio(reading_of(drafter), num_rows)

    def level(self, num_rows: int) -> float | None:
        """Real seconds of the target's plain step over the curve's, lately; None if that is not known."""
        steps = _nearest(self._steps, num_rows)
        if steps is None or not steps.lately:
            return 1.0 if self._is_measured else None
        return steps.level(self.extra_ratio(num_rows))

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
        is_early = steps.lengths.pairs < _PAIRS
        if not steps.lengths.x or (steps.lengths.is_varied and not is_early):
            return False
        steps.same += 1
        return not steps.same % (_OFTEN if is_early else _SELDOM)

    def observe(self, taken: RoundSeconds) -> None:
        """A round was executed. Changes nothing by itself, see :meth:`adopt`."""
        size = _size(taken.num_rows)
        steps = self._steps.setdefault(size, _Steps())
        now = _Step(taken.num_rows, taken.extra / taken.base, taken.target / taken.base)
        before = steps.lately[-1] if steps.lately and steps.lately[-1].num_rows == now.num_rows else now
        steps.lengths = steps.lengths.after(now.x, now.x - before.x)
        steps.lately.append(now)
        if (sample := _extra_sample(before, now)) is not None:
            steps.extra.append(sample)
        for drafter, (promised, seconds) in taken.drafts.items():
            self._seen[drafter] = self._seen.get(drafter, 0) + 1
            if promised > 0:
                rounds = steps.drafts.setdefault(drafter, deque(maxlen=_WINDOW))
                rounds.append(_Drafting(now, promised, seconds / promised))
        steps.count += 1
        if steps.count <= _SOON or not steps.count % _LATER:
            extra = self._look_at_extra(size, steps)
            for drafter, rounds in steps.drafts.items():
                self._look_at_drafts(drafter, size, rounds, extra)
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

    def _look_at_extra(self, size: int, steps: _Steps) -> float:
        """Note the target's ratio if it is wrong; the one that holds."""
        used = self._ratio(_EXTRA, 1 << (size - 1))
        found = _beyond(steps.extra, used, _CERTAIN, _SHARED)
        found = used if found is None else min(max(found, _LEAST_EXTRA), _WIDEST)
        self._note(_EXTRA, size, found, used, len(steps.extra))
        return found

    def _look_at_drafts(self, drafter: str, size: int, rounds: Collection[_Drafting], extra: float) -> None:
        """Note the ratio of a drafter's steps, or of its reading, if it is wrong."""
        used = self._ratio(drafter, 1 << (size - 1))
        samples = [_Sample(times * (1 + extra * step.x) / step.y, promised) for step, promised, times in rounds]
        found = _beyond(samples, used, _CERTAIN_READINGS if drafter.endswith(_READING) else _CERTAIN_STEPS)
        found = used if found is None else min(max(found, 1 / _WIDEST), _WIDEST)
        self._note(drafter, size, found, used, len(samples))

    def _note(self, name: str, size: int, found: float, used: float, count: int) -> None:
        # What was never seen here is kept even if it was believed: the next life need not find out again.
        is_new = not self._is_measured and name not in self._ratios and count >= _NEW
        if is_new or max(found / used, used / found) > WRONG:
            self._due[name, size] = found
        else:
            self._due.pop((name, size), None)

    def _ratio(self, name: str, num_rows: int) -> float:
        # Until reading was seen, it is taken to be off as the drafter's steps are.
        by_size = self._ratios.get(name) or self._ratios.get(name.removesuffix(_READING), {})
        found = _nearest(by_size, num_rows)
        return 1.0 if found is None else found


def _beyond(samples: Collection[_Sample], used: float, deviations: float, share: float = 1.0) -> float | None:
    """The ratio, if chance hardly put the samples around it where they are while ``used`` is the truth; else None.

    Half of the samples lie below the truth, give or take some of them, whatever they are: ``deviations`` standard
    deviations of that share. The median is believed one of them less far. Of the samples, ``share`` are independent.
    """
    weight, square, below, above = 0.0, 0.0, 0.0, 0.0
    for ratio, each in samples:
        weight, square = weight + each, square + each * each
        if ratio < used:
            below += each
        elif ratio > used:
            above += each
    if not weight:
        return None
    one = 0.5 / math.sqrt(share * weight * weight / square)
    if max(below, above) < (0.5 + deviations * one) * weight:
        return None
    return _at(samples, min(0.5 + one, 1.0) if below > above else max(0.5 - one, 0.0))


def _at(samples: Collection[_Sample], share: float) -> float:
    """The sample below which this share of the weight lies."""
    ordered = sorted(samples)
    left = share * sum([sample.weight for sample in ordered])
    for sample in ordered:
        left -= sample.weight
        if left <= 0:
            break
    return sample.ratio


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

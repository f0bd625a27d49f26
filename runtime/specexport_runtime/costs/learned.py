"""What rounds really take, against what the sizes of a bundle promised: wrong ratios are mended while requests run.

A machine that is busy slows everything, so seconds alone say nothing. Two ratios decide about drafting, and each round
gives a sample of them:

- what a draft step takes beside the target's step of the same round;
- as how many tokens a draft token counts in the target's step: from a round and the one before it that had other
  drafts. Of two steps of ``level · seconds(tokens + ratio · drafted)`` that follow one another, the level falls out.

The weighted median of the newest samples counts, so a round that something disturbed moves it no further than any
other. A ratio that is off by more than a fifth, and by more than the order of the samples leaves to chance, replaces
the one in use.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
# Judged by test_replay.py's modelled seconds, some numbers on a part of its cases; what chance may do, and how
# soon a wrong ratio must be found, by test_learned_costs.py.
WRONG = 1.2
"""A ratio is mended when it is off by this factor. Replayed: 1.1 is the same but for 0.5 % at worst."""
_WINDOW, _LATELY = 128, 15  # samples that count for a ratio, and rounds for the level; replayed: 32 and 5 are the same
_SEEN = 3  # rounds after which a drafter is no stranger here; replayed: with 1, from 3 % slower to 3 % faster
_OFTEN, _PAIRS, _SELDOM = 4, 12, 64
"""Every fourth draft is shorter until so many pairs of rounds differed; later one of 64 that were all as long.

Replayed: every eighth is 0.2 % slower, and 4 % at worst; one of 16 later, 0.2 % at worst.
"""
# Every round is looked at first, then every eighth: many samples take longer to order. Replayed: always is the same.
_SOON, _LATER = 48, 8
_FADING = 0.75
"""What is left of the logarithm of a ratio in the next life if nothing confirmed it in this one."""
_EXTRA, _READING = "target/drafts", "/reading"
"""Under which the target's ratio stands among those of the drafters, and a drafter's of reading."""


_CERTAIN, _CERTAIN_STEPS, _CERTAIN_READINGS = 2.4, 2.2, 1.9
"""Standard deviations of the order of samples that lie between a ratio and another: of what draft tokens add, of draft
steps, of reading. Readings are long, and seldom: four that agree suffice, as do five steps.

Replayed: 2.2 for all is 0.1 % slower, and 3 % at worst.
"""
# Of samples from neighbouring rounds: each round is in two, and both mostly err to one side. Replayed: all of them,
# 0.04 % slower, and 3 % at worst.
_SHARED = 0.6
_WIDEST = 20.0  # a ratio is never mended beyond this; replayed: no bound is 0.2 % slower at worst
_MIN_EXTRA = 0.2  # the same for what draft tokens add: they are multiplied with all weights, however fast


def make_reading_key(drafter: str) -> str:
    """Under which the ratio of reading stands: wide steps cost otherwise than those of a token."""
    return drafter + _READING


class RoundSeconds(NamedTuple):
    """One round: what was promised by size, and what it took, in seconds."""

    num_rows: int
    drafted: int  # draft tokens of the step
    promised: Callable[[float], float]  # of the target's step with so many draft tokens
    target: float  # what the target's step took
    drafts: Mapping[str, tuple[float, float]] = {}  # promised and real ones of each drafter, or of its reading

    def level(self, ratio: float) -> float:
        """Real seconds over promised ones, where each draft token counts as ``ratio`` of them."""
        return self.target / self.promised(ratio * self.drafted)


_Sample = tuple[float, float, RoundSeconds | None]
"""What one round says of a ratio, how much that weighs, and beside which step it holds."""


@dataclass
class _Steps:
    """Rounds of one size."""

    lately: deque[RoundSeconds] = field(default_factory=lambda: deque(maxlen=_LATELY))
    count: int = 0
    same: int = 0  # lately, those with the draft tokens of the last one
    pairs: int = 0  # neighbours with different numbers
    asked: int = 0  # how often it was asked whether a shorter draft would tell something


class LearnedCosts:
    """Ratios by which promised seconds are mended, by the number of rows; ``keep`` gets all after a change."""

    def __init__(self, known: Any = None, *, keep: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
        self.version = 0
        self._steps: dict[int, _Steps] = {}
        self._samples: dict[tuple[str, int], deque[_Sample]] = {}
        self._seen: dict[str, int] = {}
        self._ratios: dict[str, dict[int, float]] = _read_ratios(known)
        self._due: dict[tuple[str, int], float] = {}
        self._keep, self._is_kept = keep, True
        told = known.get("drafters") if isinstance(known, dict) else None
        self.drafters: dict[str, Any] = told if isinstance(told, dict) else {}
        """What is remembered of each: JSON of an earlier life, or what gives this life's by ``to_json``."""

    def extra_ratio(self, num_rows: int) -> float:
        """As how many tokens a draft token counts in the target's step."""
        return self._ratio(_EXTRA, num_rows)

    def draft_ratio(self, drafter: str, num_rows: int) -> float:
        """By what the seconds of a drafter's steps are multiplied; of reading until that was seen, too."""
        return self._ratio(drafter, num_rows)

    def level(self, num_rows: int) -> float | None:
        """Real seconds of the target's plain step over the promised ones, lately; None if nothing was seen."""
        steps, ratio = _nearest(self._steps, num_rows), self.extra_ratio(num_rows)
        return None if steps is None else median(step.level(ratio) for step in steps.lately)

    def is_unknown(self, drafter: str) -> bool:
        """Whether a drafter's steps have never been timed on this machine."""
        return drafter not in self._ratios and self._seen.get(drafter, 0) < _SEEN

    def needs_shorter_draft(self, num_rows: int) -> bool:
        """Whether a shorter draft would tell something: all steps lately had as many draft tokens."""
        steps = self._steps.get(_size(num_rows))
        if steps is None or not steps.lately[-1].drafted:
            return False
        steps.asked += 1
        return not steps.asked % _OFTEN if steps.pairs < _PAIRS else steps.same >= _SELDOM

    def observe(self, taken: RoundSeconds) -> None:
        """A round was executed. Changes nothing by itself, see :meth:`adopt`."""
        self._is_kept = False
        size = _size(taken.num_rows)
        steps = self._steps.setdefault(size, _Steps())
        before = steps.lately[-1] if steps.lately else taken
        if before[:2] == taken[:2]:
            steps.same += 1
        else:
            steps.same, steps.pairs = 0, steps.pairs + 1
            if before.num_rows == taken.num_rows:
                self._add(_EXTRA, size, _extra_sample(before, taken))
        steps.lately.append(taken)
        for drafter, (promised, seconds) in taken.drafts.items():
            self._seen[drafter] = self._seen.get(drafter, 0) + 1
            if self._seen[drafter] == _SEEN and not drafter.endswith(_READING):
                self._ratios.setdefault(drafter, {size: 1.0})  # the next life need not find out again
            if promised > 0:
                self._add(drafter, size, (seconds / promised, promised, taken))
        steps.count += 1
        if steps.count <= _SOON or not steps.count % _LATER:
            for name, of_size in sorted(self._samples, key=lambda key: key[0] != _EXTRA):
                if of_size == size:
                    self._check_ratio(name, size)

    def adopt(self) -> bool:
        """Between two rounds: use what was learned, if something in use is wrong; whether anything changed."""
        if not self._due:
            return False
        for (name, size), ratio in self._due.items():
            self._ratios.setdefault(name, {})[size] = ratio
        self._due.clear()
        self.version += 1
        self.flush()
        return True

    def flush(self) -> None:
        """Keep for the next life what changed since it was kept last."""
        if not self._is_kept:
            self._is_kept = True
            self._keep(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """JSON form, for the next life: a ratio that this one did not see fades to what sizes promise."""
        ratios = dict[str, dict[str, float]]()
        for name, each in self._ratios.items():
            ratios[name] = {str(k): v if (name, k) in self._samples else v**_FADING for k, v in each.items()}
        drafters = {name: each.to_json() if hasattr(each, "to_json") else each for name, each in self.drafters.items()}
        return {"ratios": ratios, "drafters": drafters}

    def _add(self, name: str, size: int, sample: _Sample) -> None:
        self._samples.setdefault((name, size), deque(maxlen=_WINDOW)).append(sample)

    def _check_ratio(self, name: str, size: int) -> None:
        """Note a ratio that is wrong."""
        used, extra = (self._ratio(each, 1 << (size - 1)) for each in (name, _EXTRA))
        extra = self._due.get((_EXTRA, size), extra)
        samples = [
            (ratio if step is None else ratio / step.level(extra), weight)
            for ratio, weight, step in self._samples[name, size]
        ]
        deviations, share, least = _CERTAIN_STEPS, 1.0, 1 / _WIDEST
        if name == _EXTRA:
            deviations, share, least = _CERTAIN, _SHARED, _MIN_EXTRA
        elif name.endswith(_READING):
            deviations = _CERTAIN_READINGS
        found = min(max(_estimate_ratio(samples, used, deviations, share), least), _WIDEST)
        if max(found / used, used / found) > WRONG:
            self._due[name, size] = found
        else:
            self._due.pop((name, size), None)

    def _ratio(self, name: str, num_rows: int) -> float:
        by_size = self._ratios.get(name) or self._ratios.get(name.removesuffix(_READING), {})
        return _nearest(by_size, num_rows) or 1.0


def _extra_sample(before: RoundSeconds, now: RoundSeconds) -> _Sample:
    """The ratio at which two steps differ by their draft tokens alone: both then have one level, found by halving."""
    few, many = sorted((before, now), key=lambda step: step.drafted)
    weight = many.promised(many.drafted) / many.promised(0) - few.promised(few.drafted) / few.promised(0)
    low, high = math.log(_MIN_EXTRA), math.log(_WIDEST)
    for _ in range(10):  # to within half a hundredth
        ratio = math.exp(middle := (low + high) / 2)
        low, high = (middle, high) if many.level(ratio) > few.level(ratio) else (low, middle)
    return ratio, weight, None


def _estimate_ratio(samples: Collection[tuple[float, float]], used: float, deviations: float, share: float) -> float:
    """``used``, unless chance hardly put samples and their weights where they are while it is the truth.

    Half of the samples, of which ``share`` are independent, lie below the truth, give or take some. The median is
    believed one standard deviation of that less far.
    """
    weight = sum([each for _, each in samples])
    below = sum([each for ratio, each in samples if ratio < used])
    above = sum([each for ratio, each in samples if ratio > used])
    one = 0.5 * math.sqrt(sum([each**2 for _, each in samples]) / share)
    if max(below, above) <= 0.5 * weight + deviations * one:
        return used
    left = min(0.5 * weight + one, weight) if below > above else 0.5 * weight - one
    ordered = sorted(samples)
    for ratio, each in ordered:
        left -= each
        if left <= 0:
            return ratio
    return ordered[-1][0]  # what rounding left


def _size(num_rows: int) -> int:
    """Steps of 1, 2–3, 4–7, 8–15 … rows are of a size."""
    return num_rows.bit_length()


def _nearest(by_size: Mapping[int, _T], num_rows: int) -> _T | None:
    size = _size(num_rows)
    return by_size[min(by_size, key=lambda known: abs(known - size))] if by_size else None


def _read_ratios(known: Any) -> dict[str, dict[int, float]]:
    """Ratios from JSON; none where it is damaged: it can be learned again."""
    try:
        told = (known or {}).get("ratios", {})
        ratios = {str(name): {int(size): float(each[size]) for size in each} for name, each in told.items()}
    except (AttributeError, TypeError, ValueError):
        return {}
    fine = all(
        size >= 1 and 1 / _WIDEST <= ratio <= _WIDEST for each in ratios.values() for size, ratio in each.items()
    )
    return ratios if fine else {}

"""What a step of one engine costs, as a function of its tokens, its rows and the cache entries it reads.

::

    seconds(T, B, E) = base(T / B, B) + E * (kv_seconds + kv_token_seconds * T / B)

``base`` is measured at a few widths T / B (tokens a row) and row counts, and linear between them. A cache entry is read
once a step and multiplied with each new token of its row; both parts are fitted to steps with a short and a long past.
Imports the standard library only.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

MAX_REMEMBERED = 4096


class RowCurve(NamedTuple):
    """Measured steps of one row count.

    Attributes:
        num_rows: rows of the step (B).
        widths: new tokens of each row, ascending.
        seconds: of a step over rows without a past, one for each width.
    """

    num_rows: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, width: float) -> float:
        """Seconds at ``width`` tokens a row: linear between measured widths, and beyond the last by the last two."""
        widths, seconds = self.widths, self.seconds
        if width <= widths[0] or len(widths) == 1:
            return seconds[0]  # rows that sit the step out still take part in it
        i = min(bisect_right(widths, width), len(widths) - 1)
        share = (width - widths[i - 1]) / (widths[i] - widths[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of one engine. Never falls with more tokens.

    Attributes:
        curves: measured steps by row count, ascending.
        kv_seconds: for each cache entry that a step reads.
        kv_token_seconds: for each cache entry and each new token of its row.
        noise: how much slower the second fastest repeat of a step was than the fastest, as a share.

    Raises:
        ValueError: nothing was measured, or the numbers are not ascending or not finite.
    """

    curves: tuple[RowCurve, ...]
    kv_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    noise: float = 0.0
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_ascending([curve.num_rows for curve in self.curves])
        for curve in self.curves:
            _check_ascending(curve.widths)
            if len(curve.widths) != len(curve.seconds) or list(curve.seconds) != sorted(curve.seconds):
                raise ValueError(f"the seconds of {curve.num_rows} rows are not one a width, or fall.")
            _check_positive(curve.seconds)
        _check_positive([self.kv_seconds, self.kv_token_seconds, self.noise])

    def seconds(self, num_tokens: int, num_rows: int, kv_entries: float = 0) -> float:
        """Seconds of a step.

        Args:
            num_tokens: new tokens of all rows together (T).
            num_rows: rows of the step (B).
            kv_entries: cache entries that it reads: the sum over its rows.
        """
        base = self._known.get((num_tokens, num_rows))
        if base is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            base = self._known[num_tokens, num_rows] = self._base(num_tokens / num_rows, num_rows)
        return base + kv_entries * (self.kv_seconds + self.kv_token_seconds * num_tokens / num_rows)

    def _base(self, width: float, num_rows: int) -> float:
        curves = self.curves
        last = curves[-1]
        if num_rows >= last.num_rows:  # more rows than were measured: as if they came one batch after another
            return last.at(width) * num_rows / last.num_rows
        i = bisect_right([curve.num_rows for curve in curves], num_rows)
        if i == 0:
            return curves[0].at(width)
        low, high = curves[i - 1], curves[i]
        share = (num_rows - low.num_rows) / (high.num_rows - low.num_rows)
        return (1 - share) * low.at(width) + share * high.at(width)

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "curves": [
                {"num_rows": curve.num_rows, "widths": list(curve.widths), "seconds": list(curve.seconds)}
                for curve in self.curves
            ],
            "kv_seconds": self.kv_seconds,
            "kv_token_seconds": self.kv_token_seconds,
            "noise": self.noise,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepCost":
        """What :meth:`to_json` gave.

        Raises:
            ValueError: a number is missing, of another type, or out of its range.
        """
        try:
            curves = tuple(
                RowCurve(
                    int(curve["num_rows"]),
                    tuple(int(width) for width in curve["widths"]),
                    tuple(float(value) for value in curve["seconds"]),
                )
                for curve in data["curves"]
            )
            return cls(curves, float(data["kv_seconds"]), float(data["kv_token_seconds"]), float(data["noise"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no cost curve: {error!r}") from error


def _check_ascending(values: Seq[int]) -> None:
    if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
        raise ValueError(f"{list(values)} are not ascending counts.")


def _check_positive(values: Iterable[float]) -> None:
    if any(not 0 <= value < math.inf for value in values):  # also refuses NaN
        raise ValueError("a number of seconds is negative or not finite.")


class StepSize(NamedTuple):
    """Rows of a step, and new tokens of each row."""

    num_rows: int
    width: int


def clean_times(times: Mapping[StepSize, float]) -> dict[StepSize, float]:
    """Timings of steps, each cut to what the others prove.

    A disturbed step is too slow, never too fast. A step takes no longer than one that is larger in both ways, and no
    longer than as many smaller ones as do the same work. So the result never falls with rows or width.

    Args:
        times: seconds by size.
    """
    return {
        size: min(
            seconds * -(-size.num_rows // other.num_rows) * -(-size.width // other.width)
            for other, seconds in times.items()
        )
        for size in times
    }


class KvPair(NamedTuple):
    """Two steps that differ in their past only.

    Attributes:
        width: new tokens of each row.
        entries: how many more cache entries the second one reads.
        seconds: how much longer it takes.
    """

    width: int
    entries: int
    seconds: float


def fit_kv_seconds(pairs: Seq[KvPair]) -> tuple[float, float]:
    """``kv_seconds`` and ``kv_token_seconds`` by least squares; neither is below 0 (timings are noisy)."""
    xx = sum(p.entries**2 for p in pairs)
    xy = sum(p.entries**2 * p.width for p in pairs)
    yy = sum((p.entries * p.width) ** 2 for p in pairs)
    xt = sum(p.entries * p.seconds for p in pairs)
    yt = sum(p.entries * p.width * p.seconds for p in pairs)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        each, token = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        if each >= 0 and token >= 0:
            return each, token
        if token > 0:
            return 0.0, max(yt / yy, 0.0)
    return (max(xt / xx, 0.0) if xx else 0.0), 0.0

"""How long a build will take yet: told in one line that stays, on a terminal, and in two elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from specexport.progress import Progress, ProgressEvent

SECONDS: Mapping[str, tuple[float, float]] = {
    "load": (1.0, 3.0),
    "reference": (0.2, 4.4),
    "trace": (3.0, 2.3),
    "passes": (1.8, 0.6),
    "lower": (0.2, 0.1),
    "build": (0.5, 3.4),
    "check": (0.1, 1.1),
}
"""Of each stage of a model, on two cores of a Xeon: seconds of any model, and more for each GB of its files."""
_TRIAL = (1.5, 5.0)
"""Of the trial of a draft's form; the GB are the target's, which writes the texts."""
_PLAN = (2.0, 1.0)
"""Of finding and hashing all files."""
_BUNDLE = 1.5
_DOUBT_S = 30.0
"""Seconds of building that say as much of this machine's speed as what the table says."""


class TimeEstimate:
    """What is left of a build, by its stages' usual shares and by how long those took that are done."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._usual = dict(_usual(sizes))  # seconds of each stage in turn
        self._order = list(self._usual)
        self._begin = self._since = time.monotonic()
        self._done = 0.0  # usual seconds of the stages that are over
        self._current = self._order[0]

    def on_event(self, event: ProgressEvent) -> None:
        """A stage begins; those before it are over, whether they were needed or not."""
        key = (event.role, event.stage)
        if key in self._usual and (place := self._order.index(key)) > self._order.index(self._current):
            self._current, self._since = key, time.monotonic()
            self._done = sum(self._usual[each] for each in self._order[:place])

    @property
    def stage(self) -> str:
        """What is done now."""
        return " ".join(self._current).strip()

    def seconds_left(self) -> float:
        """Seconds until the end, more than 0: a stage that takes longer than it should takes a third more again."""
        now = time.monotonic()
        pace = (self._since - self._begin + _DOUBT_S) / (self._done + _DOUBT_S)
        usual, spent = self._usual[self._current], now - self._since
        later = sum(self._usual.values()) - self._done - usual
        return max(pace * usual - spent, spent / 3, 1.0) + pace * later


def _usual(sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("", "plan"), _PLAN[0] + _PLAN[1] * sum(sizes.values()) / 1e9
    for role, size in sizes.items():
        for stage, (fixed, each_gb) in SECONDS.items():
            yield (role, stage), fixed + each_gb * size / 1e9
            if (role, stage) == ("draft", "build"):
                yield (role, "trial"), _TRIAL[0] + _TRIAL[1] * sizes["target"] / 1e9
    yield ("", "bundle"), _BUNDLE


def describe_seconds(seconds: float) -> str:
    """``about 3 min``, ``about 40 s``, ``a few seconds``: no estimate is better than that."""
    if seconds >= 90:
        return f"about {seconds / 60:.0f} min"
    return f"about {-(-seconds // 5) * 5:.0f} s" if seconds > 5 else "a few seconds"


@contextlib.contextmanager
def show_estimate(stream: TextIO, name: str, sizes: Mapping[str, int]) -> Iterator[Progress]:
    """A progress callback for the build of ``name`` from files of ``sizes`` (bytes of each role)."""
    estimate, begin = TimeEstimate(sizes), time.monotonic()
    if stream.isatty():
        with _show_line(stream, name, estimate):
            yield estimate.on_event
        return
    size, left = sum(sizes.values()), describe_seconds(estimate.seconds_left())
    amount = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    print(f"building {name} from {amount}, which takes {left}", file=stream, flush=True)
    yield estimate.on_event
    print(f"built {name} in {time.monotonic() - begin:.0f} s", file=stream, flush=True)


@contextlib.contextmanager
def _show_line(stream: TextIO, name: str, estimate: TimeEstimate) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import Progress as Lines
    from rich.progress import ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class Left(ProgressColumn):
        def render(self, _task: Any) -> Text:
            left = describe_seconds(estimate.seconds_left())
            return Text(f"building {name}: {estimate.stage}, {left} left", no_wrap=True, overflow="ellipsis")

    column = Left(Column(no_wrap=True, overflow="ellipsis"))
    with Lines(column, console=Console(file=stream), transient=True, refresh_per_second=2) as lines:
        lines.add_task("")
        yield

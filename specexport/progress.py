"""What a build tells while it works: a bar on a terminal; elsewhere a line a stage, which ends with its seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO


class ProgressEvent(NamedTuple):
    """A stage begins, or says something."""

    stage: str  # for example ``"trace"``
    role: str  # ``"target"``, ``"draft"``, or ``""`` for the bundle as a whole
    step: int  # stages begun, this one included
    num_steps: int  # stages in all, if every one is needed
    message: str = ""  # beyond the stage's name; often empty


Progress = Callable[[ProgressEvent], None]


class StageClock:
    """Times stages and reports the begin of each stage and each note to ``progress``, if there is one."""

    def __init__(self, progress: Progress | None, num_steps: int) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._num_steps = num_steps
        self._step = 0
        self._current = ("", "")

    @contextlib.contextmanager
    def stage(self, name: str, role: str = "", message: str = "", *, steps: int = 1) -> Iterator[None]:
        """Time a stage; its seconds go to ``seconds["role.name"]``, also when it raises; the bar moves by ``steps``."""
        self._step += steps
        self._current = (name, role)
        self._report(message)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"{role}.{name}" if role else name] = time.perf_counter() - start

    def skip(self, count: int) -> None:
        """``count`` stages will not be needed."""
        self._step += count

    def note(self, message: str) -> None:
        """Say something about the current stage."""
        self._report(message)

    def _report(self, message: str) -> None:
        if self._progress is not None:
            name, role = self._current
            self._progress(ProgressEvent(name, role, self._step, self._num_steps, message))


@contextlib.contextmanager
def show_progress(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress]:
    """A progress callback that shows a bar on a terminal and a line a stage elsewhere, or with ``quiet`` nothing."""
    if quiet:
        yield lambda _event: None
    elif stream.isatty():
        with _bar(stream) as callback:
            yield callback
    else:
        with _lines(stream) as callback:
            yield callback


@contextlib.contextmanager
def _lines(stream: TextIO) -> Iterator[Progress]:
    """A stage's line is begun when it begins, so that nobody wonders what takes so long, and ended with it."""
    current: list[tuple[tuple[object, ...], float, str]] = []  # the stage that goes on, its begin, an indentation

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    def end() -> None:
        if current:
            write(f"  {time.perf_counter() - current.pop()[1]:.1f} s\n")

    def callback(event: ProgressEvent) -> None:
        what, step = (event.stage, event.role, event.step), f"[{event.step}/{event.num_steps}] "
        if current and current[0][0] == what:
            write(f"\n{current[0][2]}{event.message}")
            return
        end()
        current.append((what, time.perf_counter(), " " * len(step)))
        write(step + _describe(event))

    try:
        yield callback
    finally:
        end()


def _describe(event: ProgressEvent) -> str:
    return f"{event.role} {event.stage}".strip() + (f": {event.message}" if event.message else "")


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("build", total=None)

        def callback(event: ProgressEvent) -> None:
            bar.update(task, description=_describe(event), completed=event.step, total=event.num_steps)

        yield callback

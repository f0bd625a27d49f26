"""What every task is given: options, folders, the time that is left, and what earlier tasks found out."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_check_lib.rows import OUT_OF_TIME, Recorder, Verdict, judge, reason_of


class SkipTaskError(Exception):
    """Raised by a task that cannot be tried here; the message is the reason."""


@dataclass
class Context:
    """See the module."""

    recorder: Recorder  # takes the task's rows
    work: Path  # folder for checkpoints, bundles and what tasks tell each other
    seconds: float  # the task's time limit
    tiny: bool = False  # tiny models and few measurements: a dry run of the logic
    lowering: str = "auto"  # what stands behind attention in TensorRT engines, as for ``specexport build``
    start: float = field(default_factory=time.monotonic)  # when the task began, by ``time.monotonic``

    @property
    def left(self) -> float:
        """Seconds left, less a reserve for ending in good order."""
        return self.start + self.seconds - time.monotonic() - min(3.0, self.seconds / 10)

    def has_time(self, what: str, needed: float) -> bool:
        """Whether ``needed`` seconds are left; writes the row of what is skipped otherwise."""
        if self.left >= needed:
            return True
        self.recorder.row(what, f"skipped: {OUT_OF_TIME} ({max(self.left, 0):.0f} s left)", verdict="skipped")
        return False

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Keep an exception inside one part of a task: it becomes the row of ``what``."""
        try:
            yield
        except SkipTaskError as reason:
            self.recorder.row(what, f"skipped: {reason}", verdict="skipped")
        except Exception as error:  # whatever it is, the other parts go on
            self.recorder.fail(what, error)

    def remember(self, name: str, value: Any) -> None:
        """Tell later tasks something that JSON can hold."""
        path = self.work / "state" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value), encoding="utf-8")

    def recall(self, name: str) -> Any:
        """What an earlier task told, or None."""
        path = self.work / "state" / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def judge_time(self, value: float, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
        """As ``judge``, for figures that mean nothing in a dry run."""
        return "info" if self.tiny else judge(value, at_least=at_least, at_most=at_most)

    def require_backend(self, backend: str) -> None:
        """Skip the task (SkipTaskError) if the backend was tried on this machine and did not run."""
        tried = self.recall(f"backend-{backend}")
        if tried is not None and not tried["runs"]:
            raise SkipTaskError(f"{backend} does not run here: {tried['reason']}")


def run_guarded(context: Context, what: str, function: Any) -> None:
    """Call a task's function; an exception becomes the task's row."""
    try:
        function(context)
    except SkipTaskError as reason:
        context.recorder.row(what, f"skipped: {reason}", verdict="skipped")
    except Exception as error:
        import traceback

        traceback.print_exc()
        context.recorder.row(what, f"failed: {reason_of(error)}", verdict="failed")

"""``serve`` in a process of its own, for tests of signals and exit codes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.cases.patience import HANG_S

QUICK = ("--threads", "1", "--no-spin", "--no-adaptive")
COMMAND = ("-m", "specexport_runtime", "serve")
SLOW_LOAD = """
import sys, time
from specexport_runtime.engine import SpecEngine
load = SpecEngine.load
def slow(*args, **options):
    time.sleep({seconds})
    return load(*args, **options)
SpecEngine.load = slow
from specexport_runtime.cli.command import runtime_cli
runtime_cli(["serve", *sys.argv[1:]])
"""


class ServerProcess:
    """A server, as a context manager; killed at the end if it is still there.

    Args:
        bundle: what it serves.
        *options: more options.
        port: where it listens; 0 takes a free one.
        start: how Python begins.
        environment: more variables.
    """

    def __init__(
        self, bundle: Path, *options: str, port: int = 0, start: Sequence[str] = COMMAND,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        command = [sys.executable, *start, str(bundle), "--port", str(port), *QUICK, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )
        self.url, self._said = "", ""

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def wait_until_ready(self) -> "ServerProcess":
        for line in self.process.stderr:
            self._said += line
            if found := re.search(r"Serving .+ at (http://\S+:\d+)\.", line):
                self.url = found[1]
                return self
        raise AssertionError(self._said)

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and what was written to standard error."""
        out, errors = self.process.communicate(timeout=HANG_S)
        assert not out, out  # a server writes its log, and nothing else
        return self.process.returncode, self._said + errors

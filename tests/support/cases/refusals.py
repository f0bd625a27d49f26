"""How every command refuses: one line with a mend, exit code 2, nothing on standard output, nothing left behind."""

from collections.abc import Callable
from pathlib import Path

from click.testing import Result

RunCli = Callable[..., Result]
Refuse = Callable[..., str]


def line_of(result: Result, *, exit_code: int = 2) -> str:
    assert result.exit_code == exit_code, result.output
    assert not result.stdout
    assert result.stderr.endswith("\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert " Fix: " in line
    assert "Traceback" not in line
    return line


def content_of(folder: Path) -> list[Path]:
    """What lies in a folder, to be compared with what lay there before."""
    return sorted(folder.rglob("*"))

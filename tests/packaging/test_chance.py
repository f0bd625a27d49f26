"""Chance in tests: two runs of the suite draw the same, and ``make fuzz`` draws others that can be drawn again."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import chance

ROOT = Path(__file__).parents[2]
SETTINGS = [ROOT / "tests" / "support" / name for name in ("cases/chance.py", "servers/schema_requests.py")]

DRAWING = """
from tests.support.cases import chance
import hypothesis
from hypothesis import strategies as st

drawn = []


@hypothesis.given(st.integers())
def test_property(number):
    drawn.append(number)


def test_what_was_drawn():
    print("drawn", hash(tuple(drawn)), len(drawn), chance.seed(3), chance.many(7))
"""


def test_no_test_has_settings_of_its_own() -> None:
    """``chance.examples`` changes the number of examples and nothing that makes a run repeatable."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "hypothesis":
                assert path in SETTINGS or "settings" not in {name.name for name in node.names}, path


def drawn(folder: Path, **environment: str) -> list[str]:
    """Hash of the numbers that a run draws, how many, a seed, a count."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (folder / "test_drawing.py").write_text(DRAWING)
    options = ["-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--rootdir"]
    command = [sys.executable, *options, str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {name: value for name, value in os.environ.items() if name != chance.VARIABLE}
    environment = plain | {"PYTHONPATH": path} | environment
    done = subprocess.run([*command, folder], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout
    match = re.search(r"drawn (.*)", done.stdout)
    assert match is not None
    return match[1].split()


@pytest.mark.whole
def test_runs_draw_the_same_and_fuzzing_draws_what_its_seed_says(tmp_path: Path) -> None:
    fuzzing = {chance.VARIABLE: "1"}
    plain, same, first, again = (drawn(tmp_path, **more) for more in ({}, {}, fuzzing, fuzzing))
    assert plain == same
    assert plain[1:] == ["100", "3", "7"]
    assert first == again
    assert (first[1], first[3]) == ("1000", "70")
    assert first[0] != plain[0]
    assert first[2] != "3"

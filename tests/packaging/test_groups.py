"""``xdist_group`` keeps tests on one worker. Not with every pair of pytest and pytest-xdist."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cases.lanes import LIMIT, skip_when_late

ROOT = Path(__file__).parents[2]

TESTS = """
import os, pathlib, pytest


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("group", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("a", "b")])
def test_grouped(number, group):
    with pathlib.Path("ran").open("a") as file:
        file.write(f"{group} {os.environ['PYTEST_XDIST_WORKER']}\\n")


@pytest.mark.parametrize("number", range(12))
def test_alone(number):
    pass
"""


@pytest.mark.whole
def test_all_tests_of_a_group_run_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_groups.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-n2", "--dist=loadgroup", "-pno:cacheprovider", "-pno:schemathesis"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    workers = defaultdict(list)
    for line in (tmp_path / "ran").read_text().splitlines():
        group, worker = line.split()
        workers[group].append(worker)
    assert {group: len(ran) for group, ran in workers.items()} == {"a": 12, "b": 12}
    assert [len(set(ran)) for ran in workers.values()] == [1, 1], workers


def test_the_makefile_asks_for_groups() -> None:
    assert "--dist loadgroup" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("marker", "skipped"), [("whole", True), ("annex", True), ("slow", False)])
def test_a_slow_machine_leaves_out_the_long_lane_alone(
    marker: str, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    item: Any = SimpleNamespace(get_closest_marker=lambda name: name == marker or None)
    monkeypatch.delenv(LIMIT, raising=False)
    skip_when_late(item)
    monkeypatch.setenv(LIMIT, "0")
    if not skipped:
        skip_when_late(item)
        return
    with pytest.raises(pytest.skip.Exception, match="this machine is slow: 0 s of the long lane are over"):
        skip_when_late(item)

"""What a slow machine leaves out of the long lane, and what all tests share."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cases.lanes import LIMIT, skip_when_late
from tests.support.cases.shared import changed_since, made_once


@pytest.mark.parametrize(("marker", "skipped"), [("whole", True), ("annex", True), ("slow", False)])
def test_a_slow_machine_leaves_out_the_long_lane_alone(marker, skipped, monkeypatch):
    item: Any = SimpleNamespace(get_closest_marker=lambda name: name == marker or None)
    monkeypatch.delenv(LIMIT, raising=False)
    skip_when_late(item)
    monkeypatch.setenv(LIMIT, "0")
    if not skipped:
        skip_when_late(item)
        return
    with pytest.raises(pytest.skip.Exception, match="this machine is slow: 0 s of the long lane are over"):
        skip_when_late(item)


def test_what_is_shared_is_made_once_and_noticed_if_it_changes(tmp_path: Path) -> None:
    made = []

    def make() -> None:
        made.append(1)
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_text("x")

    assert made_once(tmp_path / "a", make) == made_once(tmp_path / "a", make)
    assert len(made) == 1
    assert changed_since(tmp_path) == []
    (tmp_path / "a" / "file").write_text("y")
    assert changed_since(tmp_path) == ["a"]

"""What a slow machine leaves out of the long lane."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cases.lanes import LIMIT, skip_when_late


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

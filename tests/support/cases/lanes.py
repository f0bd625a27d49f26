"""Lanes of tests: what every change runs, and what ``make test-all`` adds (marked ``whole``, or ``annex``)."""

import os
import time
from collections.abc import Sequence

import pytest

_BEGAN = time.monotonic()
LIMIT = "SPECEXPORT_LONG_LANE_S"
"""Names the variable that says for how many seconds tests of the long lane are begun; CI ends at an hour and a half."""

EVERY_DAY_MODELS = {"llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next", "mamba2"}
"""Plain, windows, experts, sinks, a hybrid with attention, states alone. The long lane has others of their kinds."""

ANNEXES = {"chat", "playground", "ray_serve", "tools", "train"}
"""Folders of ``tests`` that are an annex's."""
WALK, WALKED = "test_engine_logits_equal_eager_transformers", {"gpt2", "gemma2", "deepseek_v3", "bloom"}
"""Learned positions, softcaps, latent attention and ALiBi too, in the tests of that name."""


def keep_lanes(items: Sequence[pytest.Item], models: set[str]) -> None:
    """Mark an annex's tests, and for the long lane all ``one_of_kind`` but the first parameter that may run daily."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = {value for value in parameters if isinstance(value, str) and value in models}
        every_day = EVERY_DAY_MODELS | (WALKED if item.name.startswith(WALK) else set())
        if named and not named & every_day:
            item.add_marker("whole")
    seen = set()
    for item in items:
        if item.path.parent.name in ANNEXES:
            item.add_marker("annex")
        if item.get_closest_marker("one_of_kind") is not None and item.get_closest_marker("whole") is None:
            kind = item.nodeid.partition("[")[0]
            if kind in seen:
                item.add_marker("whole")
            seen.add(kind)


def skip_when_late(item: pytest.Item) -> None:
    """Leave out a test of the long lane that a slow machine has no time for, and say so."""
    limit = float(os.environ.get(LIMIT, "inf"))
    if time.monotonic() - _BEGAN > limit and any(map(item.get_closest_marker, ("whole", "annex"))):
        pytest.skip(f"this machine is slow: {limit:.0f} s of the long lane are over ({LIMIT})")

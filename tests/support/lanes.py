"""Two lanes of tests: what every change runs, and what ``make test-all`` adds (marked ``whole``)."""

from collections.abc import Sequence

import pytest

EVERY_DAY_MODELS = {"llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next", "mamba2"}
"""Plain, windows, experts, sinks, a hybrid with attention, states alone. The long lane has others of their kinds."""


def keep_lanes(items: Sequence[pytest.Item], models: set[str]) -> None:
    """Mark for the long lane what stands beside a test of the same kind.

    Args:
        items: all tests. Of those marked ``one_of_kind`` one runs every day: the first parameter that may.
        models: names of tiny models, which parameters of tests are.
    """
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = {value for value in parameters if isinstance(value, str) and value in models}
        if named and not named & EVERY_DAY_MODELS:
            item.add_marker("whole")
    seen = set()
    for item in items:
        if item.get_closest_marker("one_of_kind") is not None and item.get_closest_marker("whole") is None:
            kind = item.nodeid.partition("[")[0]
            if kind in seen:
                item.add_marker("whole")
            seen.add(kind)

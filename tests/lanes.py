"""Two lanes of tests: what every change runs, and what ``make test-all`` adds (marked ``whole``)."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet

EVERY_DAY = 90
"""The GPU architecture (sm) whose kernels every run compiles."""


def with_one_every_day(architectures: Iterable[int]) -> list[ParameterSet]:
    """Architectures as parameters, all but :data:`EVERY_DAY` in the long lane."""
    return [pytest.param(sm, marks=[] if sm == EVERY_DAY else [pytest.mark.whole]) for sm in architectures]

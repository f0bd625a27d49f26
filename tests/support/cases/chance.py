"""Chance in tests: the same in every run, until ``make fuzz`` asks for another seed and for ten times as much."""

import os
import random
from typing import Any

from hypothesis import HealthCheck, settings

VARIABLE = "SPECEXPORT_FUZZ_SEED"
FUZZ_SEED: int | None = int(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
MORE = 10
# Hypothesis measures how long inputs take to draw: that depends on what else the machine does.
BUSY_MACHINE = [HealthCheck.too_slow]


def many(usual: int) -> int:
    """How many examples, events or requests: ten times as many under ``make fuzz``."""
    return usual if FUZZ_SEED is None else MORE * usual


def seed(usual: int) -> int:
    """The seed of a test that draws its inputs: ``usual``, or one that follows from it and from the fuzzing seed."""
    return usual if FUZZ_SEED is None else random.Random(f"{FUZZ_SEED} {usual}").getrandbits(31)


def examples(usual: int, *, allow: tuple[HealthCheck, ...] = ()) -> settings:
    """Hypothesis's settings for another number of examples than 100; ``allow``: health checks that fail on purpose."""
    return settings(max_examples=many(usual), suppress_health_check=[*BUSY_MACHINE, *allow])


def load_profile() -> None:
    """Make every property test repeatable: the same examples in each process, and no limit of time."""
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    common: dict[str, Any] = {
        "database": None, "deadline": None, "derandomize": FUZZ_SEED is None, "max_examples": many(100),
        "print_blob": True, "suppress_health_check": BUSY_MACHINE,
    }  # fmt: skip
    settings.register_profile("specexport", **common)
    settings.load_profile("specexport")
    # Hypothesis also tries constants of those of our modules that happen to be loaded: of the tests that ran before.
    providers._get_local_constants = Constants

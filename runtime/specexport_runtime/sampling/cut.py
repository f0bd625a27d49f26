"""A cut: a sampling rule that leaves unlikely tokens out. What is true of one stands in one place, its own file.

A new rule is a file with a :class:`Cut`, and a field of ``SamplingParams`` made with :func:`cut_field`.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple

from specexport_runtime.sampling.distribution import Float32Array, Int64Array

_KEY = "cut"


class Cut(NamedTuple):
    """A rule with one number.

    ``keep(values, value, temperature, peak)`` gives ascending indices of the logits [n] float32 that stay, one or more.
    """

    keep: Callable[[Float32Array, float, float, float], Int64Array]
    off: float  # the number that turns it off
    low: float  # least number
    high: float  # largest number
    help: str  # one line for the command line
    # How far below the peak the logits may lie that stay (0 or less), by number and temperature; None: not known.
    reach: Callable[[float, float], float] | None = None


def cut_field(cut: Cut) -> Any:
    """A field of ``SamplingParams`` that holds a cut's number."""
    return field(default=cut.off, metadata={_KEY: cut})


def cuts_of(params: type) -> Mapping[str, Cut]:
    """The cuts of ``SamplingParams`` by name, in the order in which they are made."""
    return {each.name: each.metadata[_KEY] for each in fields(params) if _KEY in each.metadata}

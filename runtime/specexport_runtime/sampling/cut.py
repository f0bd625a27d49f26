"""A cut: a sampling rule that leaves unlikely tokens out. What is true of one stands in one place, its own file.

A new rule is a file with a :class:`Cut`, and a field of ``SamplingParams`` made with :func:`cut_field`.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple

import numpy as np

from specexport_runtime.sampling.distribution import Float32Array, Int64Array

_KEY = "cut"


class Cut(NamedTuple):
    """A rule with one number, and either ``keep`` or ``reach``.

    ``keep(values, value, temperature, peak)`` gives ascending indices of the logits [n] float32 that stay, one or more.
    ``reach(value, temperature)`` says how far below the peak a logit may lie to stay, 0 or less: such rows need not be
    looked at as a whole.
    """

    keep: Callable[[Float32Array, float, float, float], Int64Array] | None
    off: float  # the number that turns it off
    low: float  # least number
    high: float  # largest number
    help: str  # one line for the command line
    reach: Callable[[float, float], float] | None = None

    def kept(self, values: Float32Array, value: float, temperature: float, peak: float) -> Int64Array:
        """Ascending indices of what stays."""
        if self.reach is not None:
            return np.flatnonzero(values >= np.float32(peak + self.reach(value, temperature)))
        if self.keep is None:
            raise TypeError("a cut has `keep` or `reach`.")
        return self.keep(values, value, temperature, peak)


def cut_field(cut: Cut) -> Any:
    """A field of ``SamplingParams`` that holds a cut's number."""
    return field(default=cut.off, metadata={_KEY: cut})


def list_cuts(params: type) -> Mapping[str, Cut]:
    """The cuts of ``SamplingParams`` by name, in the order in which they are made."""
    return {each.name: each.metadata[_KEY] for each in fields(params) if _KEY in each.metadata}

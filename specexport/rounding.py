"""How far rounding alone moves logits, by dtype and depth: what counts as equal for engines of 16-bit types.

A model of L layers rounds each activation to the dtype, with a relative error of up to its unit roundoff u. Sums are
kept in float32, so their length does not matter; what matters is how often the residual stream is rounded, a fixed
number of times a layer. The errors are independent, so their squares add up: the hidden state is off by u times the
square root of L, times a constant near 1. The LM head turns that into logits that are off in the same proportion, and
the worst of some million of them lies about four standard deviations out. ``docs/lossless.md`` has what was measured.
"""

import math
from typing import NamedTuple

from specexport_runtime.errors import IncompatibleError

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_FLOAT32 = 1e-4
_LARGEST_OVER_RMS = 4.0


class LogitTolerance(NamedTuple):
    """How far an engine's logits may be off, both relative to the logit scale."""

    largest: float  # any one logit
    rms: float  # root of the mean square over the logits of a token. A mistake moves them all, rounding few of them far


def logit_tolerance(dtype: str, num_layers: int) -> LogitTolerance:
    """Tolerance of logits against the same weights in float32, by numpy dtype; IncompatibleError for other dtypes."""
    if dtype == "float32":
        return LogitTolerance(_FLOAT32, _FLOAT32)
    if dtype not in UNIT_ROUNDOFF:
        raise IncompatibleError(f"no tolerance is known for dtype {dtype}.", "verify a float bundle.")
    rms = UNIT_ROUNDOFF[dtype] * math.sqrt(max(1, num_layers))
    return LogitTolerance(_LARGEST_OVER_RMS * rms, rms)

"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

Float32 keeps 24 bits, so a logit of a model a few dozen layers deep comes out within about 1e-6 to 1e-5 of its scale,
whichever order its sums are taken in. A wrong mask, position, scale or cache entry moves logits by 1e-2 of it and more.
"""

import numpy as np

from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import Float32Array

ENGINE_TOLERANCE = {"float32": 1e-4}
"""Largest logit difference between an engine and eager transformers, by dtype, for logits of magnitude up to 1: ten
times above rounding and a hundred times below the smallest real mistake."""

NEAR_TIE_TOLERANCE = 1e-5
"""Largest gap between two logits whose order may depend on the shape of the step, for logits of magnitude up to 1.
Steps of 1 and of K+1 tokens differ by about 1e-6 of the logit scale; either may move, and deep models add more."""


def logit_scale(logits: Float32Array) -> float:
    """What tolerances are multiplied by: the largest finite magnitude of ``logits``, at least 1."""
    finite = np.abs(logits[np.isfinite(logits)])
    return max(1.0, float(finite.max())) if finite.size else 1.0


def engine_tolerance(dtype: str) -> float:
    """Tolerance of an engine's logits, relative to the logit scale.

    Raises:
        IncompatibleError: no tolerance is known for ``dtype``.
    """
    if dtype not in ENGINE_TOLERANCE:
        raise IncompatibleError(f"no tolerance is known for dtype {dtype}.", "verify a float32 bundle.")
    return ENGINE_TOLERANCE[dtype]

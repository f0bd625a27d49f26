"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

Float32 keeps 24 bits, and a step adds the same numbers in another order than eager torch does. Measured over all step
shapes, that moves logits by 6e-7 of their scale in the demo pair and by 3e-6 in Gemma 3 270M. Mistakes made on
purpose in the demo pair: a position off by one moves them by 5e-2 and more, one wrong cache entry of 600 by 1e-3.
"""

import numpy as np

from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import Float32Array

ENGINE_TOLERANCE = {"float32": 1e-4}
"""Largest logit difference between an engine and eager transformers, by dtype, for logits of magnitude up to 1: thirty
times the rounding measured, a tenth of the smallest mistake."""

NEAR_TIE_TOLERANCE = 1e-5
"""Largest gap between two logits whose order may depend on the shape of the step, for logits of magnitude up to 1:
both may move by rounding, so a little more than twice 3e-6."""


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

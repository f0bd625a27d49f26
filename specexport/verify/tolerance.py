"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

Float32 keeps 24 bits, and a step adds the same numbers in another order than eager torch does. Measured over all step
shapes, that moves logits by 6e-7 of their scale in the demo pair and by 3e-6 in Gemma 3 270M. Mistakes made on
purpose in the demo pair: a position off by one moves them by 5e-2 and more, one wrong cache entry of 600 by 1e-3.
"""

from collections.abc import Mapping

import numpy as np

from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import Float32Array

ENGINE_TOLERANCE = {"float32": 1e-4}
"""Largest logit difference between an engine and eager transformers, by dtype, for logits of magnitude up to 1: thirty
times the rounding measured, a tenth of the smallest mistake."""

NEAR_TIE_TOLERANCE = 1e-5
"""Largest gap between two logits whose order may depend on the shape of the step, for logits of magnitude up to 1:
both may move by rounding, so a little more than twice 3e-6."""

NEIGHBOUR_TOLERANCE = 1e-5
"""Largest difference between a token's logits alone in a step and beside others, for logits of magnitude up to 1, for
quantized engines too: their integer sums are exact, and what is left of float arithmetic must not depend on the step's
shape either, because a last bit can decide a rounding to integers. With one activation scale a step the demo pair
differs by 1e-2, with one query alone in the fused attention kernel by 6e-3, and Gemma 3 270M by 1e-1."""

PERPLEXITY_LIMIT = {None: 1e-3, "int8": 0.05, "int4": 1.0}
"""Largest relative rise of perplexity over the float model, by quantization."""


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


def neighbour_tolerance(dtype: str) -> float:
    """Tolerance of a token's logits beside others against the same token alone, relative to the logit scale.

    Raises:
        IncompatibleError: none is known for ``dtype``.
    """
    engine_tolerance(dtype)
    return NEIGHBOUR_TOLERANCE


def perplexity_limit(quantize: str | None) -> float:
    """Largest relative rise of perplexity.

    Raises:
        IncompatibleError: none is known for ``quantize``.
    """
    return _of_kind(PERPLEXITY_LIMIT, quantize)


def _of_kind(limits: Mapping[str | None, float], quantize: str | None) -> float:
    if quantize not in limits:
        raise IncompatibleError(f"no limit is known for quantization {quantize}.", "upgrade specexport.")
    return limits[quantize]

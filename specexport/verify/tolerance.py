"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

What an engine may differ by from eager transformers is in :mod:`specexport.rounding`. Float32 keeps 24 bits, and a step
adds the same numbers in another order than eager torch does. Measured over all step shapes, that moves logits by 6e-7
of their scale in the demo pair and by 3e-6 in Gemma 3 270M. Mistakes made on purpose in the demo pair: a position off
by one moves them by 5e-2 and more, one wrong cache entry of 600 by 1e-3.
"""

from typing import NamedTuple

import numpy as np

from specexport.rounding import LogitTolerance, logit_tolerance
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import Float32Array

NEAR_TIE_TOLERANCE = 1e-5
"""Largest gap between two logits whose order may depend on the shape of the step, for logits of magnitude up to 1:
both may move by rounding, so a little more than twice 3e-6. Of float32 engines; see :func:`near_tie_tolerance`."""

NEIGHBOUR_TOLERANCE = 1e-5
"""Largest difference between a token's logits alone in a step and beside others, for logits of magnitude up to 1, for
quantized engines too: their integer sums are exact, and what is left of float arithmetic must not depend on the step's
shape either, because a last bit can decide a rounding to integers. With one activation scale a step the demo pair
differs by 1e-2, with one query alone in the fused attention kernel by 6e-3, and Gemma 3 270M by 1e-1."""

PERPLEXITY_LIMIT: dict[str | None, float] = {None: 1e-3, "int8": 0.05, "int4": 1.0, "keep": 0.02}
"""Largest relative rise of perplexity over the float model, by quantization."""


DIVERGENCE_LIMIT: dict[str | None, float] = {None: 1e-3, "int8": 0.1, "int4": 1.0, "keep": 0.02}
"""Largest mean divergence from the float model's distributions, in nats, by quantization: some three times the worst of
three models (``docs/quantization.md``)."""


class TextLimits(NamedTuple):
    """What an engine may lose on a text.

    Attributes:
        perplexity: largest relative rise.
        divergence: largest mean divergence, in nats.
    """

    perplexity: float
    divergence: float


def logit_scale(logits: Float32Array) -> float:
    """What tolerances are multiplied by: the largest finite magnitude of ``logits``, at least 1."""
    finite = np.abs(logits[np.isfinite(logits)])
    return max(1.0, float(finite.max())) if finite.size else 1.0


def neighbour_tolerance(dtype: str, num_layers: int) -> LogitTolerance:
    """Tolerance of a token's logits beside others against the same token alone, relative to the logit scale.

    In 16 bits a step of another width sums in another order and rounds anew: both sides may be off.

    Raises:
        IncompatibleError: none is known for ``dtype``.
    """
    if dtype == "float32":
        return LogitTolerance(NEIGHBOUR_TOLERANCE, NEIGHBOUR_TOLERANCE)
    return logit_tolerance(dtype, num_layers)


def near_tie_tolerance(dtype: str, num_layers: int) -> float:
    """Largest gap between two logits whose order may depend on the shape of the step, relative to the logit scale.

    Raises:
        IncompatibleError: none is known for ``dtype``.
    """
    return NEAR_TIE_TOLERANCE if dtype == "float32" else logit_tolerance(dtype, num_layers).largest


def text_limits(quantize: str | None, dtype: str, num_layers: int) -> TextLimits:
    """What the quantization may cost on a text, and what 16 bits may.

    Raises:
        IncompatibleError: no limit is known for ``quantize`` or ``dtype``.
    """
    if quantize not in PERPLEXITY_LIMIT:
        raise IncompatibleError(f"no limit is known for quantization {quantize}.", "upgrade specexport.")
    rounding = 0.0 if dtype == "float32" else logit_tolerance(dtype, num_layers).rms
    return TextLimits(PERPLEXITY_LIMIT[quantize] + rounding, DIVERGENCE_LIMIT[quantize] + rounding)

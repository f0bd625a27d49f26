"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

What an engine may differ by from eager transformers is in :mod:`specexport.rounding`. Float32 keeps 24 bits, and a step
adds the same numbers in another order than eager torch does. Measured over all step shapes, that moves logits by 6e-7
of their scale in the demo pair and by 3e-6 in Gemma 3 270M. Mistakes made on purpose in the demo pair: a position off
by one moves them by 5e-2 and more, one wrong cache entry of 600 by 1e-3.
"""

from typing import NamedTuple

import numpy as np

from specexport.rounding import logit_tolerance
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.base import Float32Array
from specexport_runtime.executors.open import backend_of

PERPLEXITY_LIMIT: dict[str | None, float] = {
    None: 1e-3, "int8": 0.05, "int4": 1.0, "keep": 0.02, "int8 KV cache": 0.02,
}  # fmt: skip
"""Largest relative rise of perplexity over the float model, by what is approximate."""

DIVERGENCE_LIMIT: dict[str | None, float] = {
    None: 1e-3, "int8": 0.1, "int4": 1.0, "keep": 0.02, "int8 KV cache": 0.02,
}  # fmt: skip
"""Largest mean divergence from the float model's distributions, in nats, by what is approximate: some three times the
worst of three models (``docs/quantization.md``)."""


class TextLimits(NamedTuple):
    """What an engine may lose on a text."""

    perplexity: float  # largest relative rise
    divergence: float  # largest mean divergence, in nats


def logit_scale(logits: Float32Array) -> float:
    """What tolerances are multiplied by: the largest finite magnitude of ``logits``, at least 1."""
    finite = np.abs(logits[np.isfinite(logits)])
    return max(1.0, float(finite.max())) if finite.size else 1.0


def step_tolerance(backend: str, dtype: str, num_layers: int) -> float:
    """How far a token's logits may be from those of the same token in another step, relative to the logit scale.

    0 asks for the same bits. In 16 bits a step of another width sums in another order and rounds anew, so that both
    sides may be off, and two logits that are closer may change places. Raises IncompatibleError if none is known for
    ``dtype`` (its numpy name).
    """
    found = backend_of(backend)
    return 0.0 if found is not None and found.same_bits else logit_tolerance(dtype, num_layers).largest


def text_limits(approximation: str | None, dtype: str, num_layers: int) -> TextLimits:
    """What an approximation may cost on a text, and what 16 bits may.

    Raises IncompatibleError if no limit is known for ``approximation`` or ``dtype``.
    """
    if approximation not in PERPLEXITY_LIMIT:
        raise IncompatibleError(f"no limit is known for {approximation}.", "upgrade specexport.")
    rounding = 0.0 if dtype == "float32" else logit_tolerance(dtype, num_layers).rms
    return TextLimits(PERPLEXITY_LIMIT[approximation] + rounding, DIVERGENCE_LIMIT[approximation] + rounding)

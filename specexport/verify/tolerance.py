"""What counts as equal, in one place, with the reasons. All limits grow with the largest logit they are applied to.

What an engine may differ by from eager transformers is in :mod:`specexport.rounding`. Float32 keeps 24 bits, and a step
adds the same numbers in another order than eager torch does. Measured over all step shapes, that moves logits by 6e-7
of their scale in the demo pair and by 3e-6 in Gemma 3 270M. Mistakes made on purpose in the demo pair: a position off
by one moves them by 5e-2 and more, one wrong cache entry of 600 by 1e-3.
"""

from typing import NamedTuple

from specexport.rounding import logit_tolerance
from specexport_runtime.bundle.quant_kinds import get_limits
from specexport_runtime.executors.open import find_engine_backend


class TextLimits(NamedTuple):
    """What an engine may lose on a text."""

    perplexity: float  # largest relative rise over the float model
    divergence: float  # largest mean divergence from the float model's distributions, in nats


_EXACT = TextLimits(1e-3, 1e-3)
"""Of an engine that is the float model."""


def step_tolerance(backend: str, dtype: str, num_layers: int) -> float:
    """How far a token's logits may be from those of the same token in another step, relative to the logit scale.

    0 asks for the same bits. In 16 bits a step of another width sums in another order and rounds anew, so that both
    sides may be off, and two logits that are closer may change places. Raises IncompatibleError if none is known for
    ``dtype`` (its numpy name).
    """
    found = find_engine_backend(backend)
    return 0.0 if found is not None and found.same_bits else logit_tolerance(dtype, num_layers).largest


def text_limits(approximation: str | None, dtype: str, num_layers: int) -> TextLimits:
    """What an approximation may cost on a text, and what 16 bits may; IncompatibleError for unknown ones."""
    limits = _EXACT if approximation is None else get_limits(approximation)
    rounding = 0.0 if dtype == "float32" else logit_tolerance(dtype, num_layers).rms
    return TextLimits(limits.perplexity + rounding, limits.divergence + rounding)

"""Temperature, min-p, top-k and top-p: from processed logits to a distribution."""

import math

import numpy as np

from specexport_runtime.distribution import Distribution, Float32Array, Float64Array
from specexport_runtime.params import SamplingParams


def check_peak(peak: float, logits: Float32Array) -> None:
    """Refuse logits that define no distribution.

    Args:
        peak: the largest logit (NaN if there is any NaN).
        logits: [V'] float32, for the message.

    Raises:
        ValueError: NaN or +inf among the logits, or every token at -inf.
    """
    if math.isfinite(peak):
        return
    if peak == -math.inf:
        raise ValueError(f"all {len(logits)} logits are -inf: no token is possible")
    bad = np.isnan(logits) | np.isposinf(logits)
    first = int(bad.argmax())
    raise ValueError(
        f"{int(bad.sum())} of {len(logits)} logits are NaN or +inf (first: token {first} is {logits[first]})"
    )


def truncated_softmax(logits: Float32Array, params: SamplingParams) -> Distribution:
    """Softmax at ``params.temperature`` (above 0), then min-p, top-k and top-p, each on what the one before left.

    Args:
        logits: [V'] float32, after bias and penalties.
        params: temperature, min_p, top_k, top_p.

    Returns:
        dense if nothing can be cut, otherwise sparse.

    Raises:
        ValueError: see ``check_peak``.
    """
    peak = float(logits.max())
    check_peak(peak, logits)
    scaled = (logits.astype(np.float64) - peak) / params.temperature
    if params.min_p == 0.0 and params.top_k == 0 and params.top_p == 1.0:
        return Distribution(None, _softmax(scaled))
    ids = np.lexsort((np.arange(len(logits)), -scaled))
    if params.min_p > 0.0:
        ids = ids[scaled[ids] >= math.log(params.min_p)]
    if params.top_k > 0:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        cumulative = _softmax(scaled[ids]).cumsum()
        ids = ids[: int(cumulative.searchsorted(params.top_p, side="left")) + 1]
    ids.sort()
    return Distribution(ids, _softmax(scaled[ids]))


def _softmax(scaled: Float64Array) -> Float64Array:
    weights = np.exp(scaled)
    weights /= weights.sum()
    return weights

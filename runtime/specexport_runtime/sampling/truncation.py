"""Temperature, min-p, top-k and top-p: from processed logits to a distribution, without sorting a whole row.

Each stage keeps a set of entries and hands on their ascending indices. A stage first finds a threshold that surely lies
below its cut in a few passes over the row, and sorts only the entries above it. The cuts themselves are exact.
"""

import math

import numpy as np

from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.sampling.distribution import Float32Array, Float64Array, HostDistribution, Int64Array
from specexport_runtime.sampling.params import CUTS, SamplingParams

_BLOCK = 512  # entries per block maximum in top-k
_TINY = 256  # rows up to here are sorted whole: the passes would cost more
_LARGE = 32768  # from here on only a band around the cut is sorted
_SAMPLE = 4096  # entries sampled to find that band


def check_peak(peak: float, logits: Float32Array) -> None:
    """Refuse logits by their largest: CheckFailedError for NaN or +inf, InvalidRequestError for all banned."""
    if math.isfinite(peak):
        return
    if peak == -math.inf:
        raise InvalidRequestError(
            f"all {len(logits)} logits are -inf: no token is possible.", hint="ban fewer tokens in logit_bias."
        )
    bad = np.isnan(logits) | np.isposinf(logits)
    first = int(bad.argmax())
    count = int(bad.sum())
    raise CheckFailedError(
        f"{count} of {len(logits)} logits are NaN or +inf (first: token {first} is {logits[first]}).",
        hint="run `specexport verify` on this bundle.",
    )


def truncated_softmax(logits: Float32Array, params: SamplingParams) -> HostDistribution:
    """Softmax at a temperature above 0, then cuts, top-k, top-p in turn; sparse if anything was cut."""
    peak = float(logits.max())
    check_peak(peak, logits)
    return cut_softmax(logits, params, peak)


@np.errstate(over="ignore")  # a very low logit over a very low temperature is -inf, as it should be
def cut_softmax(
    values: Float32Array,
    params: SamplingParams,
    peak: float,  # the largest logit
    ids: Int64Array | None = None,  # ascending, of ``values``; None: an id is the index
    total: float | None = None,  # the mass of the whole row, exp((x - peak) / T), if only top-p cuts; None: ``values``'
) -> HostDistribution:
    """As :func:`truncated_softmax`, from logits that hold all that the cuts keep."""
    for name, cut in CUTS.items():
        number = getattr(params, name)
        if number != cut.off:
            kept = cut.kept(values, number, params.temperature, peak)
            ids, values = kept if ids is None else ids[kept], values[kept]
    if 0 < params.top_k < len(values) and (len(values) > _TINY or params.top_p == 1.0):
        kept = top_k_indices(values, params.top_k)
        ids, values = kept if ids is None else ids[kept], values[kept]
    if params.top_p == 1.0:
        probs = _weights(values, params.temperature, peak)
    else:
        reach = _top_p if len(values) > _TINY else _cut_few
        kept, probs = reach(values, params, peak, total)
        ids = kept if ids is None else ids[kept]
    probs *= 1.0 / probs.sum()
    return HostDistribution(ids, probs)


def _cut_few(
    values: Float32Array, params: SamplingParams, peak: float, total: float | None
) -> tuple[Int64Array, Float64Array]:
    """Top-k, then top-p as :func:`_top_p`, by one sort."""
    weights = _weights(values, params.temperature, peak)
    kept = (-values).argsort(kind="stable")  # on a tie the lower index first
    if 0 < params.top_k < len(values):
        kept = kept[: params.top_k]
    if total is None:  # summed in the order of indices, as everywhere
        total = float((weights if len(kept) == len(values) else weights[np.sort(kept)]).sum())
    kept = kept[: int(weights[kept].cumsum().searchsorted(params.top_p * total)) + 1]
    kept.sort()
    return kept, weights[kept]


def top_k_indices(values: Float32Array, k: int) -> Int64Array:
    """Ascending indices of the ``k`` largest values; among equal ones the lower index wins. 1 <= k < len(values)."""
    count = len(values)
    blocks = count // _BLOCK
    if k > blocks:
        return _largest(values, k, np.partition(values, count - k)[count - k])
    # The k-th largest block maximum has k values at or above it, so the k largest values are among these.
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    candidates = np.flatnonzero(values >= np.partition(maxima, blocks - k)[blocks - k])
    if len(candidates) == k:
        return candidates
    rows = values[candidates]
    return candidates[_largest(rows, k, np.partition(rows, len(rows) - k)[len(rows) - k])]


def _top_p(
    values: Float32Array, params: SamplingParams, peak: float, total: float | None
) -> tuple[Int64Array, Float64Array]:
    """Indices and masses of the fewest largest of ``values`` [n] that reach top-p of ``total``, at least one."""
    top_p, temperature = params.top_p, params.temperature
    candidates, tail = None, 0.0
    if total is None:
        candidates, tail = _candidates(values, top_p, temperature, peak)
    if candidates is not None:
        values = values[candidates]
    weights = _weights(values, temperature, peak)
    goal = top_p * (float(weights.sum()) + tail if total is None else total)
    kept = _cut_in_band(values, weights, goal) if len(values) >= _LARGE else None
    if kept is None:
        kept = _cut_by_sorting(values, weights, goal)
    return kept if candidates is None else candidates[kept], weights[kept]


def _candidates(values: Float32Array, top_p: float, temperature: float, peak: float) -> tuple[Int64Array | None, float]:
    """A superset of what top-p keeps (None: all values), and the weight of the rest, from float32 passes."""
    weights = values - np.float32(peak)
    weights *= np.float32(1.0 / max(temperature, 1e-30))
    np.exp(weights, out=weights)
    # Entries below this weight have less than 1 - top_p of the mass even all together, so none of them is needed.
    # (Half of it, so that rounding in the float32 sum does not matter.)
    mask = weights >= np.float32(0.5 * (1.0 - top_p) * float(weights.sum()) / len(values))
    if 2 * int(np.count_nonzero(mask)) > len(values):
        return None, 0.0
    candidates = np.flatnonzero(mask)
    weights[candidates] = 0.0
    return candidates, float(weights.sum())  # a small part of the mass: float32 is precise enough for it


def _cut_by_sorting(values: Float32Array, weights: Float64Array, goal: float) -> Int64Array:
    """Indices of the fewest largest values that reach ``goal``; weights are a non-decreasing function of values."""
    ordered = np.sort(values)[::-1]
    count = _count_to_reach(np.sort(weights)[::-1], goal)
    return _largest(values, count, ordered[count - 1])


def _cut_in_band(values: Float32Array, weights: Float64Array, goal: float) -> Int64Array | None:
    """As ``_cut_by_sorting``, sorting only near the cut, which a sample locates; None if the sample misled."""
    step = len(values) // _SAMPLE
    ordered = np.sort(values[::step])[::-1]
    sampled = np.sort(weights[::step])[::-1]
    middle = _count_to_reach(sampled, goal / float(weights.sum()) * float(sampled.sum()))
    margin = len(ordered) // 16  # four standard deviations of a rank in the sample, at the least
    above = values > (ordered[middle - margin] if middle > margin else np.inf)
    band = values >= (ordered[middle + margin] if middle + margin < len(ordered) else -np.inf)
    band &= ~above
    inside = np.flatnonzero(band)
    inside_weights = np.sort(weights[inside])[::-1]
    missing = goal - float((weights * above).sum())  # not a BLAS dot: its threads cost more than the sum
    if not 0.0 < missing <= float(inside_weights.sum()):
        return None
    count = _count_to_reach(inside_weights, missing)
    smallest = np.sort(values[inside])[len(inside) - count]
    return _largest(values, int(np.count_nonzero(above)) + count, smallest)


def _count_to_reach(weights: Float64Array, goal: float) -> int:
    """How many leading weights it takes to sum to ``goal``; all of them if they do not."""
    start, before = 0, 0.0
    if len(weights) > 4 * _BLOCK:  # a running sum is slow: take it over blocks, then inside one
        blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()
        block = int(blocks.searchsorted(goal))
        if block == len(blocks):
            return len(weights)
        start, before = block * _BLOCK, float(blocks[block - 1]) if block else 0.0
        weights = weights[start : start + _BLOCK]
    return start + min(int(weights.cumsum().searchsorted(goal - before)) + 1, len(weights))


def _largest(values: Float32Array, count: int, smallest: np.float32) -> Int64Array:
    """Ascending indices of the ``count`` largest values, of which the last one equals ``smallest``."""
    kept = np.flatnonzero(values >= smallest)
    surplus = len(kept) - count
    if surplus == 0:
        return kept
    ties = np.flatnonzero(values[kept] == smallest)
    return np.delete(kept, ties[len(ties) - surplus :])


def _weights(values: Float32Array, temperature: float, peak: float) -> Float64Array:
    """Unnormalised float64 probabilities: exp((value - peak) / temperature)."""
    weights = values.astype(np.float64)
    weights -= peak
    weights /= temperature
    return np.exp(weights, out=weights)

"""Products of packed weights bit by bit, as ``specexport/passes/block_format.py`` says it in words: numpy, slow."""

import numpy as np
import numpy.typing as npt

from specexport.passes import block_format as blocks

_MAX_FACTOR = 16  # of a block's activations: a level times it, and it times a sum of 16 codes, fit in 16 bits
_SMALLEST = np.float32(2.0**-116)  # activations that are all below it count as zeros: 127 * 16 / x would be infinite


def quantize_activations(x: np.ndarray, format: str = "") -> tuple[np.ndarray, npt.NDArray[np.float64]]:  # noqa: A002
    """Activations [T, K] as the operators round them for a format: int32 [T, K filled up], and a scale of each block.

    The largest magnitude of 256 inputs gives their unit, in formats of levels, and their k is the least that has room
    for a block; in others a block has a scale of its own. What holds a NaN or an infinity has the unit or scale NaN.
    """
    units, factors, codes = (
        quantize_levels(x) if format and blocks.parse_layout(format).scale == "level" else quantize_blocks(x)
    )
    return codes, units.astype(np.float64) * factors


def quantize_levels(x: np.ndarray) -> tuple[npt.NDArray[np.float32], np.ndarray, np.ndarray]:
    """Units float32, factors int32 [T, blocks] and codes int32 [T, blocks * 32]: x = unit * factor * code."""
    parts, largest = _largest(x, blocks._SUPER)
    unit, inverse = _steps(largest.max(axis=2), np.float32(127 * _MAX_FACTOR))
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = np.where(inverse[..., None] != 0, largest * inverse[..., None] / np.float32(127), np.float32(0))
    factors = np.clip(np.ceil(wanted), 1, _MAX_FACTOR).astype(np.int32)
    steps = inverse[..., None] / factors.astype(np.float32)
    codes = np.rint(np.where(steps[..., None] != 0, parts, np.float32(0)) * steps[..., None]).astype(np.int32)
    units = np.broadcast_to(unit[..., None], factors.shape)
    return units.reshape(len(x), -1), factors.reshape(len(x), -1), codes.reshape(len(x), -1)


def quantize_blocks(x: np.ndarray) -> tuple[npt.NDArray[np.float32], np.ndarray, np.ndarray]:
    parts, largest = _largest(x, blocks.BLOCK)
    scales, steps = _steps(largest[..., 0], np.float32(127))
    values = np.where(steps[..., None, None] != 0, parts, np.float32(0))
    codes = np.rint(values * steps[..., None, None]).astype(np.int32)
    return scales, np.ones(scales.shape, np.int32), codes.reshape(len(x), -1)


def _largest(x: np.ndarray, group: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Blocks [T, groups, blocks of a group, 32], filled up with zeros, and their largest magnitudes."""
    tokens, k = x.shape
    filled = np.zeros((tokens, blocks._round_up(k, group)), np.float32)
    filled[:, :k] = x
    parts = filled.reshape(tokens, -1, group // blocks.BLOCK, blocks.BLOCK)
    return parts, np.abs(parts).max(axis=3)


def _steps(
    largest: npt.NDArray[np.float32], most: np.float32
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What a code's step stands for, and what activations are multiplied with to become codes."""
    fine = np.isfinite(largest)
    some = fine & (largest >= _SMALLEST)
    inverse = np.divide(most, largest, out=np.zeros_like(largest), where=some)
    steps = np.where(some, np.where(some, largest, 1) / most, np.float32(0))
    return np.where(fine, steps, np.float32(np.nan)).astype(np.float32), inverse


def reference(format: str, packed: np.ndarray, n: int, k: int, x: np.ndarray) -> npt.NDArray[np.float64]:  # noqa: A002
    """The product of activations float32 [T, k] and a packed weight in float64, as the operator rounds them: [T, n]."""
    if format in blocks.FLOATS:
        return x.astype(np.float64) @ blocks.unpack(format, packed, n, k).astype(np.float64).T
    codes, scales, offsets = blocks.stored(format, packed, n, k)
    group = blocks.parse_layout(format).group
    values = codes * np.repeat(scales.astype(np.float64), group, axis=1)[:, :k]
    if offsets is not None:
        values += np.repeat(offsets.astype(np.float64), group, axis=1)[:, :k]
    rounded, steps = quantize_activations(x, format)
    inputs = rounded * np.repeat(steps, blocks.BLOCK, axis=1)
    result: npt.NDArray[np.float64] = inputs[:, :k] @ values.T
    return result


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> npt.NDArray[np.float32]:
    """``a * b + c`` of float32, rounded once: in float64 with an odd last bit where that is inexact."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c.astype(np.float64)
    back = total - product
    lost = (product - (total - back)) + (c.astype(np.float64) - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((lost != 0) & even, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def product(name: str, packed: np.ndarray, n: int, k: int, x: np.ndarray) -> npt.NDArray[np.float32]:
    """[T, n] without a bias, of a format of codes and finite activations [T, k]."""
    form, parts = blocks.parse_layout(name), fields(name, packed, n, k)
    units, factors, codes = (quantize_levels if form.scale == "level" else quantize_blocks)(x)
    width = -(-k // blocks.BLOCK) * blocks.BLOCK
    weights = np.zeros((n, codes.shape[1]), np.int64)
    weights[:, :k] = parts["codes"]
    span = 16 if form.group < blocks.BLOCK else blocks.BLOCK
    out = np.zeros((len(x), n), np.float32)

    def sums(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Of products, and of activations, over some inputs: int64."""
        return codes[:, first:last].astype(np.int64) @ weights[:, first:last].T, codes[:, first:last].sum(axis=1)

    if form.scale != "level":
        for first in range(0, width, blocks.BLOCK):
            scale, places = units[:, first // blocks.BLOCK], range(first, first + blocks.BLOCK, span)
            for at in places:
                weight = _of(parts["scales"], at // form.group)
                out = fma(sums(at, at + span)[0].astype(np.float32), weight[None] * scale[:, None], out)
            for at in places if "offsets" in parts else ():
                share = sums(at, at + span)[1].astype(np.float32) * scale
                out = fma(_of(parts["offsets"], at // form.group)[None], share[:, None], out)
        return out
    for start in range(0, width, 256):
        total, below = np.zeros((len(x), n), np.int64), np.zeros((len(x), n), np.int64)
        for at in range(start, min(start + 256, width), span):
            each, own = sums(at, at + span)
            factor = factors[:, at // blocks.BLOCK].astype(np.int64)
            total += each * factor[:, None] * _of(parts["levels"], at // form.group)[None]
            if "minima" in parts:
                below += (own * factor)[:, None] * _of(parts["minima"], at // form.group)[None]
        unit = units[:, start // blocks.BLOCK, None]
        found = _int32(total).astype(np.float32) * parts["bases"][None, :, start // 256]
        if "minima" in parts:
            found = fma(_int32(below).astype(np.float32), parts["leasts"][None, :, start // 256], found)
        out = fma(found, unit, out)
    return out


def fields(name: str, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
    """What a packed weight stores: codes less their zeros [n, k], and the arrays of its panels as numbers."""
    form = blocks.parse_layout(name)
    codes, scales, offsets = blocks.stored(name, packed, n, k)
    found = {"codes": codes, "scales": scales} | ({} if offsets is None else {"offsets": offsets})
    if form.shift == "zero":  # codes as they are, and -scale * zero
        zeros = _array(form, packed, n, k, "zeros")
        found["codes"] = codes + np.repeat(zeros, form.group, axis=1)[:, :k].astype(np.int32)
        found["offsets"] = -scales * zeros.astype(np.float32)
    if form.scale == "level":
        found["levels"] = _array(form, packed, n, k, "levels").astype(np.int64)
        found["bases"] = _array(form, packed, n, k, "bases").astype(np.float32)
    if form.shift == "minima":
        found["minima"] = _array(form, packed, n, k, "minima").astype(np.int64)
        found["leasts"] = _array(form, packed, n, k, "leasts").astype(np.float32)
    return found


def _array(form: blocks.Layout, packed: np.ndarray, n: int, k: int, name: str) -> np.ndarray:
    pieces = []
    for _, _, _, arrays in blocks._locate_panels(form, k):
        dtype, first, last, byte = arrays[name]
        part = np.ascontiguousarray(packed[:, byte : byte + dtype.itemsize * (last - first) * blocks.TILE])
        pieces.append(
            part.view(dtype).reshape(-1, last - first, blocks.TILE).transpose(0, 2, 1).reshape(-1, last - first)
        )
    return np.concatenate(pieces, axis=1)[:n]


def _of(numbers: np.ndarray, group: int) -> np.ndarray:
    return numbers[:, group] if group < numbers.shape[1] else np.zeros(len(numbers), numbers.dtype)


def _int32(sums: np.ndarray) -> np.ndarray:
    assert np.abs(sums).max(initial=0) < 1 << 31, "a sum of 256 inputs has no room in int32"
    return sums.astype(np.int32)

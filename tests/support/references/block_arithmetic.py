"""Products of packed weights bit by bit, as ``specexport/passes/block_format.py`` says it in words: numpy, slow."""

import numpy as np
import numpy.typing as npt

from specexport.passes import block_format as blocks


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
    form, parts = blocks.layout(name), fields(name, packed, n, k)
    units, factors, codes = (blocks.quantize_levels if form.scale == "level" else blocks._quantize_blocks)(x)
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
    """What a packed weight stores: codes less their zeros [n, k], and the arrays of its stretches as numbers."""
    form = blocks.layout(name)
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
    for _, _, _, arrays in blocks._places(form, k):
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

"""Packed weights of the CPU's operators: which formats there are, and where each byte lies.

A weight [N, K] is cut into tiles of 16 outputs, and these into panels of 1024 inputs, one after the other. Of a
panel there is what its scales and offsets are made of, filled up to a multiple of 64 bytes, then the codes of its
blocks of 32 inputs. ``runtime/operators/formats.h`` reads the same::

    value[n, k] = scale * (code - zero) + offset

Codes of a block lie in *planes* of lines of 64 bytes: of 16 outputs the four codes of a *quad* of inputs. A nibble
plane has the quads q and q + 4 in the halves of line q, a plane of two bits the quads j, j + 2, … in line j, a plane of
one bit quad q in bit q of each byte. Lines of all planes of a block lie together, one for each bit of a code.

==================  =====================================================  ===============================
arrays, in order    when                                                   elements
==================  =====================================================  ===============================
scales              ``half``, ``single``                                   float16 or float32 [groups, 16]
                    ``power``: 2^(e - 128)                                 uint8 [groups, 16]
levels, bases       ``level``: scale = base * level                        int8 [groups, 16], float16 [supers, 16]
offsets             ``offset``                                             as the scales
zeros               ``zero``: of each group                                uint8 [groups, 16]
minima, leasts      ``minima``: offset = least * minimum                   uint8 [groups, 16], float16 [supers, 16]
==================  =====================================================  ===============================

Float weights are [K, 16] a tile. Everything here is numpy.

Products round activations to 8 bits, and have the same bits on every processor. With ``level`` an activation is
``unit * k * code``: one unit for 256 inputs, and for each 32 of them k, an integer from 1 to 16. Then all is integers
over 256 inputs, and two or three roundings, in this order (``fma`` rounds once, ``float`` to nearest even)::

    S = sum of level * k * (weight's code - zero) * code      T = sum of minimum * k * code
    out = fma(float(S) * base, unit, out)                     without minima
    out = fma(fma(float(T), least, float(S) * base), unit, out)

Both sums fit in int32 for what files hold with k up to 16, and are taken modulo 2^32. In other formats 32
activations share a float32 scale, and each block, or each of its halves where there are groups of 16, adds
``out = fma(float(S), weight's scale * scale, out)``, then ``fma(offset, scale * float(sum of codes), out)`` for each
offset, where codes are taken as they are, from 0 on. Blocks follow one another; a bias comes last.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport.passes.block_weight import Blocks, BlockWeight
from specexport_runtime.executors.base import Float32Array

Packed = npt.NDArray[np.uint8]

TILE = 16
"""Outputs of a tile."""
BLOCK = 32
"""Inputs whose activations share a scale."""
PANEL = 1024
"""Inputs of a panel."""
_SUPER = 256  # inputs that share a base
_LINE = 64
_CHUNK = 1 << 22  # weights worked on at a time: bounds the memory beside the result
_KEPT_CHUNK = 1 << 20  # of those that are read as they are stored: the system need not give memory for each anew
BOOKS = {
    "iq4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16),
    "fp4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16),
}
"""What codes of formats with a codebook stand for."""


class Layout(NamedTuple):
    """What a format's name stands for."""

    bits: int  # of a code
    group: int  # inputs that share a scale, 16 to 1024: a power of two
    scale: str  # ``half``, ``single``, ``level``, or ``power`` of two
    shift: str = ""  # ``""`` for the middle of the codes, ``offset``, ``zero`` or ``minima``
    bias: int = 0  # the codes of a ``BlockWeight`` are larger by it
    lookup: str = ""  # the codebook of ``BOOKS`` that codes are places in; empty without one

    @property
    def zero(self) -> int:
        """The code that stands for 0, where nothing else says so."""
        return 0 if self.shift else 128 if self.lookup else 1 << (self.bits - 1)


NAMED = {
    "int8": Layout(8, 32, "half"),
    "int4": Layout(4, 32, "half"),
    "int4_offset": Layout(4, 32, "half", "offset"),
    "int5": Layout(5, 32, "half", bias=112),
    "int5_offset": Layout(5, 32, "half", "offset", bias=112),
    "q2_k": Layout(2, 16, "level", "minima", bias=6),
    "q3_k": Layout(3, 16, "level", bias=4),
    "q4_k": Layout(4, 32, "level", "minima"),
    "q5_k": Layout(5, 32, "level", "minima", bias=112),
    "q6_k": Layout(6, 16, "level", bias=96),
    "iq4_nl": Layout(4, 32, "half", lookup="iq4"),
    "iq4_xs": Layout(4, 32, "level", lookup="iq4"),
    "mxfp4": Layout(4, 32, "power", lookup="fp4"),
}
"""Formats with a name. ``group4_64_f16`` is 4 bits with a float16 scale for 64 inputs; ``f32`` is there
too, and after either ``_zero`` (a byte for the code that stands for 0) or ``_offset``."""
FLOATS = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of a value of the formats that are no codes."""
_KINDS = {
    "Q4_0": "int4",
    "Q4_1": "int4_offset",
    "Q5_0": "int5",
    "Q5_1": "int5_offset",
    "Q8_0": "int8",
    **{name.upper(): name for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")},
}
_GROUPS = ("16", "32", "64", "128", "256", "512", "1024")
_GROUP = re.compile(r"group([48])_(\d+)_(f16|f32)(?:_(zero|offset))?")


def parse_layout(format: str) -> Layout:  # noqa: A002 what everyone calls it
    """What a format of codes stands for; ValueError if there is none of that name."""
    if format in NAMED:
        return NAMED[format]
    if (found := _GROUP.fullmatch(format)) and found[2] in _GROUPS:
        return Layout(int(found[1]), int(found[2]), "half" if found[3] == "f16" else "single", found[4] or "")
    raise ValueError(f"there is no block format {format!r}")


def choose_format(weight: BlockWeight) -> str:
    """The format that holds a checkpoint's weight exactly, with the fewest bytes."""
    if weight.format:
        return weight.format
    if weight.kind in _KINDS and weight.spread is not None:
        return _KINDS[weight.kind]
    if weight.spread is not None and weight.spread.values == weight.form.block and not weight.form.has_offsets:
        return f"group{weight.form.bits}_{weight.form.block}_f16"  # several kinds, one below the other
    half, zero = True, True
    for rows in _chunks(*weight.shape):
        blocks = weight.read(rows)
        half = half and _fits_half(blocks.scales)
        zero = zero and (blocks.offsets is None or _zeros(blocks, weight.form.zero) is not None)
    shift = "" if not weight.form.has_offsets else "_zero" if zero else "_offset"
    number = "f16" if half and shift != "_offset" else "f32"
    return f"group{weight.form.bits}_{weight.form.block}_{number}{shift}"


def packed_shape(format: str, n: int, k: int) -> tuple[int, int]:  # noqa: A002
    """Tiles of a weight [n, k], and bytes of a tile."""
    tiles = -(-n // TILE)
    if format in FLOATS:
        return tiles, _round_up(TILE * k * FLOATS[format], _LINE)
    form = parse_layout(format)
    return tiles, sum(_head_bytes(form, part) + _code_bytes(form, part) for part in _panels(k))


def pack(format: str, weight: BlockWeight) -> Packed:  # noqa: A002
    """A weight in ``format``, uint8 [tiles, bytes of a tile]; ValueError if the format cannot hold it."""
    form, (n, k) = parse_layout(format), weight.shape
    _check_weight_fits(format, form, weight)
    shape = packed_shape(format, n, k)
    result = np.zeros(shape, np.uint8)
    for rows in _chunks(n, k, _CHUNK if weight.format else _KEPT_CHUNK):
        blocks = weight.read(rows)
        tiles = slice(int(rows[0]) // TILE, int(rows[-1]) // TILE + 1)
        codes, values = _plain_codes(blocks.codes, form), _parameters(form, blocks, weight.form.zero)
        for start, inputs, at, arrays in _locate_panels(form, k):
            for name, (dtype, first, last, byte) in arrays.items():
                size = dtype.itemsize * (last - first) * TILE
                part = result[tiles, byte : byte + size].view(dtype).reshape(-1, last - first, TILE)
                _write_columns(part, values[name][:, first:last])
            size = _code_bytes(form, inputs)
            _pack_codes(result[tiles, at : at + size], form, codes[:, start : start + inputs], inputs)
    return result


def pack_float(format: str, channels: np.ndarray | Iterator[np.ndarray], n: int, k: int) -> Packed:  # noqa: A002
    """A float weight in ``f32``, ``bf16`` or ``f16``, rounded to nearest even: uint8 [tiles, bytes of a tile].

    ``channels`` are the weight [n, k], or its rows one chunk after the other; ValueError if these are not n rows of k.
    """
    result = np.zeros(packed_shape(format, n, k), np.uint8)
    kind = np.dtype(f"u{FLOATS[format]}")
    view = result[:, : TILE * k * FLOATS[format]].view(kind).reshape(-1, k, TILE)
    row = 0
    for chunk in iter([channels]) if isinstance(channels, np.ndarray) else channels:
        for part in np.split(chunk, range(-row % TILE, len(chunk), max(TILE, _CHUNK // max(k, 1) // TILE * TILE))):
            if not len(part):
                continue
            if row + len(part) > n or part.shape[1:] != (k,):
                raise ValueError(
                    f"a weight [{n}, {k}] was expected, and {row + len(part)} rows of {part.shape[1:]} came"
                )
            bits = _float_bits(format, part)
            for first in range(0, len(part), TILE):  # of one tile each, all of them but the first and the last whole
                rows = bits[first : first + TILE]
                view[(row + first) // TILE, :, row % TILE : row % TILE + len(rows)] = rows.T
            row += len(part)
    if row != n:
        raise ValueError(f"a weight of {n} rows was expected, and {row} came")
    return result


def unpack(format: str, packed: Packed, n: int, k: int) -> Float32Array:  # noqa: A002
    """The values [n, k] that a packed weight stores, as an embedding looks them up: for tests, and to look at."""
    if format in FLOATS:
        bits = packed[:, : TILE * k * FLOATS[format]].view(f"u{FLOATS[format]}").reshape(-1, k, TILE)
        rows = np.ascontiguousarray(bits.transpose(0, 2, 1)).reshape(-1, k)[:n]
        if format == "bf16":
            return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return rows.view(np.float16 if format == "f16" else np.float32).astype(np.float32)
    codes, scales, offsets = stored(format, packed, n, k)
    form = parse_layout(format)
    spread = np.repeat(scales, form.group, axis=1)[:, :k]
    values = codes.astype(np.float32) * spread
    return values if offsets is None else values + np.repeat(offsets, form.group, axis=1)[:, :k]


def stored(format: str, packed: Packed, n: int, k: int) -> tuple[np.ndarray, Float32Array, Float32Array | None]:  # noqa: A002
    """Codes less their zeros int32 [n, k], float32 scales [n, groups], and offsets or None, of a packed weight."""
    form = parse_layout(format)
    parts, found = [], dict[str, list[np.ndarray]]()
    for _, inputs, at, arrays in _locate_panels(form, k):
        taken = _unpack_codes(packed[:, at : at + _code_bytes(form, inputs)], form, -(-inputs // BLOCK))
        parts.append(taken[:n, :inputs].astype(np.int32))
        for name, (dtype, first, last, byte) in arrays.items():
            size = dtype.itemsize * (last - first) * TILE
            part = np.ascontiguousarray(packed[:, byte : byte + size]).view(dtype).reshape(-1, last - first, TILE)
            found.setdefault(name, []).append(part.transpose(0, 2, 1).reshape(-1, last - first)[:n])
    whole = {name: np.concatenate(pieces, axis=1) for name, pieces in found.items()}
    codes = np.concatenate(parts, axis=1)
    if form.lookup:
        codes = BOOKS[form.lookup].astype(np.int32)[codes] + 128
    groups, share = -(-k // form.group), max(1, _SUPER // form.group)

    def spread(name: str) -> Float32Array:
        return np.repeat(whole[name], share, axis=1)[:, :groups].astype(np.float32)

    if form.scale == "level":
        scales = spread("bases") * whole["levels"].astype(np.float32)
    else:
        scales = (
            whole["scales"]
            if form.scale != "power"
            else np.ldexp(np.float32(1), whole["scales"].astype(np.int32) - 128)
        )
    offsets = None
    if form.shift == "offset":
        offsets = whole["offsets"].astype(np.float32)
    elif form.shift == "minima":
        offsets = spread("leasts") * whole["minima"].astype(np.float32)
    zeros = np.repeat(whole["zeros"], form.group, axis=1)[:, :k].astype(np.int32) if form.shift == "zero" else form.zero
    return codes - zeros, scales.astype(np.float32), offsets


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def _chunks(n: int, k: int, size: int = _CHUNK) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of whole tiles, the last filled up by nothing."""
    step = max(TILE, size // max(k, 1) // TILE * TILE)
    return (np.arange(start, min(start + step, n)) for start in range(0, n, step))


def _panels(k: int) -> list[int]:
    return [min(PANEL, k - start) for start in range(0, k, PANEL)]


def _arrays(form: Layout) -> dict[str, tuple[np.dtype, int]]:
    """What a panel begins with: names, types, and inputs that share an element."""
    half: np.dtype = np.dtype("<f2")
    byte: np.dtype = np.dtype(np.uint8)
    number = {"half": half, "power": byte}.get(form.scale, np.dtype("<f4"))
    scales = {"scales": (number, form.group)}
    if form.scale == "level":
        scales = {"levels": (np.dtype(np.int8), form.group), "bases": (half, _SUPER)}
    shifts: dict[str, dict[str, tuple[np.dtype, int]]] = {
        "": {},
        "offset": {"offsets": (number, form.group)},
        "zero": {"zeros": (byte, form.group)},
        "minima": {"minima": (byte, form.group), "leasts": (half, _SUPER)},
    }
    return scales | shifts[form.shift]


def _head_bytes(form: Layout, inputs: int) -> int:
    return _round_up(sum(dtype.itemsize * -(-inputs // share) * TILE for dtype, share in _arrays(form).values()), _LINE)


def _code_bytes(form: Layout, inputs: int) -> int:
    return _LINE * form.bits * -(-inputs // BLOCK)


def _locate_panels(form: Layout, k: int) -> Iterator[tuple[int, int, int, dict[str, tuple[np.dtype, int, int, int]]]]:
    """Of each panel its first input, inputs, the byte of its codes, and its arrays: type, first, last, and byte."""
    at = 0
    for index, inputs in enumerate(_panels(k)):
        start, byte, arrays = index * PANEL, at, {}
        for name, (dtype, share) in _arrays(form).items():
            first, last = start // share, -(-(start + inputs) // share)
            arrays[name] = (dtype, first, last, byte)
            byte += dtype.itemsize * (last - first) * TILE
        at += _head_bytes(form, inputs)
        yield start, inputs, at, arrays
        at += _code_bytes(form, inputs)


def _check_weight_fits(format: str, form: Layout, weight: BlockWeight) -> None:  # noqa: A002
    spread, has = weight.spread, weight.form
    fits = form.group == has.block and bool(form.shift) == has.has_offsets
    if form.scale == "level":
        fits = fits and spread is not None and spread.levels and spread.minima == (form.shift == "minima")
    fits = fits and (form.scale == "power") == (spread is not None and spread.powers)
    if not fits:
        raise ValueError(f"the format {format} cannot hold {weight.kind} weights of {has}, {spread}")


def _plain_codes(codes: npt.NDArray[np.uint8], form: Layout) -> npt.NDArray[np.uint8]:
    if form.lookup:
        places = np.zeros(256, np.uint8)
        places[BOOKS[form.lookup] + 128] = np.arange(16)
        return places[codes]
    return codes - np.uint8(form.bias) if form.bias else codes


def _parameters(form: Layout, blocks: Blocks, middle: int) -> dict[str, np.ndarray]:
    """The arrays of some rows, [rows, count] each, by name."""
    kept = blocks.stored
    values: dict[str, np.ndarray] = {}
    if form.scale == "level":
        values |= {"levels": kept.levels, "bases": kept.base}  # type: ignore[union-attr,dict-item]
    else:
        values["scales"] = blocks.scales if kept is None else kept.base
        if form.scale == "power":
            values["scales"] = (np.frexp(values["scales"])[1] + 127).astype(np.uint8)
        if form.scale == "half" and not _fits_half(values["scales"]):
            raise ValueError("scales are none of float16")
    if form.shift == "zero":
        zeros = _zeros(blocks, middle)
        if zeros is None:
            raise ValueError("offsets are no multiples of scales")
        values["zeros"] = zeros
    elif form.shift == "minima":
        values |= {"minima": kept.minima, "leasts": kept.least}  # type: ignore[union-attr,dict-item]
    elif form.shift == "offset" and kept is not None:
        values["offsets"] = kept.least  # type: ignore[assignment]
    elif form.shift == "offset" and blocks.offsets is not None:
        values["offsets"] = blocks.offsets - np.float32(middle) * blocks.scales
    return values


def _fits_half(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def _zeros(blocks: Blocks, middle: int) -> npt.NDArray[np.uint8] | None:
    """The codes that stand for 0, if offsets are whole multiples of scales."""
    scales, offsets = blocks.scales, blocks.offsets
    if offsets is None:
        return np.full(scales.shape, middle, np.uint8)
    steps = np.rint(np.divide(offsets, scales, out=np.zeros_like(offsets), where=scales != 0))
    inside = (steps <= middle) & (steps >= middle - 255) & (steps * scales == offsets)
    return (middle - steps).astype(np.uint8) if bool(inside.all()) else None


def _write_columns(out: np.ndarray, values: np.ndarray) -> None:
    """Put [rows, count] into [tiles, count, 16]; what is missing stays 0."""
    rows, count = values.shape
    whole = rows // TILE
    out[:whole, :count] = values[: whole * TILE].reshape(whole, TILE, count).transpose(0, 2, 1)
    if rows % TILE:
        out[whole, :count, : rows % TILE] = values[whole * TILE :].T


def _pack_codes(out: Packed, form: Layout, codes: npt.NDArray[np.uint8], k: int) -> None:
    """Put codes [rows, k] into the planes of tiles [tiles, bytes]."""
    tiles, blocks, bits = len(out), -(-k // BLOCK), form.bits
    if codes.shape != (tiles * TILE, blocks * BLOCK):
        filled = np.zeros((tiles * TILE, blocks * BLOCK), np.uint8)
        filled[: len(codes), :k] = codes
        codes = filled
    quads = np.ascontiguousarray(codes).view("<u4").reshape(tiles, TILE, blocks, 8)
    lines = quads
    if bits != 8:
        planes, left = [], bits
        if left >= 4:
            low = quads & np.uint32(0x0F0F0F0F)
            planes.append(low[..., :4] | (low[..., 4:] << np.uint32(4)))
            left -= 4
        if left >= 2:
            two = (quads >> np.uint32(4 if bits == 6 else 0)) & np.uint32(0x03030303)
            planes.append(two[..., :2] | (two[..., 2:4] << 2) | (two[..., 4:6] << 4) | (two[..., 6:] << 6))
            left -= 2
        if left:
            one = (quads >> np.uint32(bits - 1)) & np.uint32(0x01010101)
            planes.append(np.bitwise_or.reduce(one << np.arange(8, dtype=np.uint32), axis=-1, keepdims=True))
        lines = planes[0] if len(planes) == 1 else np.concatenate(planes, axis=-1)
    view = out[:, : _LINE * bits * blocks].view("<u4").reshape(tiles, blocks, bits, TILE)
    view[...] = lines.transpose(0, 2, 3, 1)


def _unpack_codes(packed: Packed, form: Layout, blocks: int) -> npt.NDArray[np.uint8]:
    """Codes [tiles * 16, blocks * 32] of tiles; the other way of :func:`_pack_codes`, told from the layout alone."""
    tiles, bits = len(packed), form.bits
    lines = packed[:, : _LINE * bits * blocks].reshape(tiles, blocks, bits, _LINE)
    codes = np.zeros((tiles, blocks, 8, _LINE), np.uint8)
    for quad in range(8):
        if bits == 8:
            codes[:, :, quad] = lines[:, :, quad]
            continue
        line, done = 0, 0
        if bits >= 4:
            codes[:, :, quad] = (lines[:, :, quad % 4] >> (quad // 4 * 4)) & 15
            line, done = 4, 4
        if bits - done >= 2:
            codes[:, :, quad] |= ((lines[:, :, line + quad % 2] >> (quad // 2 * 2)) & 3) << done
            line, done = line + 2, done + 2
        if bits > done:
            codes[:, :, quad] |= ((lines[:, :, line] >> quad) & 1) << done
    by_column = codes.reshape(tiles, blocks, 8, TILE, 4).transpose(0, 3, 1, 2, 4)
    return by_column.reshape(tiles * TILE, blocks * BLOCK)


def _float_bits(format: str, values: np.ndarray) -> np.ndarray:  # noqa: A002
    """The bits of floats in a format, rounded to nearest even."""
    if format == "f32":
        return np.ascontiguousarray(values, np.float32).view(np.uint32)
    if format == "f16":
        return np.ascontiguousarray(values, np.float16).view(np.uint16)
    if values.dtype.name == "bfloat16":
        return np.ascontiguousarray(values).view(np.uint16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)

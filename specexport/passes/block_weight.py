"""A weight as its checkpoint stores it: integers in blocks, which are read and never rounded anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.executors.base import Float32Array

Rows = npt.NDArray[np.int64]


class BlockForm(NamedTuple):
    """What engines must know of a weight's blocks."""

    bits: int  # of an integer, 4 or 8
    block: int  # inputs that share a scale
    has_offsets: bool  # whether each block has an offset too

    @property
    def zero(self) -> int:
        """The code that stands for 0 before the offset: 8 or 128."""
        return 1 << (self.bits - 1)


class ScaleLayout(NamedTuple):
    """How a checkpoint stores scales and offsets: small integers, times a number for several blocks.

    ::

        scales  = base * levels            offsets = shift * scales + least * minima
    """

    values: int  # weights that share a base, and a least
    levels: bool = False  # whether there are levels; else scales are the bases
    minima: bool = False  # whether there are minima; else the least is added as it is
    shift: int = 0  # how many scales an offset holds
    powers: bool = False  # whether bases are powers of two, and may be none of float16


class StoredScales(NamedTuple):
    """Scales and offsets as a checkpoint stores them, see :class:`ScaleLayout`."""

    base: npt.NDArray[np.floating]  # float16 [n, K / values], or float32 powers of two
    levels: npt.NDArray[np.int8] | None = None  # int8 [n, K / block], or None
    least: npt.NDArray[np.float16] | None = None  # float16 [n, K / values]; None without offsets
    minima: npt.NDArray[np.int8] | None = None  # int8 [n, K / block], or None


class Blocks(NamedTuple):
    """Rows of a weight: ``value[n, k] = scales[n, b] * (codes[n, k] - zero) + offsets[n, b]`` with b = k // block."""

    codes: npt.NDArray[np.uint8]  # uint8 [n, K]
    scales: Float32Array  # float32 [n, K / block]
    offsets: Float32Array | None  # float32 [n, K / block]; None without
    stored: StoredScales | None = None  # what scales and offsets were made of, where a weight has a ``spread``


@dataclass(frozen=True)
class BlockWeight:
    """A weight [N, K] in blocks along K."""

    kind: str  # the checkpoint's name of the format, for example ``"Q4_K"``
    form: BlockForm
    shape: tuple[int, int]  # N and K
    stored_bytes: int  # in the checkpoint
    read: Callable[[Rows], Blocks]  # gives the blocks of some rows
    spread: ScaleLayout | None = None  # how scales and offsets are stored; None if as float32
    format: str = ""  # holds it in an engine; empty to find it (``block_format.choose_format``)

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return self.shape[1] // self.form.block

    def take(self, rows: npt.NDArray[np.integer]) -> "BlockWeight":
        """The weight of some rows, in that order."""
        order = rows.astype(np.int64)
        share = len(order) / self.shape[0]
        return replace(
            self,
            shape=(len(order), self.shape[1]),
            stored_bytes=int(self.stored_bytes * share),
            read=lambda wanted: self.read(order[wanted]),
        )

    def floats(self, rows: Rows | None = None) -> Float32Array:
        """float32 values of some rows [n, K]; None for all."""
        wanted = np.arange(self.shape[0]) if rows is None else rows
        codes, scales, offsets, _ = self.read(wanted)
        blocks = codes.reshape(len(wanted), self.num_blocks, self.form.block).astype(np.float32) - self.form.zero
        values = blocks * scales[..., None]
        if offsets is not None:
            values += offsets[..., None]
        return values.reshape(len(wanted), self.shape[1]).astype(np.float32, copy=False)


def add_zero_offsets(weight: BlockWeight) -> BlockWeight:
    """The weight with an offset for each block, of 0 where it has none."""
    if weight.form.has_offsets:
        return weight

    def read(rows: Rows) -> Blocks:
        blocks = weight.read(rows)
        return blocks._replace(offsets=np.zeros_like(blocks.scales), stored=None)

    return replace(weight, form=weight.form._replace(has_offsets=True), read=read, spread=None)


def join(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Weights of one form and depth, one below the other; rows may be asked for in any order."""
    if len(weights) == 1:
        return weights[0]
    bounds = np.cumsum([weight.shape[0] for weight in weights])
    spreads = {weight.spread for weight in weights}
    spread = weights[0].spread if len(spreads) == 1 else None

    def read(rows: Rows) -> Blocks:
        of = np.searchsorted(bounds, rows, side="right")
        parts = [weights[at].read(rows[of == at] - (bounds[at] - weights[at].shape[0])) for at in np.unique(of)]
        codes, scales, offsets, stored = zip(*parts, strict=True)
        in_order = bool((of[1:] >= of[:-1]).all())
        places = slice(None) if in_order else np.argsort(np.argsort(of, kind="stable"))
        return Blocks(
            np.concatenate(codes)[places],
            np.concatenate(scales)[places],
            np.concatenate(offsets)[places] if weights[0].form.has_offsets else None,
            None if spread is None else _join_stored(stored, places),
        )

    return replace(
        weights[0],
        kind="+".join(dict.fromkeys(weight.kind for weight in weights)),
        shape=(int(bounds[-1]), weights[0].shape[1]),
        stored_bytes=sum(weight.stored_bytes for weight in weights),
        read=read,
        spread=spread,
    )


def _join_stored(parts: Sequence[StoredScales], places: Rows | slice) -> StoredScales:
    columns: Any = zip(*parts, strict=True)
    made: list[Any] = [None if column[0] is None else np.concatenate(column)[places] for column in columns]
    return StoredScales(*made)

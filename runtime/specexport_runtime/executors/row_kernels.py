"""The kernels that draw from rows of logits on a GPU: their arguments, sizes and PTX, without what made it.

The PTX is of ``specexport.kernels.sampling``, written by ``python -m specexport.kernels.sampling_ptx``; the driver
compiles it for the GPU at hand.
"""

import ctypes
import math
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
"""Ids of a block."""
PARTS = 1024
"""Most blocks of a row."""
BINS = 32
"""Bins of a row's mass by log-probability below the peak, for top-p."""
PER_BIN = 0.5
"""Nats of a bin."""
K_INLINE = 128
"""Candidates of a cut that come along with a step."""
MAX_CUT = 1024
"""Candidates of a row that the library of operators can cut (``kMaxCandidates`` in ``rows.h``)."""
K_MAX = 4096
"""Candidates that are kept on the device; of more, the whole row is fetched."""


class RowRule(NamedTuple):
    """What is asked of all rows of a request; the last two stay on the host."""

    temperature: float = 0.0  # 0: nothing is asked
    width: int = 0  # ids that count; 0 for all
    least: float = -math.inf  # candidates lie no further below the peak, 0 or less; -inf where no cut says so
    top_k: int = 0  # candidates hold as many of the largest logits; 0 for no such cut
    top_p: float = 0.0  # candidates hold this much of the whole row's mass; 0 for no such cut
    cuts: int = 0  # 1: candidates are wanted
    kept_mass: float = 1.0  # top-p of what the other cuts leave
    fetch: bool = False  # the logits come to the host with the step


class RowAsk(NamedTuple):
    """What is asked of a row of logits."""

    rule: RowRule
    uniform: float = 0.0  # of the token that is drawn
    token: int = -1  # whose probability is wanted too; -1 for none
    slot: int = -1  # the row is kept there for later steps; -1: it is not


def ask_whole_row(width: int) -> RowAsk:
    """The first ``width`` logits come to the host with the step."""
    return RowAsk(RowRule(width=width, fetch=True))


NOTHING = RowAsk(RowRule())
ON_DEVICE = ("temperature", "width", "uniform", "token", "least", "top_k", "top_p", "cuts")
"""What the device is told of each row, float64."""


class RowQuery(ctypes.Structure):
    """``ON_DEVICE`` of one row, as ``rows.h`` declares it."""

    _fields_ = [(name, ctypes.c_double) for name in ON_DEVICE]


ASK = len(ON_DEVICE)
RULE_PLACES = [ON_DEVICE.index(name) for name in RowRule._fields if name in ON_DEVICE]
"""Where a rule's numbers, in its own order, stand among them."""


class RowFound(NamedTuple):
    """What is found in a row, float64 on the device."""

    peak: float  # its largest logit
    total: float  # sum of exp((x - peak) / T); NaN if the row holds NaN or +inf, or no finite logit
    drawn: float  # the token at the uniform
    drawn_probability: float
    token_probability: float  # of the asked one
    candidates: float  # how many there are
    least: float  # the smallest logit that may be one, before top-p
    likeliest: float  # the likeliest token, of a row on a CPU alone

    @property
    def is_whole(self) -> bool:
        """Whether the row defines a distribution."""
        return math.isfinite(self.total)


UNKNOWN = RowFound(*[math.nan] * 8)
"""Of a row that was not asked."""
FOUND = len(RowFound._fields)


class RowResult(ctypes.Structure):
    """``RowFound`` as ``rows.h`` declares it."""

    _fields_ = [(name, ctypes.c_double) for name in RowFound._fields]


class ResidualAsk(NamedTuple):
    """What is asked of two rows: the sum of max(0, w q - p) and the token at a uniform of it; float64, int64."""

    temperature: float  # of q
    width: int
    peak: float
    total: float
    other_temperature: float  # of p
    other_width: int
    other_peak: float
    other_total: float
    weight: float  # w
    token: int  # p is one-hot there; -1: it is not
    uniform: float
    target: int  # address of q's logits, float32
    draft: int  # address of p's


class ResidualQuery(ctypes.Structure):
    """``ResidualAsk`` as ``rows.h`` declares it, and as the device reads it."""

    _fields_ = [
        (name, ctypes.c_int64 if name in ("target", "draft") else ctypes.c_double) for name in ResidualAsk._fields
    ]


class ResidualResult(ctypes.Structure):
    """The sum of a residual, and the token at the uniform; -1 without any mass."""

    _fields_ = [("total", ctypes.c_double), ("token", ctypes.c_double)]


RESIDUAL_ASK = len(ResidualAsk._fields)

CONSTANTS: dict[str, int | float] = {
    "ASK": ASK, "FOUND": FOUND, "BINS": BINS, "PER_BIN": PER_BIN, "BLOCK": BLOCK, "PARTS": PARTS, "K_INLINE": K_INLINE,
    "K_MAX": K_MAX, "RESIDUAL_ASK": RESIDUAL_ASK,
}  # fmt: skip
"""Compile-time parameters of the kernels by name."""
ARGUMENTS = {
    "weigh": ("*fp32", "*fp64", "*fp32", "*fp64", "i32", "i32"),
    "draw": ("*fp32", "*fp64", "*fp32", "*fp64", "*fp64", "*fp64", "*i64", "i32", "i32", "i32"),
    "spread": ("*fp32", "*fp64", "*fp64", "*fp64", "i32"),
    "gather": ("*fp32", "*fp64", "*fp64", "*fp64", "*i32", "*fp32", "*i32", "*fp32", "i32"),
    "weigh_surplus": ("*fp64", "*i64", "*fp64", "i32"),
    "draw_surplus": ("*fp64", "*i64", "*fp64", "*fp64", "i32"),
}
"""Types of the kernels' arguments, in order."""


def ptx_path(kernel: str) -> Path:
    """Where the PTX of a kernel lies; its first line says ``// threads N, shared M``."""
    return Path(__file__).with_name("ptx") / f"{kernel}.ptx"

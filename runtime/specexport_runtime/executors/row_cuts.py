"""What the library of operators (``rows.cpp``) does with rows of logits; cuts of all rows of a step in one call."""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.executors.operators import function
from specexport_runtime.executors.row_kernels import ResidualQuery, ResidualResult, RowQuery, RowResult

_NUMBERS = 5  # float64 of a row


class RowLibrary(NamedTuple):
    """Functions of ``rows.cpp``."""

    cut: Any
    cut_residual: Any
    find: Any
    residual: Any


@functools.cache
def library() -> RowLibrary:
    """The functions; SpecexportError without the library, see ``operators.kernels``."""
    size, at, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    result = ctypes.POINTER(ResidualResult)
    return RowLibrary(
        function("specexport_cut_rows", [size, size, *[at] * 8]),
        function("specexport_cut_residual", [size, at, at, size, at, at, number, number, result]),
        function("specexport_query_row", [at, size, ctypes.POINTER(RowQuery), ctypes.POINTER(RowResult), *[at] * 5]),
        function("specexport_row_residual", [ctypes.POINTER(ResidualQuery), at, result]),
    )


class RowCuts:
    """What cuts leave of the rows of one step."""

    def __init__(self, rows: int, k_inline: int, asks: int, found: int, kept_masses: int, candidates: int) -> None:
        """Of ``rows`` rows and up to ``k_inline`` candidates each, 1024 at most.

        The others are addresses: of asks and answers, ``RowRule.kept_mass`` of each, and candidates, ids first.
        """
        size = k_inline * rows
        memory = np.empty(2 * size + _NUMBERS * rows)
        self._k_inline = k_inline
        self._ids = memory[:size].view(np.int64).reshape(rows, k_inline)
        self._probs = memory[size : 2 * size].reshape(rows, k_inline)
        self._at_ids = ids = int(memory.ctypes.data)
        self._at_probs = probs = ids + 8 * size
        library().cut(
            rows, k_inline, asks, found, kept_masses, candidates, candidates + 4 * size, probs + 8 * size, ids, probs
        )
        # Of each row: how many tokens stay (0: it has no candidates, or too many), the largest probability, the token
        # at the asked uniform, its probability, and that of the asked token.
        self.numbers: list[list[float]] = memory[2 * size :].reshape(rows, _NUMBERS).tolist()

    def kept(self, place: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids [n] of one row, ascending, and their probabilities."""
        count = int(self.numbers[place][0])
        return self._ids[place, :count], self._probs[place, :count]

    def memory(self, place: int) -> tuple[int, int, int]:
        """How many stay of one row, and the addresses of their ids and probabilities."""
        begin = 8 * self._k_inline * place
        return int(self.numbers[place][0]), self._at_ids + begin, self._at_probs + begin


def cut_residual(
    target: tuple[int, int, int], draft: tuple[int, int, int], weight: float, uniform: float
) -> tuple[float, int]:
    """Sum of max(0, ``weight`` q - p), and the token at a uniform of it; rows as ``RowCuts.memory`` gives them."""
    result = ResidualResult()
    library().cut_residual(*target, *draft, weight, uniform, result)
    return result.total, int(result.token)

"""Heads side by side in one graph, each over the rows that ask it and no others."""

from collections.abc import Callable

import torch
from torch import Tensor


def answer_by_head(numbers: Tensor, count: int, answer: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What heads say of the rows that ask them [R, ·], in the order of the rows.

    ``numbers`` int64 [R] has the head that each row asks; a number beyond the last head means the last.
    ``answer(number, mine)`` gives what a head says [n, ·] of the rows ``mine`` int64 [n]. A head that no row asks
    computes nothing.
    """
    numbers = numbers.clamp(0, count - 1)
    parts, rows = [], torch.zeros_like(numbers)
    before = torch.zeros((), dtype=torch.int64)
    for number in range(count):
        mine = numbers == number
        parts.append(answer(number, mine.nonzero().flatten()))
        counted = mine.to(torch.int64)
        rows = rows + counted * (before + counted.cumsum(0) - 1)
        before = before + counted.sum()
    return torch.cat(parts).index_select(0, rows)

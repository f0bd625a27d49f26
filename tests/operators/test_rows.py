"""The library's queries of rows: their structures in both languages, and draws at borders of blocks."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from specexport_runtime.executors import row_kernels
from specexport_runtime.executors.host_rows import HostRows
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler

BLOCK, BLOCKS = 512, 40


def borders(sums: np.ndarray) -> list[float]:
    """Uniforms at and beside those where a block begins."""
    running = np.add.accumulate(sums)
    places = running[:-1] / running[-1]
    return [float(u) for u in np.concatenate([places, np.nextafter(places, 0), np.nextafter(places, 1)])]


@pytest.mark.parametrize("name", ["RowQuery", "RowResult", "ResidualQuery", "ResidualResult"])
def test_structures_have_the_fields_of_the_header(name: str) -> None:
    """In this order; the header says that there are no gaps, and sizes are checked where it is compiled."""
    header = (Path(__file__).parents[2] / "runtime" / "operators" / "rows.h").read_text()
    (body,) = re.findall(rf"struct {name} {{(.*?)}};", re.sub(r"//.*", "", header), re.DOTALL)
    structure = getattr(row_kernels, name)
    assert [field for field, _ in structure._fields_] == re.findall(r"(\w+)(?=[,;])", body)
    (size,) = re.findall(rf"sizeof\({name}\) == (\d+)", header)
    assert int(size) == ctypes.sizeof(structure)


def test_no_token_without_mass_is_drawn_at_a_border_of_blocks() -> None:
    """Neither from a row nor from what a refusal leaves of two, where blocks begin with what has no mass."""
    width = BLOCK * BLOCKS
    source, sampler = HostRows(width, 2), Sampler(SamplingParams(temperature=0.1), [1], width)
    for seed in range(3):
        logits, others = (0.1 * np.random.default_rng(seed).normal(size=(2, 1, width))).astype(np.float32)
        logits[0, ::BLOCK] = -100.0  # 1000 nats below the others
        distributions = [
            sampler.make_row_distribution(source.collect([sampler.ask(0.5, width, slot=slot)], rows)[0])
            for slot, rows in ((1, others), (0, logits))
        ]
        for u in borders(source._memory[2]):
            (row,) = source.collect([sampler.ask(u, width)], logits)
            assert row.found.drawn % BLOCK, f"seed {seed}: a token without mass at {u!r}"
        ask = distributions[1].row.residual_ask(distributions[0].row, 1.0)
        source.residuals([ask])
        for u in borders(source._memory[2]):
            ((_, token),) = source.residuals([ask._replace(uniform=u)])
            assert token % BLOCK, f"seed {seed}: a token without mass in the residual at {u!r}"

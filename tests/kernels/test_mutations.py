"""The tests of the kernels can fail: each of these mistakes is found by at least one case."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cases.kernel_cases import CASES, Case, check, make_step
from tests.support.references.kernel_worker import InterpretedKernels, WorkerError

pytestmark = pytest.mark.xdist_group("kernels-interpreted")

KERNELS = Path(__file__).parents[2] / "specexport" / "kernels"


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    case: str
    splits: int = 1


MUTATIONS = {
    "sees one entry too many": Mutation("tiles.py", "<= query_at", "<= query_at + 1", "ragged"),
    "sees one entry too few": Mutation("tiles.py", "<= query_at", "< query_at", "ragged"),
    "window off by one": Mutation("tiles.py", "query_at - WINDOW", "query_at - WINDOW - 1", "window"),
    "window starts a block late": Mutation(
        "ragged_attention.py", "begin = past - WINDOW + 1", "begin = past - WINDOW + BLOCK_N", "window_of_blocks"
    ),
    "whole blocks reach too far": Mutation(
        "ragged_attention.py", "tl.minimum(past + 1 + first_offset, end)", "end", "prefill"
    ),
    "masks scores but not loads": Mutation(
        "tiles.py", "mask=(entries < total)[:, None] & (columns < D)[None, :], other=0.0",
        "mask=(columns < D)[None, :]", "ragged",
    ),
    "reads another row's cache": Mutation(
        "ragged_attention.py", "lane = (row.to(tl.int64)", "lane = ((row * 0).to(tl.int64)", "permuted_rows"
    ),
    "idle rows shift the others": Mutation("tiles.py", "// BLOCK_M - row)", "// BLOCK_M)", "empty_rows"),
    "looks at one block of rows": Mutation(
        "tiles.py", "for first in range(0, num_seqs, BLOCK_B)", "for first in range(0, 1, BLOCK_B)",
        "more_rows_than_a_search_block",
    ),
    "heads of a group in another order": Mutation(
        "ragged_attention.py", "kv_head * GROUP + index % GROUP", "kv_head + index % GROUP", "heads_3_to_1"
    ),
    "scale forgotten under a softcap": Mutation(
        "ragged_attention.py", "2.0 * LOG2E * SCALE / SOFTCAP", "2.0 * LOG2E / SOFTCAP", "softcap"
    ),
    "a sink for each split": Mutation(
        "ragged_attention.py", "tl.program_id(2) == 0", "tl.program_id(2) >= 0", "sinks", splits=3
    ),
    "tree ignored": Mutation("tiles.py", "ancestor = causal[:, None] |", "ancestor = (nodes >= 0) |", "tree"),
    "tree distance counts entries": Mutation(
        "tiles.py", "distance = tl.where(causal[:, None], offsets[:, None] - nodes, on_path)",
        "distance = offsets[:, None] - nodes", "tree_window",
    ),
    "only 32 tree nodes": Mutation("tiles.py", "nodes < 64", "nodes < 32", "tree_of_64"),
    "sums nobody wrote are read": Mutation(
        "ragged_attention.py", "used[:, None] & (columns < DV)[None, :]", "(columns < DV)[None, :]", "ragged", splits=3
    ),
    "a split short": Mutation("ragged_attention.py", "stop = tl.minimum(begin + blocks * BLOCK_N, end)",
        "stop = tl.minimum(begin + (blocks - 1) * BLOCK_N, end)", "ragged", splits=3,
    ),
    "padding tokens are appended": Mutation(
        "ragged_attention.py", "valid = (tokens < num_tokens) & (rows < num_seqs)",
        "rows = tl.minimum(rows, num_seqs - 1)\n    valid = tokens < num_tokens", "ragged",
    ),
    "appended an entry late": Mutation("ragged_attention.py", "+ tokens - start", "+ tokens - start + 1", "ragged"),
    "padding tokens keep what was there": Mutation(
        "ragged_attention.py", "if is_sane &", "if is_sane & (row < num_seqs) &", "ragged"
    ),
}  # fmt: skip


def notices(kernels: InterpretedKernels, case: Case) -> bool:
    step = make_step(case)
    try:
        check(step, kernels.run(step))
    except AssertionError:
        return True
    except WorkerError as error:
        # What is no number raises in the interpreter. A mistake in the text of a mutation does too, but is no finding.
        if any(kind in str(error) for kind in ("FloatingPointError", "RuntimeWarning")):
            return True
        raise
    return False


@pytest.mark.one_of_kind
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, kernels: InterpretedKernels, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "kernels" / mutation.file
    source = file.read_text(encoding="utf-8")
    assert mutation.old in source
    file.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    kernels.load(tmp_path)
    try:
        assert notices(kernels, replace(CASES[mutation.case], splits=mutation.splits))
    finally:
        kernels.load(None)

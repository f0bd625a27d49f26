"""A token has the same bits in any company: at every width, in every batch, however its prompt was cut, on any threads.

No limit is allowed here, in no format: what verifies drafts must say what plain decoding says.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import repeat
from pathlib import Path
from typing import Any

import chance
import numpy as np
import pytest

from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.engine_harness import compiled
from tests.tiny_gguf import write_gguf
from tests.tiny_models import ARCHITECTURES, GROUPED, HYBRIDS, make_model
from tests.tiny_traces import tiny_model

ROWS, WIDEST, KNOWN = 8, 16, 259
LENGTHS = (35, 19, 33, 8, 27, 1, 40, 22)
NOT_IN_EIGHT_BITS = {"recurrent_gemma"}
KINDS = {"blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "Q8_0", "output.weight": "Q5_0", "": "Q4_K"}

Sizes = Iterator[tuple[int, int]]
"""Of each step of a row: the tokens of its text, and wrong drafts behind them."""


def read(runner: ModelRunner, sequences: Seq[list[int]], sizes: Seq[Sizes], first_row: int = 0) -> list[np.ndarray]:
    """Logits [T, V] of sequences that are read side by side, each in its own pieces; a piece of 0 sits a step out."""
    runner.reset()
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        work, right = [], []
        for at, ids, each in zip(done, sequences, sizes, strict=True):
            own, wrong = next(each)
            tokens = ids[at : at + own]
            drafts = len(tokens) - 1 + wrong if wrong else 0
            work.append(RowWork([*tokens, *[7] * wrong], len(tokens) + wrong, drafts=drafts) if tokens else IDLE)
            right.append(len(tokens))
        if not any(right):
            continue
        logits = runner.step(first_row, work)
        for row, count in enumerate(right):
            if count:
                start = runner.logit_starts[row]
                found[row].append(logits[start : start + count].copy())
                done[row] += count
                runner.kv.commit(first_row + row, done[row])
    return [np.concatenate(parts) for parts in found]


def assert_same_bits(entry: ModelEntry, folder: Path, seed: int = 3) -> None:
    """Read texts token by token, alone; then in all other ways."""
    random = np.random.default_rng(chance.seed(seed))
    sequences = [random.integers(3, KNOWN, length).tolist() for length in LENGTHS]

    def odd() -> Sizes:
        while True:
            own, drafts = random.integers(0, WIDEST + 1, 2).tolist()
            yield own, max(0, drafts - own)

    expected: list[np.ndarray] = []
    for threads in (1, 2):
        sizes = {"num_rows": ROWS, "kv_capacity": 64, "num_threads": threads, "lookahead": 2 * WIDEST}
        runner = ModelRunner(OrtExecutor(folder / entry.path, entry, spin=False, **sizes))
        expected = expected or [read(runner, [ids], [repeat((1, 0))])[0] for ids in sequences]
        assert min(float(logits.std()) for logits in expected) > 0.1, "degenerate logits would hide an error"
        for width in range(1, WIDEST + 1):
            (found,) = read(runner, sequences[:1], [repeat((width, width % 3))])
            np.testing.assert_array_equal(found, expected[0], f"{width} at a time, {threads} threads")
        for batch in range(2, ROWS + 1):
            rows = random.permutation(ROWS)[:batch].tolist()
            together = read(runner, [sequences[row] for row in rows], [odd() for _ in rows], int(ROWS - batch > 2))
            for row, found in zip(rows, together, strict=True):
                np.testing.assert_array_equal(found, expected[row], f"text {row} of {rows}, {threads} threads")


def model_of(name: str) -> Any:
    if name in ARCHITECTURES:
        return tiny_model(name)
    classes, config = HYBRIDS[name]
    return make_model(classes, config | {"vocab_size": KNOWN})


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [*ARCHITECTURES, *HYBRIDS])
def test_every_architecture(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    assert_same_bits(compiled(model, tmp_path / "float"), tmp_path / "float")
    if name not in NOT_IN_EIGHT_BITS:
        assert_same_bits(compiled(model, tmp_path / "int8", quantize="int8"), tmp_path / "int8")


def rounded(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        model = make_model(*ARCHITECTURES["llama"])
        return model.to(getattr(torch, kind)).float()

    return make


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int4"])
def test_every_format(kind: str, tmp_path: Path) -> None:
    """Beside float32 and int8, which are above."""
    entry = (
        compiled(tiny_model("llama"), tmp_path, quantize=kind)
        if kind == "int4"
        else compiled(rounded(kind)(), tmp_path)
    )
    print([name for name, *_ in entry.weight_formats])
    assert_same_bits(entry, tmp_path)

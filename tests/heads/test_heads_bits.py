"""What a draft head computes has the same bits whether rows are read together or alone, at once or token by token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.compile.pipeline import build_bundle
from specexport.heads.kinds import find_kind
from specexport.heads.reference import CHECK_CAPACITY, CheckedRow
from specexport.recipe import BuildRecipe
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.models import tiny_dflash, tiny_heads, tiny_hydra
from tests.support.models.loading import load
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.references.ort_operators import HEADS, assert_left

MAKERS: tuple[Callable[[Path, Any], Any], ...] = (
    tiny_heads.medusa, tiny_hydra.hydra_plus, tiny_heads.speculators, tiny_dflash.sliding,
)  # fmt: skip


def pieces_of(row: CheckedRow) -> Iterator[CheckedRow]:
    """Its tokens one by one, where each is asked for logits."""
    if len(row.tokens) != len(row.logits) or row.kept != len(row.tokens):
        yield row
        return
    for i in range(len(row.tokens)):
        yield CheckedRow(row.tokens[i : i + 1], row.features[i : i + 1], 1, row.logits[i : i + 1], row.handed_on)


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "make"), list(zip(HEADS, MAKERS, strict=True)), ids=HEADS)
def test_heads_have_the_same_bits_in_any_company(kind: str, make: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    target = make_llama(seed=3, num_hidden_layers=tiny_heads.LAYERS, hidden_size=tiny_heads.HIDDEN)
    make(tmp_path / "head", target)
    loaded = load(tmp_path / "head", target)
    steps = find_kind(loaded.config).reference(loaded).steps
    folders = {"target": str(save_checkpoint(target, tmp_path / "target")), "head": str(tmp_path / "head")}
    recipe = BuildRecipe(**folders, output=str(tmp_path / "out"), max_model_len=64, check=False)
    entry = build_bundle(recipe, use_cache=False).manifest.models["head"]
    path = tmp_path / "out" / entry.engine.path
    assert_left(path, kind)

    def run(threads: int, work: list[dict[int, CheckedRow]]) -> list[np.ndarray]:
        sizes = {"num_rows": 2, "kv_capacity": CHECK_CAPACITY, "num_threads": threads, "lookahead": 1}
        runner = ModelRunner(OrtExecutor(path, entry, spin=False, **sizes))
        found: list[list[np.ndarray]] = [[], []]
        for step in work:
            asked = [
                RowWork(r.tokens.tolist(), len(r.logits), r.features) if (r := step.get(i)) else IDLE for i in (0, 1)
            ]
            logits = runner.step(0, asked)
            for i, row in step.items():
                found[i].append(logits[runner.logit_starts[i] :][: len(row.logits)].copy())
                runner.kv.commit(i, runner.kv.kv_len(i) + row.kept)
        return [np.concatenate(parts) for parts in found]

    together = run(1, [dict(enumerate(rows)) for rows in steps])
    assert min(float(logits.std()) for logits in together) > 0.1, "degenerate logits would hide an error"
    alone = [{i: piece} for rows in steps for i, row in enumerate(rows) for piece in pieces_of(row)]
    for found in (run(1, alone), run(2, alone), run(2, [dict(enumerate(rows)) for rows in steps])):
        for row in (0, 1):
            np.testing.assert_array_equal(found[row], together[row])

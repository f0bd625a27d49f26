"""Heads on GPU backends: what the lowered graphs compute and draft is what the published equations draft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafted import check_drafts_of
from gpu_heads import CUDA, FOLDED, NATIVE, ROWS, open_graph, read_head, trace_own, trace_target
from reference_dflash import draft as draft_block
from reference_head import draft, forward, project
from tiny_dflash import DIALECTS as BLOCK_DIALECTS
from tiny_heads import DIALECTS, HIDDEN, LAYERS, VOCAB
from tiny_models import make_llama

from specexport.build.check_block import block_reference
from specexport.build.check_head import CHECK_LENS, HeadReference, causal_reference
from specexport_runtime import SpecEngine
from specexport_runtime.bundle.cut_head import CutHead
from specexport_runtime.bundle.mask_feature import MaskInput
from specexport_runtime.executors.base import as_featured, as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork

BLOCKS = {f"block-{name}": write for name, write in BLOCK_DIALECTS.items()}
GRAPHS = ("speculators", "norm-before-fc", "qwen3", "eagle", "peagle", "medusa", "medusa-one-lm-head")
"""Dialects whose graphs differ; the others differ in how they are read."""
WAYS = (CUDA, FOLDED, NATIVE)
CLOSE = 1e-4


@pytest.fixture(scope="module")
def target() -> Any:
    return make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def heads(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Heads by dialect, written, read and traced when they are first asked for."""
    made: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in made:
            spec, loaded = read_head((DIALECTS | BLOCKS)[name], tmp_path_factory.mktemp("head"), target)
            made[name] = spec, loaded, trace_own(loaded)
        return made[name]

    return find


def ragged_steps(spec: Any, loaded: Any) -> HeadReference:
    """Steps of two rows, and what the published equations give; of a head that fills blocks, what it gives in torch."""
    if loaded.config.block_size is not None:
        return block_reference(loaded.head, loaded.config)
    generator = np.random.default_rng(4)
    tokens = [generator.integers(0, VOCAB, n) for n in CHECK_LENS]
    features = [generator.normal(0, 1, (n, loaded.config.feature_size)).astype(np.float32) for n in CHECK_LENS]
    runs = [forward(spec, ids.tolist(), torch.from_numpy(each)) for ids, each in zip(tokens, features, strict=True)]
    logits, handed = ([run[at].numpy() for run in runs] for at in (0, 1))
    return causal_reference(tokens, features, logits, handed)


def run_steps(executor: Any, reference: HeadReference) -> tuple[float, float]:
    """Largest differences of logits and of what is handed on, over all steps."""
    runner, head = ModelRunner(executor), as_head(executor)
    assert head is not None
    errors = [[0.0], [0.0]]
    for rows in reference:
        work = [RowWork(row.tokens.tolist(), len(row.logits), row.features) for row in rows]
        found = np.array(runner.step(0, work)), head.next_features
        wanted = [np.concatenate([getattr(row, name) for row in rows]) for name in ("logits", "handed_on")]
        for error, mine, theirs in zip(errors, found, wanted, strict=True):
            assert mine.shape == theirs.shape
            error.append(float(np.abs(mine - theirs).max()))
        for index, row in enumerate(rows):
            runner.kv.commit(index, runner.kv.kv_len(index) + row.kept)
    return max(errors[0]), max(errors[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dialect", GRAPHS)
def test_a_lowered_head_computes_the_published_equations(
    dialect: str, way: str, heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, loaded, traced = heads(dialect)
    executor = open_graph(way, traced, tmp_path, monkeypatch, config=loaded.config)
    assert max(run_steps(executor, ragged_steps(spec, loaded))) <= CLOSE


@pytest.mark.parametrize("dialect", BLOCKS)
def test_a_lowered_block_sees_all_of_its_row(
    dialect: str, heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, loaded, traced = heads(dialect)
    executor = open_graph(CUDA, traced, tmp_path, monkeypatch, config=loaded.config)
    assert max(run_steps(executor, ragged_steps(spec, loaded))) <= CLOSE

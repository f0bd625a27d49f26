"""Heads on GPU backends: what the lowered graphs compute and draft is what the published equations draft."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from specexport.backends.ort_cuda import OrtCuda
from specexport.backends.present_gpu import query_gpu_architecture
from specexport.backends.registry import find_backend
from specexport.compile.pipeline import build_bundle
from specexport.heads.dflash import KIND as DFLASH
from specexport.heads.dflash import block_reference
from specexport.heads.reference import CHECK_LENS, HeadReference, causal_reference
from specexport.lowering.ort_cuda import attach_paged_attention
from specexport.passes.base import attention_nodes
from specexport.recipe import BuildRecipe
from specexport_runtime import SpecEngine
from specexport_runtime.errors import IncompatibleError, RecipeError, UnsupportedModelError
from specexport_runtime.executors.base import EngineRequest
from specexport_runtime.executors.ort_cuda import _round_shapes
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.cases.entries import changed
from tests.support.fakes.trt_fakes import make_entry
from tests.support.models import tiny_modules
from tests.support.models.gpu_heads import (
    CUDA,
    CUDA_ROWS,
    EXPLICIT,
    FOLDED,
    UNFOLDED,
    open_engine,
    open_graph,
    read_head,
    trace_own,
    trace_target,
)
from tests.support.models.loading import load_module
from tests.support.models.tiny_dflash import DIALECTS as BLOCK_DIALECTS
from tests.support.models.tiny_heads import DIALECTS, HIDDEN, VOCAB
from tests.support.models.tiny_models import save_checkpoint
from tests.support.models.tiny_traces import tiny_model, trace_of
from tests.support.references.cuda_graphs import gpu_or_skip
from tests.support.references.drafted import check_drafts_of, drafted_and_wanted
from tests.support.references.reference_dflash import BlockSpec
from tests.support.references.reference_dflash import draft as draft_block
from tests.support.references.reference_head import draft, forward, project

ENTRY = make_entry()
BLOCKS = {f"block-{name}": write for name, write in BLOCK_DIALECTS.items()}
GRAPHS = [
    *(("speculators", way) for way in (CUDA, FOLDED, UNFOLDED, EXPLICIT)),
    *(("norm-before-fc", CUDA), ("qwen3", FOLDED), ("eagle", CUDA), ("peagle", FOLDED), ("peagle", EXPLICIT)),
    *(("medusa", CUDA), ("medusa", FOLDED), ("medusa-one-lm-head", FOLDED)),
    *((dialect, CUDA_ROWS) for dialect in ("qwen3", "peagle", "medusa")),
    *(("mtp-qwen", FOLDED), ("mtp-deepseek", CUDA), ("mtp-deepseek", FOLDED)),  # keys and values of unequal size
    *(("block-z-lab", FOLDED), *(("block-sliding", way) for way in (FOLDED, UNFOLDED, EXPLICIT))),
]
"""Dialects whose graphs differ, and MTP modules by family; the others differ in how they are read."""
CLOSE = 1e-4


@pytest.fixture(scope="module")
def heads(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Heads by dialect, written and read when they are first asked for, and what traces them, once."""

    @cache
    def find(name: str) -> tuple[Any, Any, Callable[[], Any]]:
        folder = tmp_path_factory.mktemp("head")
        if name.startswith("mtp-"):
            spec = tiny_modules.make(name.removeprefix("mtp-"), folder)
            loaded = load_module(folder, tiny_modules.LAYERS)[1]
        else:
            spec, loaded = read_head((DIALECTS | BLOCKS)[name], folder, target)
        return spec, loaded, cache(partial(trace_own, loaded))

    return find


def ragged_steps(run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], loaded: Any) -> HeadReference:
    """Steps of two rows, and what ``run`` gives of whole texts; of a head that fills blocks, what it gives in torch."""
    if loaded.config.block_size is not None:
        return block_reference(loaded)
    generator = np.random.default_rng(4)
    tokens = [generator.integers(0, VOCAB, n) for n in CHECK_LENS]
    features = [generator.normal(0, 1, (n, loaded.config.feature_size)).astype(np.float32) for n in CHECK_LENS]
    with torch.no_grad():
        runs = [run(torch.from_numpy(ids), torch.from_numpy(each)) for ids, each in zip(tokens, features, strict=True)]
    logits, handed = ([found[at].numpy() for found in runs] for at in (0, 1))
    return causal_reference(tokens, features, logits, handed)


def equations(spec: Any, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(spec, tiny_modules.Module):
        return tiny_modules.forward(spec, tokens, features)
    return forward(spec, tokens.tolist(), features)


def run_steps(executor: Any, reference: HeadReference) -> tuple[float, float]:
    """Largest differences of logits and of what is handed on, over all steps."""
    runner = ModelRunner(executor)
    assert executor.reads_features
    errors = [[0.0], [0.0]]
    for rows in reference.steps:
        work = [RowWork(row.tokens.tolist(), len(row.logits), row.features) for row in rows]
        found = np.array(runner.step(0, work)), executor.next_features
        wanted = [np.concatenate([getattr(row, name) for row in rows]) for name in ("logits", "handed_on")]
        for error, mine, theirs in zip(errors, found, wanted, strict=True):
            assert mine.shape == theirs.shape
            error.append(float(np.abs(mine - theirs).max()))
        for index, row in enumerate(rows):
            runner.kv.commit(index, runner.kv.kv_len(index) + row.kept)
    return max(errors[0]), max(errors[1])


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("dialect", "way"), GRAPHS)
def test_a_lowered_head_computes_the_published_equations(dialect, way, heads, tmp_path, monkeypatch):
    spec, loaded, traced = heads(dialect)
    executor = open_graph(way, traced(), tmp_path, monkeypatch, config=loaded.config)
    if way == CUDA_ROWS:  # where attention is causal
        assert executor.splits_rows == (dialect != "medusa")
    assert max(run_steps(executor, ragged_steps(partial(equations, spec), loaded))) <= CLOSE


@pytest.fixture(scope="module")
def targets(target: Any, heads: Any) -> Any:
    return cache(lambda name: trace_target(target, heads(name)[1]))


@pytest.mark.whole
@pytest.mark.parametrize("way", [CUDA, FOLDED])
def test_a_lowered_target_gives_its_features_where_they_are_wanted(way, target, heads, targets, tmp_path, monkeypatch):
    """They are what the head's projection makes of the hidden states, without those of padding."""
    spec = heads("speculators")[0]
    executor = open_graph(way, targets("speculators"), tmp_path, monkeypatch)
    runner = ModelRunner(executor)
    assert executor.gives_features
    assert not executor.reads_features
    texts = [np.random.default_rng(row).integers(3, VOCAB, 12) for row in range(3)]
    with torch.no_grad():
        states = [target(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states for ids in texts]
        wanted = [project(spec, [each[tap][0] for tap in spec.taps]).numpy() for each in states]
    done, first = [0, 0, 0], None
    for counts, asked in (((5, 2, 3), True), ((4, 1, 2), False), ((1, 1, 1), True), ((2, 4, 4), True)):
        executor.want_features(asked)
        work = [RowWork(texts[row][done[row] :][:count].tolist(), 1) for row, count in enumerate(counts)]
        runner.step(0, work)
        if asked:
            parts = [wanted[row][done[row] :][:count] for row, count in enumerate(counts)]
            np.testing.assert_allclose(executor.features, np.concatenate(parts), rtol=0, atol=CLOSE)
            first = executor.features.copy() if first is None else first
        else:
            assert executor.features.shape == (0, HIDDEN)
        for row, count in enumerate(counts):
            done[row] += count
            runner.kv.commit(row, done[row])
    executor.close()


@pytest.mark.whole
@pytest.mark.parametrize("way", [CUDA, FOLDED])
def test_engines_with_other_features_than_their_manifest_says_are_refused(way, heads, tmp_path, monkeypatch):
    _, loaded, traced = heads("medusa")
    odd = replace(loaded.config, target_hidden_size=HIDDEN + 1)
    with pytest.raises(IncompatibleError, match=f"features of {HIDDEN + 1} values, and the engine has others"):
        open_graph(way, traced(), tmp_path, monkeypatch, config=odd)


def test_every_medusa_head_on_every_row_is_what_each_gives_on_its_own(heads: Any) -> None:
    """The form for GPUs, whose sizes depend on no value, with numbers beyond the last head too."""
    for dialect in ("medusa", "medusa-one-lm-head"):
        head = heads(dialect)[1].head
        numbers, features = torch.tensor([2, 0, 1, 0, 7]), torch.randn(5, HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(head.every_row(numbers, features), head(numbers, features), rtol=0, atol=1e-5)


def reference_draft(spec: Any, target: Any) -> Any:
    find = draft_block if isinstance(spec, BlockSpec) else draft
    return lambda before, count, limit: find(spec, target, before, count, limit)


LOOPS = [("speculators", FOLDED), ("peagle", CUDA), ("medusa", FOLDED), ("block-sliding", FOLDED)]


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "way"), LOOPS)
def test_drafts_over_lowered_graphs_are_those_of_the_published_equations(
    dialect: str, way: str, target: Any, heads: Any, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and head as GPU engines, in ragged batches: text is plain decoding's, and drafts are the reference's."""
    spec, loaded, traced = heads(dialect)
    engine = open_engine(way, targets(dialect), traced(), loaded, tmp_path, monkeypatch)
    check_drafts_of(engine, reference_draft(spec, target), 3, VOCAB, tokens=8, least=30)


def recipe_of(target: Any, folder: Path, **values: Any) -> BuildRecipe:
    given = {"target": str(folder / "target"), "head": str(folder / "head"), "output": str(folder / "b")}
    save_checkpoint(target, folder / "target")
    return BuildRecipe(**given, max_model_len=64, check=False, **values)


def test_heads_that_a_backend_has_no_form_of_are_refused_before_the_target_is_built(target, tmp_path, monkeypatch):
    BLOCKS["block-z-lab"](tmp_path / "head", target)
    recipe = recipe_of(target, tmp_path, backend="ort-cuda")
    monkeypatch.setattr("specexport.compile.pipeline.prepare_model", lambda *_, **__: pytest.fail("a target is built"))
    with pytest.raises(
        UnsupportedModelError, match="is a head of kind dflash: backend ort-cuda runs no dflash heads"
    ) as caught:
        build_bundle(recipe, use_cache=False)
    assert "--backend ort-cpu or tensorrt or tensorrt-rtx" in str(caught.value)
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(OrtCuda, "head_needs", None)
    with pytest.raises(RecipeError, match="backend ort-cuda runs no draft heads"):
        replace(recipe, output=str(tmp_path / "c"))


def test_paged_attention_is_causal() -> None:
    model = trace_of(tiny_model("llama")).ir_model
    next(attention_nodes(model)).attributes["causal"] = ir.AttrInt64("causal", 0)
    with pytest.raises(UnsupportedModelError, match="see later ones, and ONNX Runtime's paged attention has causal"):
        attach_paged_attention(model)


def test_the_plugin_takes_no_head_whose_tokens_see_later_ones(target: Any, tmp_path: Path) -> None:
    recipe = recipe_of(target, tmp_path, backend="tensorrt", lowering="plugin")
    backend, later = find_backend("tensorrt"), DFLASH.needs
    assert "the attention plugin is causal" in str(backend.find_head_refusal("dflash", later, recipe))
    assert backend.find_head_refusal("eagle3", frozenset(), recipe) is None
    assert backend.find_head_refusal("dflash", later, replace(recipe, lowering="auto")) is None


def test_steps_that_are_recorded_are_those_of_rounds() -> None:
    """What CUDA graphs of ``ort-cuda`` are made for: a head catches up on any number of accepted tokens."""

    def shapes(**fields: Any) -> set[tuple[int, int, int]]:
        entry = changed(ENTRY, kind="eagle3", **fields)
        request = EngineRequest(folder=Path(), entry=entry, role="head", num_rows=2, kv_capacity=64, lookahead=3)
        found = _round_shapes(request)
        assert all(shape.num_tokens == shape.num_seqs * shape.max_new_tokens for shape in found)
        return {(shape.num_seqs, shape.max_new_tokens, shape.num_logit_rows) for shape in found}

    assert shapes() == {(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 1, 2)}
    assert shapes(mask_token_id=5) == {(1, 3, 3), (1, 4, 3), (1, 5, 3), (1, 6, 3)}
    assert shapes(num_draft_heads=2) == {(1, 2, 2), (2, 2, 4)}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt-rtx"])
def test_a_gpu_writes_with_a_head_what_it_writes_without(backend: str, target: Any, tmp_path: Path) -> None:
    """And drafts what ``ort-cpu`` drafts, but where halves decide otherwise."""
    sm = query_gpu_architecture()
    if sm is None:
        pytest.skip("no GPU: an engine has to run")
    pytest.importorskip({"ort-cuda": "onnxruntime"}.get(backend, "tensorrt_rtx"), reason=f"{backend} is not installed")
    if backend == "ort-cuda":
        gpu_or_skip()
    spec = DIALECTS["speculators"](tmp_path / "head", target)
    values = {"sm": (sm,), "max_num_seqs": 3, "max_num_tokens": 64} if backend != "ort-cuda" else {}
    build_bundle(recipe_of(target, tmp_path, backend=backend, **values), use_cache=False)
    engine = SpecEngine.load(tmp_path / "b", adaptive=False, max_num_seqs=3)
    found = drafted_and_wanted(engine, reference_draft(spec, target), 3, VOCAB)
    same = sum(mine == theirs for mine, theirs in found)
    assert same > 0.9 * len(found) > 40

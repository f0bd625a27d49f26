"""Layers with windows give back what lies before them beside a draft head too, unless the head reads their caches."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort_arena import CAN_GIVE_BACK
from specexport_runtime.packing import batch
from tests.support.fakes.rounds import check_every_round
from tests.support.models import tiny_heads
from tests.support.models.tiny_models import ARCHITECTURES, VOCAB, make_model, save_checkpoint
from tests.support.references.engine_harness import resident_pages

pytestmark = [
    pytest.mark.bundle,
    pytest.mark.skipif(not CAN_GIVE_BACK, reason="this system takes no memory back"),
]
LENGTH = 700


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    classes, config = ARCHITECTURES["gemma3"]
    target = make_model(classes, config | {"max_position_embeddings": 1024})
    save_checkpoint(target, folder / "target")
    tiny_heads.eagle(folder / "head", target)
    recipe = BuildRecipe(
        target=str(folder / "target"), head=str(folder / "head"), output=str(folder / "b"), quantize="int8",
        max_model_len=1000, check=False,
    )  # fmt: skip
    build_bundle(recipe)
    return folder / "b"


def converse(bundle: Path) -> tuple[list[Any], list[int | None], dict[int, int]]:
    """A long text and what it goes on with, drafted for by the head and not, beside a short one.

    Returns:
        what was written; what was not read again; pages of the long text in layers with a window (key > 0) and without.
    """
    params, found, cached = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2), [], []
    with closing(SpecEngine.load(bundle, max_num_seqs=2, num_threads=1, spin=False, adaptive=False)) as engine:
        check_every_round(engine)
        target = engine.target
        for drafter, k in (("head", {"num_speculative_tokens": 3}), ("none", {})):
            long, short = [7 + 5 * i % 250 for i in range(LENGTH)], [9, 8, 7]
            for _ in range(2):
                both = engine.generate([long, short], params, drafter=drafter, **k)
                found.append([(result.token_ids, result.logprobs) for result in both])
                cached.append(both[0].stats.cached_tokens)
                assert bool(both[0].stats.drafted) == (drafter == "head")
                long = [*long, *both[0].token_ids, 5, 6]
            if drafter == "head":
                windows = load_bundle(bundle).manifest.models["target"].attention.windows
                row = max(range(2), key=lambda row: resident_pages(target, windows.index(-1), row))
                pages = {window: resident_pages(target, windows.index(window), row) for window in sorted({*windows})}
        engine.check()
    return found, cached, pages


@pytest.mark.whole
def test_drafts_and_texts_stay_and_windows_take_less_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, all_pages = converse(bundle)
    monkeypatch.setattr(batch, "WAY_BACK", 64)
    found, cached, pages = converse(bundle)
    assert "1 of 2 layers keep a window" in "\n".join(describe(load_bundle(bundle).manifest))
    assert found == whole
    assert found[:2] == found[2:]  # with the head and without
    assert cached[1] >= LENGTH
    window = max(pages)
    assert VOCAB > window > 0
    assert pages[window] < pages[-1] / 2
    assert all_pages[window] == all_pages[-1] == pages[-1]


@pytest.mark.whole
def test_caches_that_a_head_reads_are_kept(bundle: Path) -> None:
    from specexport_runtime.executors.ort import OrtExecutor

    entry = load_bundle(bundle).manifest.models["target"]
    for lends in (False, True):
        executor = OrtExecutor(
            bundle / entry.engine.path, entry, num_rows=1, kv_capacity=64, num_threads=1, lends=lends
        )
        assert executor.recedes != lends

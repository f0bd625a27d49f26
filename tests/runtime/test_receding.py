"""Layers with windows give back what lies before them: the same logits, and less memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.executors.ort_arena import CAN_GIVE_BACK
from specexport_runtime.packing import batch
from specexport_runtime.packing.batch import ModelRunner, RowWork
from tests.support.cases.entries import changed
from tests.support.fakes.rounds import opened
from tests.support.models.tiny_models import ARCHITECTURES, VOCAB, make_model, save_checkpoint
from tests.support.references.engine_harness import resident_pages

pytestmark = pytest.mark.skipif(not CAN_GIVE_BACK, reason="this system takes no memory back")
LENGTH, CHUNK, BACK = 900, 50, 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    folder = tmp_path_factory.mktemp("windows")
    classes, config = ARCHITECTURES["gemma3"]
    model = make_model(classes, config | {"max_position_embeddings": 1024})
    target = save_checkpoint(model, folder / "target")
    build_bundle(BuildRecipe(target=str(target), output=str(folder / "bundle"), quantize="int8", max_model_len=1000))
    return folder / "bundle"


@pytest.fixture(autouse=True)
def _short_ways_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WAY_BACK", BACK)


def open_runner(bundle: Path, *, recedes: bool) -> ModelRunner:
    entry = load_bundle(bundle).manifest.models["target"]
    assert any(window > 0 for window in entry.attention.windows)
    assert -1 in entry.attention.windows
    if not recedes:
        entry = changed(entry, windows=())
    executor = OrtExecutor(bundle / entry.engine.path, entry, num_rows=3, kv_capacity=1024, num_threads=1, lookahead=4)
    assert executor.recedes == recedes
    return ModelRunner(executor)


def test_logits_have_the_same_bits_and_windows_take_less_memory(bundle: Path) -> None:
    tokens = np.random.default_rng(3).integers(3, VOCAB, LENGTH).tolist()
    found = []
    for recedes in (True, False):
        runner, logits = open_runner(bundle, recedes=recedes), []
        for start in range(0, LENGTH, CHUNK):
            logits.append(runner.step(0, [RowWork(tokens[start : start + CHUNK], 3)]).copy())
            runner.kv.commit(0, start + CHUNK)
            if start == 500:  # to another row, and back beside what is there
                runner.move_row(0, 2)
                runner.swap_rows(2, 0, (start + CHUNK, 0))
                runner.kv.move(2, 0)
        found.append(np.concatenate(logits))
        windows = load_bundle(bundle).manifest.models["target"].attention.windows
        short, full = (resident_pages(runner.executor, windows.index(w)) for w in (max(windows), -1))
        assert (short < full / 2) == recedes
        if recedes:
            assert runner.row_bytes(LENGTH) <= runner.row_bytes(10 * LENGTH)
            assert LENGTH - CHUNK - BACK - 64 <= runner.min_reusable_len(0) <= LENGTH - BACK
    np.testing.assert_array_equal(*found)


def test_a_text_is_gone_on_from_where_its_windows_are_still_there(bundle: Path) -> None:
    tokens = np.random.default_rng(4).integers(3, VOCAB, 700).tolist()
    with opened(bundle, 2) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)

        def ask(prompt: list[int], remember: bool = True) -> Any:
            return engine.generate([prompt], params, drafter="none", remember=remember)[0]

        first = ask(tokens)
        near = [*tokens, *first.token_ids, 5, 6, 7]
        behind = ask(near)
        assert behind.stats.cached_tokens == len(tokens) + len(first.token_ids) - 1
        far = [*tokens[:300], *range(3, 40)]
        elsewhere = ask(far)
        assert elsewhere.stats.cached_tokens == 0  # what its windows would see is gone
        for prompt, result in ((near, behind), (far, elsewhere)):
            alone = ask(prompt, remember=False)
            assert (alone.token_ids, alone.logprobs) == (result.token_ids, result.logprobs)


def test_windows_outlive_their_engine(bundle: Path, tmp_path: Path) -> None:
    """A file has no entries that no window sees, and a text goes on from it where they are."""
    tokens = np.random.default_rng(4).integers(3, VOCAB, 700).tolist()
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
    with opened(bundle, 2) as engine:
        (first,) = engine.generate([tokens], params, drafter="none")
        near, far = [*tokens, *first.token_ids, 5, 6, 7], [*tokens[:300], *range(3, 40)]
        wanted = engine.generate([near, far], params, drafter="none", remember=False)
        whole = engine.target.row_bytes(len(tokens)) - engine.target.row_bytes(0)
    with opened(bundle, 2, prefix_cache_dir=tmp_path / "kept") as engine:
        engine.generate([tokens], params, drafter="none")
    (file,) = (tmp_path / "kept").glob("*.npz")
    assert file.stat().st_size < whole
    with opened(bundle, 2, prefix_cache_dir=tmp_path / "kept") as engine:
        found = engine.generate([near, far], params, drafter="none")
    assert [each.stats.cached_tokens for each in found] == [len(tokens) + len(first.token_ids) - 1, 0]
    assert [(each.token_ids, each.logprobs) for each in found] == [(each.token_ids, each.logprobs) for each in wanted]

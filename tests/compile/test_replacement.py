"""A bundle that is replaced while it is loaded: every load is of one bundle, the old one or the new one."""

import contextlib
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specexport.atomic import new_folder
from specexport_runtime import SamplingParams, SpecEngine, engine_load
from specexport_runtime.bundle import held as held_module
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.held import held
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import BundleError

WEIGHTS = "target/model.onnx.data"


@pytest.fixture
def other(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The same model after a further training, as it were."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "other"))
    np.fromfile(folder / WEIGHTS, np.float32)[::-1].tofile(folder / WEIGHTS)
    manifest = load_manifest(folder)
    replace(manifest, build_key="0" * 64, files=hash_files(folder, manifest.files)).write(folder)
    return folder


@pytest.fixture
def live(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "live"))


def load(folder: Path) -> SpecEngine:
    return SpecEngine.load(folder, spin=False, num_threads=1)


def text_of(folder: Path) -> tuple[int, ...]:
    with contextlib.closing(load(folder)) as engine:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        return tuple(engine.generate([[1, 30, 31, 32]], params, drafter="none")[0].token_ids)


def put_copy(source: Path, place: Path) -> None:
    with new_folder(place, replace=True, sync=False) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def swap_folders(live: Path, other: Path) -> None:
    shutil.rmtree(live)
    shutil.copytree(other, live)


def swap_weights(live: Path, other: Path) -> None:
    os.replace(shutil.copy(other / WEIGHTS, live / "new"), live / WEIGHTS)


@pytest.mark.parametrize("swap", [swap_folders, swap_weights])
def test_what_was_hashed_is_what_runs(
    swap: object, live: Path, other: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(swap)
    texts = [text_of(tiny_bundle), text_of(other)]
    assert texts[0] != texts[1]
    opened, opens = engine_load.open_executor, []

    def open_late(*args: object, **options: object) -> object:
        opens.append(args[1])
        if opens == ["target"]:
            swap(live, other)  # by somebody who does not ask who loads it
        return opened(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_load, "open_executor", open_late)
    if swap is swap_weights:
        with pytest.raises(BundleError, match="was altered"):
            load(live)
    else:
        assert text_of(live) == texts[1]
        assert opens == ["target", "draft"] * 2, "all of it is the new one's"


def test_a_replacement_waits_for_the_loads_that_go_on_and_not_for_ever(
    live: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(live) as is_another:
        put = threading.Thread(target=put_copy, args=(other, live))
        put.start()
        put.join(0.3)
        assert put.is_alive()
        assert not is_another()
    put.join()
    assert load_manifest(live).build_key == "0" * 64
    monkeypatch.setattr(held_module, "PATIENCE_S", 0.1)
    with held(live) as is_another:
        put_copy(other, live)
        assert is_another()


@pytest.mark.whole
def test_loads_beside_replacements_are_of_one_bundle(live: Path, other: Path, tiny_bundle: Path) -> None:
    texts, ended = {text_of(tiny_bundle), text_of(other)}, threading.Event()

    def put() -> None:
        while not ended.wait(0.02):
            put_copy(other, live)
            put_copy(tiny_bundle, live)

    putting = threading.Thread(target=put)
    putting.start()
    try:
        end = time.monotonic() + 15
        seen = [text_of(live) for _ in iter(lambda: time.monotonic() < end, False)]
    finally:
        ended.set()
        putting.join()
    assert set(seen) == texts, len(seen)
    assert len(texts) == 2
    assert sorted(path.name for path in live.parent.iterdir()) == ["live", "other"]

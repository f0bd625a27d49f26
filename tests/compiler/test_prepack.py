"""A build leaves nothing for the first load to do: hashes are checked, weights are packed for this machine."""

import json
import logging

import pytest

from specexport.build.prepack import prepack_bundle
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors import prepacked
from specexport_runtime.executors.open import open_executor


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def packed(cache):
    return sorted(json.loads(path.read_text())["engine_hash"] for path in cache.glob("prepacked/*/record.json"))


def test_the_first_load_finds_packed_weights(cache, demo_bundle, monkeypatch):
    monkeypatch.setattr(prepacked, "MIN_WEIGHT_BYTES", 1_000_000)
    prepack_bundle(demo_bundle)
    made = packed(cache)
    assert len(made) >= 2  # the target's and the draft's
    monkeypatch.setattr(prepacked.PrepackedEngine, "_make", None)  # nothing is made any more
    bundle = load_bundle(demo_bundle)
    for role in bundle.manifest.models:
        open_executor(bundle, role).close()
    assert packed(cache) == made


def test_small_engines_are_left_alone(cache, demo_bundle, monkeypatch):
    monkeypatch.setattr(prepacked, "MIN_WEIGHT_BYTES", 10**12)
    prepack_bundle(demo_bundle)
    assert not packed(cache)


def test_weights_that_no_memory_holds_are_left_to_the_first_load(cache, demo_bundle, monkeypatch, caplog):
    monkeypatch.setattr(prepacked, "MIN_WEIGHT_BYTES", 1_000_000)
    monkeypatch.setattr("specexport.build.prepack.memory_bytes", lambda: (8 * 10**9, 30_000_000, None))
    with caplog.at_level(logging.WARNING):
        prepack_bundle(demo_bundle)
    assert "the target's weights are not packed now: that takes 0.1 GB of memory, and 0.0 GB are free" in caplog.text
    assert len(packed(cache)) == 1  # the draft's


def test_what_goes_wrong_is_a_warning(cache, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prepack_bundle(tmp_path)
    assert "could not be packed" in caplog.text

"""Bundles whose KV caches are in 8 bits: what they say of themselves, and what they take."""

from pathlib import Path

import pytest

from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe, kv_bytes_per_token
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort import OrtExecutor
from tests.support.models.pairs import TinyPair


@pytest.mark.one_of_kind
@pytest.mark.parametrize("quantize", ["int8", None])
def test_caches_are_int8_whatever_the_weights_are(
    tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path, quantize: str | None
) -> None:
    result = build_bundle(tiny_pair.recipe(tmp_path / "a", quantize=quantize, kv_cache_dtype="int8"))
    manifest, plain = load_manifest(tmp_path / "a"), load_manifest(tiny_bundle)
    for role, entry in manifest.models.items():
        assert (entry.attention.cache_dtype, entry.dtype) == ("int8", "float32")
        assert 4 * kv_bytes_per_token(entry) == kv_bytes_per_token(plain.models[role])
        check = result.checks[role]
        assert check is not None
        assert check.lost is not None
        assert 0 < check.lost < 0.02, "compared on a text"
    assert manifest.models["target"].approximation == (quantize or "int8 KV cache")
    assert any("KV cache: int8" in line for line in describe(manifest))
    sizes = []
    for folder in (tmp_path / "a", tiny_bundle):
        bundle = load_bundle(folder, max_num_seqs=2, max_model_len=64)
        executor = open_executor(bundle, "target", num_threads=1, spin=False)
        assert isinstance(executor, OrtExecutor)
        sizes.append(executor.kv_bytes)
        executor.close()
    assert 4 * sizes[0] == sizes[1]


def test_auto_is_the_dtype_of_the_model() -> None:
    assert BuildRecipe(target="t", output="o", kv_cache_dtype="auto").kv_cache_dtype is None

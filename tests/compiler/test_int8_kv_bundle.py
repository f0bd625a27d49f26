"""Bundles whose KV caches are in 8 bits: what they say of themselves, what they take, and who gets none."""

from pathlib import Path

import pytest
from pairs import TinyPair

from specexport.build.pipeline import build_bundle
from specexport.inspect import describe, kv_bytes_per_token
from specexport.recipe import BuildRecipe, settle_quantization
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.errors import RecipeError
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.ort import OrtExecutor


def test_a_quantized_target_keeps_int8_and_a_float_draft_does_not(
    tiny_pair: TinyPair, tiny_bundle: Path, tmp_path: Path
) -> None:
    build_bundle(tiny_pair.recipe(tmp_path / "a", quantize="int8", kv_cache_dtype="int8"))
    manifest, plain = load_manifest(tmp_path / "a"), load_manifest(tiny_bundle)
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert (target.kv_dtype, target.cache_dtype, draft.kv_dtype, draft.cache_dtype) == ("int8", "int8", None, "float32")
    assert 4 * kv_bytes_per_token(target) == kv_bytes_per_token(plain.models["target"])
    assert any("KV cache: int8" in line for line in describe(manifest))
    sizes = []
    for folder in (tmp_path / "a", tiny_bundle):
        bundle = load_bundle(folder, max_num_seqs=2, max_model_len=64)
        executor = open_executor(bundle, "target", num_threads=1, spin=False)
        assert isinstance(executor, OrtExecutor)
        sizes.append(executor.kv_bytes)
        executor.close()
    assert 4 * sizes[0] == sizes[1]


def test_a_float_target_is_refused_before_any_work(tmp_path: Path) -> None:
    recipe = BuildRecipe(target="t", output=str(tmp_path), kv_cache_dtype="int8")
    with pytest.raises(RecipeError, match="the target's weights are float") as error:
        settle_quantization(recipe, quantized={"target": False})
    assert "--quantize int8" in error.value.hint
    assert settle_quantization(recipe, quantized={"target": True}).quantize == "keep"


def test_auto_is_the_dtype_of_the_model() -> None:
    assert BuildRecipe(target="t", output="o", kv_cache_dtype="auto").kv_cache_dtype is None

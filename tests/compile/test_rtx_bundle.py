"""TensorRT-RTX engines, really built: no GPU is needed for that."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.backends import present_gpu, tensorrt
from specexport.backends import trt as trt_backend
from specexport.compile.pipeline import build_bundle
from specexport.inspect import describe
from specexport.progress import ProgressEvent
from specexport.recipe import BuildRecipe, make_recipe
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.errors import CheckFailedError, IncompatibleError
from tests.support.cases.refusals import Refuse, RunCli
from tests.support.cases.shared import locked
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import ARCHITECTURES, make_llama, make_model, save_checkpoint

pytestmark = pytest.mark.slow

LIMITS = {"lookahead": 3, "max_num_seqs": 2, "max_num_tokens": 16, "max_model_len": 60}


def rtx_recipe(target: Path, output: Path, **values: Any) -> BuildRecipe:
    given = {"target": str(target), "output": str(output), "backend": "tensorrt-rtx", "sm": ["89"]}
    return make_recipe(given | LIMITS | values)


@pytest.fixture(scope="module")
def rtx_bundle(session_dir: Path, tiny_pair: TinyPair) -> Path:
    """A tiny target and draft for two architectures, with heads that fused attention takes."""
    folder = session_dir / "rtx-bundle"
    with locked(session_dir / "rtx-bundle.lock"):
        if not folder.is_dir():
            target, draft = session_dir / "rtx-target", session_dir / "rtx-draft"
            for seed, place in enumerate((target, draft)):
                save_checkpoint(make_llama(seed), place)
            build_bundle(rtx_recipe(target, folder, draft=str(draft), sm=["89", "120"]))
    return folder


@pytest.fixture
def manifest(rtx_bundle: Path) -> Manifest:
    return load_manifest(rtx_bundle)


@pytest.mark.whole
def test_an_engine_for_each_architecture_in_the_manifest(rtx_bundle: Path, manifest: Manifest) -> None:
    check_files(rtx_bundle, manifest.files)
    for role in ("target", "draft"):
        entry = manifest.models[role]
        assert (entry.backend, entry.dtype, entry.engine.lowering) == ("tensorrt-rtx", "float16", "native")
        assert [engine.sm for engine in entry.engine.files] == ["sm89", "sm120"]
        assert [engine.path for engine in entry.engine.files] == [f"{role}/model.sm{sm}.engine" for sm in (89, 120)]
        for engine in entry.engine.files:
            assert engine.builder == "tensorrt-rtx"
            assert re.fullmatch(r"\d+\.\d+\.\d+.*", engine.builder_version)
            assert manifest.files[engine.path].size > 10_000
            assert (rtx_bundle / role / f"model.{engine.sm}.log").stat().st_size > 1000, "the build log is kept"
        assert entry.engine.path == entry.engine.files[0].path
        assert entry.engine.limits.kv_capacity == 80, "60 tokens, twice K+1, and up to a multiple of 16"
        assert entry.engine.limits.max_num_seqs == LIMITS["max_num_seqs"]
    assert manifest.recipe["sm"] == ["89", "120"]
    found = {str(path.relative_to(rtx_bundle)) for path in rtx_bundle.rglob("*") if path.is_file()}
    assert found == {*manifest.files, "manifest.json"}, "no graph, no temporary file"


@pytest.mark.whole
def test_inspect_tells_aliasing_fusion_and_precision(rtx_bundle: Path, run_cli: RunCli, manifest: Manifest) -> None:
    shown = json.loads(run_cli("inspect", rtx_bundle, "--json").stdout)
    target = shown["models"]["target"]["engine"]
    profiles = [tuple(profile.values()) for profile in target["limits"]["profiles"]]
    assert [kind for kind, *_ in profiles] == ["decode"] * 2 + ["verify"] * 2 + ["prefill"]
    assert set(profiles[2:4]) == {("verify", 1, 4, 4, 4, 4), ("verify", 2, 4, 8, 8, 4)}
    for engine in target["files"]:
        report = engine["report"]
        caches = {f"{kind}_cache.{i}" for kind in "kv" for i in range(2)}
        assert {source for source, _ in report["aliased"]} == caches, "every cache is updated in place"
        assert {out for _, out in report["aliased"]} == {name.replace("cache.", "cache_out.") for name in caches}
        assert len(report["profiles"]) == len(profiles)
        for row in report["profiles"]:
            assert row["fused_attention"] == 2, "one fused kernel a layer"
            assert row["float32_matmuls"] == []
            assert row["kernels"] > 4
        assert all(row["kv_copy_bytes"] == 0 for row in report["profiles"]), "the caches are read where they are"
        assert report["peak_memory_bytes"] > 10**7
    text = run_cli("inspect", rtx_bundle, "--all").stdout
    for said in (
        "verify 2x4",
        "4 of 4 caches in place; attention fused in 5 of 5 profiles; 0 float32",
        "sm120: target",
    ):
        assert said in text


@pytest.mark.whole
def test_nothing_is_folded_where_masks_would_be_too_large_and_what_is_not_is_copied_to_be_verified(
    tiny_pair: TinyPair, rtx_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are really counted: without folding there are some."""
    monkeypatch.setattr(tensorrt, "MAX_MASK_BYTES", 1000)
    events: list[ProgressEvent] = []
    recipe = rtx_recipe(tiny_pair.target, tmp_path / "out", max_num_seqs=1)
    target = build_bundle(recipe, progress=events.append, use_cache=False).manifest.models["target"]
    (engine,) = target.engine.files
    copied = {row.profile: row.kv_copy_bytes for row in engine.report.profiles}
    assert copied["decode 1x1"] == 0 < copied["verify 1x4"]
    assert target.engine.fused == (("fused-causal", 2),)
    assert {profile.fold for profile in target.engine.limits.profiles} == {1}
    assert any("nothing is folded" in event.message and "--max-num-tokens" in event.message for event in events)
    assert load_manifest(rtx_bundle).models["target"].engine.fused == (("folded", 2),)


@pytest.mark.whole
def test_a_model_that_float16_cannot_hold_is_refused_before_an_engine_is_built(
    tiny_pair: TinyPair, tmp_path: Path, refuse_cli: Refuse, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Gemma 3 270M is such a model. bfloat16 has float32's range, so it builds."""
    folder = tmp_path_factory.mktemp("large")
    model = make_llama(0)
    for weights, factor in ((model.model.layers[0].mlp.up_proj, 1e4), (model.model.layers[0].mlp.down_proj, 1e5)):
        weights.weight.data *= factor  # all weights are in range, and their products are not
    save_checkpoint(model, folder)
    flags = ("--backend", "tensorrt-rtx", "--sm", "89", "--max-num-seqs", "1", "--max-num-tokens", "16")
    line = refuse_cli("build", folder, "-o", tmp_path / "out", "-q", *flags)
    assert "LlamaForCausalLM cannot be computed in float16" in line
    assert "use --dtype bfloat16" in line
    recipe = rtx_recipe(folder, tmp_path / "out", dtype="bfloat16", max_num_seqs=1)
    assert build_bundle(recipe, use_cache=False).manifest.models["target"].dtype == "bfloat16"


@pytest.mark.whole
def test_a_portable_engine_verifies_in_place_too(tiny_pair: TinyPair, tmp_path: Path) -> None:
    result = build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out", sm=["any"], max_num_seqs=1), use_cache=False)
    (engine,) = result.manifest.models["target"].engine.files
    assert (engine.sm, engine.path) == ("any", "target/model.any.engine")
    assert (tmp_path / "out" / "target" / "model.any.log").is_file()
    copied = {row.profile: row.kv_copy_bytes for row in engine.report.profiles}
    assert copied["decode 1x1"] == copied["verify 1x4"] == 0


@pytest.mark.whole
def test_the_default_prefill_is_as_large_as_its_masks_may_be(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorrt, "MAX_MASK_BYTES", 4 * 2 * 80 * 157)  # heads, rows, entries, tokens
    events: list[ProgressEvent] = []
    recipe = rtx_recipe(tiny_pair.target, tmp_path / "out", max_num_tokens=None)
    manifest = build_bundle(recipe, progress=events.append, use_cache=False).manifest
    entry = manifest.models["target"]
    assert entry.engine.fused == (("folded", 2),)
    assert [profile.num_tokens for profile in entry.engine.limits.profiles if not profile.is_fixed] == [64, 128, 156]
    assert manifest.max_num_tokens is None
    assert any("steps have up to 156 tokens: 512 would need" in event.message for event in events)


@pytest.mark.whole
def test_a_build_tells_how_far_it_is_and_a_second_one_does_nothing(tiny_pair, tmp_path, monkeypatch):
    events: list[ProgressEvent] = []
    first = build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out", max_num_seqs=1), progress=events.append)
    notes = [event.message for event in events]
    assert any("of memory" in note and "KV cache" in note for note in notes)
    assert any(re.search(r"sm89: .+ \d+/\d+", event.message) for event in events if event.stage == "build")
    assert any("not checked: tensorrt-rtx engines run on a GPU only" in note for note in notes)
    assert first.max_abs_errors == {"target": None}
    assert build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out", max_num_seqs=1)).up_to_date
    monkeypatch.setattr(trt_backend, "_run_worker", lambda *_: pytest.fail("built again"))
    again = build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "other", max_num_seqs=1))
    assert again.reused == ("target",)
    assert again.manifest.models == first.manifest.models
    with pytest.raises(pytest.fail.Exception, match="built again"):  # another architecture is another engine
        build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "third", max_num_seqs=1, sm=["120"]))
    assert not (tmp_path / "third").exists()


@pytest.mark.whole
@pytest.mark.parametrize(("name", "dtype"), [("gemma3", "float16"), ("gemma2", "bfloat16")])
def test_other_attention_builds_too(name: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(make_model(*ARCHITECTURES[name]), tmp_path / "model")
    recipe = rtx_recipe(tmp_path / "model", tmp_path / "out", max_num_seqs=1, dtype=dtype, lookahead=1)
    (engine,) = build_bundle(recipe, use_cache=False).manifest.models["target"].engine.files
    assert len(engine.report.aliased) == 4
    assert all(row.float32_matmuls == () for row in engine.report.profiles)


@pytest.mark.whole
def test_int4_weights_are_read_by_the_products_themselves(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 640}
    for seed, role in enumerate(("target", "draft")):
        save_checkpoint(make_llama(seed, **sizes), tmp_path / role)
    values = {"draft": str(tmp_path / "draft"), "max_num_seqs": 1, "lookahead": 1, "quantize": "int4"}
    recipe = rtx_recipe(tmp_path / "target", tmp_path / "out", **values)
    models = build_bundle(recipe, use_cache=False).manifest.models
    assert [models[role].quantize for role in ("target", "draft")] == ["int4", None]
    assert dict(models["target"].passes)["int4-weights"] == 15
    (engine,), (draft,) = (models[role].engine.files for role in ("target", "draft"))
    for row in engine.report.profiles:
        # query, key and value are one product, and so are gate and up
        assert (row.quantized_products, row.expanded_weights) == (9, 0)
    assert all(row.quantized_products == 0 for row in draft.report.profiles)
    linear = 2 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 384) + 256 * 640
    # And the embedding in 16 bits, and 0.3 MB of tables, which are little beside a model that is not tiny.
    assert engine.report.weight_bytes < 0.29 * 2 * linear + 2 * 256 * 640 + 350_000
    lines = list(describe(load_manifest(tmp_path / "out")))
    assert sum("9 products of quantized weights a step" in line for line in lines) == 1


def test_a_builder_that_fails_leaves_nothing_and_says_what_tensorrt_said(tiny_pair, tmp_path, monkeypatch):
    run = trt_backend._run_worker

    def without_a_profile(job: dict[str, Any], scratch: Path, note: Callable[[str], None]) -> dict[str, Any]:
        job["shapes"][0]["input_ids"] = ((1,), (1,), (0,))
        return run(job, scratch, note)

    monkeypatch.setattr(trt_backend, "_run_worker", without_a_profile)
    with pytest.raises(CheckFailedError, match="TensorRT"):
        build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out", max_num_seqs=1), use_cache=False)
    assert not list(tmp_path.iterdir())


def test_a_builder_that_dies_is_an_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"sm": "89", "log": str(tmp_path / "log")}
    (tmp_path / "log").write_text("[INFO] the last words\n")
    monkeypatch.setattr(trt_backend.sys, "executable", shutil.which("false"))
    with pytest.raises(CheckFailedError, match=r"ended with code 1: \[INFO\] the last words"):
        trt_backend._run_worker(job, tmp_path, lambda _text: None)
    assert isinstance(trt_backend._make_exit_error(-9, job, ""), IncompatibleError)


def test_too_little_memory_is_refused_before_tensorrt_starts(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(trt_backend, "_run_worker", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr("specexport.backends.tensorrt.memory_bytes", lambda: (10**9, 10**8, None))
    with pytest.raises(IncompatibleError, match=r"needs about 0\.7 GB of memory, 0\.1 GB are free"):
        build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out"), use_cache=False)
    monkeypatch.setattr("specexport.backends.tensorrt.memory_bytes", lambda: (10**11, 10**11, None))
    with pytest.raises(IncompatibleError, match=r"of GPU memory .* and --gpu-memory-gb is 0\.0001"):
        build_bundle(rtx_recipe(tiny_pair.target, tmp_path / "out", gpu_memory_gb=0.0001), use_cache=False)
    assert not list(tmp_path.iterdir())


def test_the_command_line_builds(tiny_pair: TinyPair, tmp_path: Path, run_cli: RunCli) -> None:
    flags = ["--backend", "tensorrt-rtx", "--sm", "8.9", "--lookahead", "3", "--max-num-seqs", "1"]
    flags += ["--max-num-tokens", "16", "--max-model-len", "60", "--no-cache"]
    result = run_cli("build", tiny_pair.target, *flags, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "target: not checked" in result.stdout
    refused = run_cli("generate", tmp_path / "out", "hello")
    assert refused.exit_code == 3
    assert "Traceback" not in refused.stderr
    assert "GPU" in refused.stderr
    monkey = present_gpu.query_gpu_architecture()
    assert monkey is None or monkey != "89", "this test expects no sm89 GPU"

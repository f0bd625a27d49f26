"""What a GPU recipe accepts, and what is refused before any model is loaded."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from specexport.backends import present_gpu, tensorrt, trt_package
from specexport.backends.base import PartRecipe
from specexport.backends.profiles import engine_kv_capacity, most_new_tokens, plan_profiles
from specexport.backends.registry import BACKENDS
from specexport.backends.tensorrt import plan_folding, plan_memory, require_gpu_memory, require_host_memory
from specexport.backends.trt_package import TENSORRT, TENSORRT_RTX, known_architectures, resolve_architectures
from specexport.compile import model, pipeline, plan
from specexport.lowering import trt_native
from specexport.lowering.trt_native import count_mask_heads
from specexport.recipe import AUTO_MODEL_LEN, BuildRecipe, make_recipe, resolve_parts, resolve_settings
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.errors import IncompatibleError, RecipeError
from tests.support.cases.refusals import Refuse
from tests.support.cases.shared import locked
from tests.support.cases.unpadded_cases import Case, one_node_model
from tests.support.models.tiny_models import ARCHITECTURES, HYBRIDS, make_model, save_checkpoint

GIVEN = {"target": "t", "output": "o", "backend": "tensorrt-rtx"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present_gpu, "query_gpu_architecture", lambda: None)


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorrt" else find(name))


@pytest.mark.parametrize("given", ["89", 89, "sm89", "SM_89", "8.9"])
def test_every_spelling_of_an_architecture(given: object) -> None:
    assert make_recipe(GIVEN | {"sm": given}).sm == make_recipe(GIVEN | {"sm": [given, "89"]}).sm == ("89",)
    assert make_recipe(GIVEN | {"sm": ["any", given, "any"]}).sm == ("any", "89")


def target_of(recipe: BuildRecipe) -> PartRecipe:
    return resolve_parts(recipe, {"target": False}, recipe.sm)["target"]


def test_the_defaults_of_a_gpu_recipe() -> None:
    recipe = make_recipe(GIVEN | {"sm": ["89", "120"]})
    part = target_of(recipe)
    assert (part.dtype, part.max_num_seqs, part.max_num_tokens) == ("float16", 8, 0)
    assert {name: target_of(make_recipe(GIVEN | {"backend": name})).lookahead for name in BACKENDS} == {
        "ort-cpu": 8, "ort-cuda": 8, "tensorrt": 8, "tensorrt-rtx": 4,
    }  # fmt: skip
    assert target_of(make_recipe(GIVEN | {"lookahead": 8})).lookahead == 8
    assert recipe.settings()["sm"] == ["89", "120"]
    for backend in ("ort-cpu", "ort-cuda"):  # which fix no limits
        for limits in ({"max_num_seqs": 300, "max_num_tokens": 9000}, {"max_num_seqs": None, "max_num_tokens": None}):
            recipe = make_recipe(GIVEN | {"backend": backend} | limits)
            assert resolve_settings(recipe, {"target": target_of(recipe)}).items() >= limits.items()


def masks(heads: int, size: int, fold: int) -> int:
    model = one_node_model(Case(((0, 1),), heads=heads, kv_heads=2, k_dim=size, v_dim=size))
    return count_mask_heads(model, fold=fold)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [8, 12, 14, 16, 20, 24, 28, 32, 40])
@pytest.mark.parametrize(
    ("backend", "role"), [("tensorrt-rtx", "target"), ("tensorrt-rtx", "draft"), ("tensorrt", "target")]
)
def test_every_usual_geometry_is_folded_by_the_defaults(backend, role, heads, size, monkeypatch):
    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))
    recipe = target_of(make_recipe(GIVEN | {"backend": backend}))
    fold, capacity = most_new_tokens(role, recipe.lookahead), engine_kv_capacity(AUTO_MODEL_LEN, recipe.lookahead)
    limits = {"max_num_seqs": recipe.max_num_seqs, "kv_capacity": capacity, "max_num_tokens": None}
    count = masks(heads, size, fold)
    found = plan_folding(fold, count, **limits)
    assert count == heads
    assert found.fold == fold
    assert found.max_num_tokens == 512 if heads < 32 else 400 <= found.max_num_tokens < 512
    profile = plan_profiles(
        role, lookahead=recipe.lookahead, max_num_seqs=8, max_num_tokens=found.max_num_tokens, fold=fold
    )[-1]
    width = profile.largest.tile_width
    assert heads * 8 * width * capacity <= tensorrt.MAX_MASK_BYTES
    assert bool(found.note) == (found.max_num_tokens < 512)


def test_a_prefill_that_was_asked_for_stays_and_nothing_is_folded_below_the_smallest() -> None:
    limits = {"max_num_seqs": 8, "kv_capacity": 4112}
    asked = plan_folding(5, 32, **limits, max_num_tokens=512)
    assert (asked.fold, asked.max_num_tokens) == (1, 512)
    assert "nothing is folded: a prefill of 512 tokens beside 7 other rows" in asked.note
    assert plan_folding(5, 32, **limits, max_num_tokens=510) == (5, 510, "")
    long = plan_folding(5, 32, max_num_seqs=8, kv_capacity=32784, max_num_tokens=None)
    assert (long.fold, long.max_num_tokens) == (1, 512), "60 tokens would fit"
    assert plan_folding(5, 32, max_num_seqs=4, kv_capacity=32784, max_num_tokens=None)[:2] == (5, 125)
    assert plan_folding(5, 0, **limits, max_num_tokens=None) == (5, 512, ""), "written out: there are no masks"


def test_tensorrt_rtx_builds_for_the_architectures_it_has_and_by_default_for_the_gpu_here(no_gpu, monkeypatch):
    known = known_architectures(TENSORRT_RTX)
    assert {"75", "80", "86", "89", "120"} <= set(known)
    assert resolve_architectures(TENSORRT_RTX, ["89", "120"]) == ("89", "120")
    with pytest.raises(RecipeError, match="--sm 42 is not an architecture that tensorrt-rtx builds for") as caught:
        resolve_architectures(TENSORRT_RTX, ["89", "42"])
    assert all(sm in str(caught.value.hint) for sm in known)
    for present, said in (
        (None, "there is no GPU here, and no --sm says"),
        ("90", "GPU is sm90, for which tensorrt-rtx"),
    ):
        monkeypatch.setattr(present_gpu, "query_gpu_architecture", lambda present=present: present)
        with pytest.raises(RecipeError, match=said):
            resolve_architectures(TENSORRT_RTX, [])
    monkeypatch.setattr(present_gpu, "query_gpu_architecture", lambda: "89")
    assert resolve_architectures(TENSORRT_RTX, []) == ("89",)


def test_tensorrt_builds_for_the_gpu_in_the_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_package, "import_package", lambda _package: object())
    monkeypatch.setattr(present_gpu, "query_gpu_architecture", lambda: "90")
    assert resolve_architectures(TENSORRT, []) == ("90",)
    with pytest.raises(RecipeError, match="--sm 89 is not an architecture that tensorrt builds for here"):
        resolve_architectures(TENSORRT, ["89"])
    monkeypatch.setattr(present_gpu, "query_gpu_architecture", lambda: None)
    with pytest.raises(IncompatibleError, match="there is none here"):
        resolve_architectures(TENSORRT, [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "tensorrt"], "pip install -e '.[tensorrt]'"),
        (["--backend", "tensorrt"], "--backend tensorrt-rtx"),
        (["--backend", "tensorrt-rtx", "--sm", "42"], "--sm 42 is not an architecture"),
        (["--backend", "tensorrt-rtx"], "with --sm"),
    ],
)
def test_the_command_line_refuses_before_it_loads_anything(
    refuse_cli: Refuse, no_gpu: None, without_tensorrt: None, tmp_path: Path, flags: list[str], words: str
) -> None:
    assert words in refuse_cli("build", tmp_path / "model", *flags, "-q", "-o", tmp_path / "out")


def test_the_architecture_of_the_gpu_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shutil

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '12.0\\n8.9\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _name: str(tool))
    assert present_gpu.query_gpu_architecture() == "120"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert present_gpu.query_gpu_architecture() is None
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert present_gpu.query_gpu_architecture() is None


def test_memory_is_planned_before_the_build() -> None:
    layers = [LayerGeometry(8, 128, 128)] * 16
    plan = plan_memory(
        num_parameters=10**9, dtype="float16", layers=layers, kv_capacity=4096, max_num_seqs=8, num_engines=2
    )
    assert plan.gpu_weights == 2 * 10**9
    assert plan.gpu_kv == 16 * 8 * 256 * 4096 * 8 * 2
    assert plan.disk >= 3 * plan.gpu_weights
    require_host_memory(plan, available=0)  # unknown: nothing is refused
    require_host_memory(plan, available=plan.host)
    with pytest.raises(IncompatibleError, match=r"building needs about \d+\.\d GB of memory, 1\.0 GB are free"):
        require_host_memory(plan, available=10**9)
    require_gpu_memory([plan], 0, gpu_memory_gb=24)
    with pytest.raises(IncompatibleError) as caught:
        require_gpu_memory([plan, plan], 10**9, gpu_memory_gb=8)
    assert "9.29 GB of GPU memory (weights 4.00, KV caches 4.29, activations 1.00)" in caught.value.message
    assert "--max-num-seqs" in str(caught.value.hint)


@pytest.mark.parametrize("backend", ["ort-cuda", "tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize(
    ("models", "name", "said"),
    [
        (HYBRIDS, "lfm2", "no layers that keep a state, and this model has 1. Fix: build it for ort-cpu."),
        (ARCHITECTURES, "bloom", "this attention has ALiBi slopes, which"),
    ],
)
def test_what_only_a_cpu_computes_is_refused_by_name(
    backend: str, models: Any, name: str, said: str, session_dir: Path,
    tmp_path: Path, refuse_cli: Refuse, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Behind the trace, and before anything is built: TensorRT need not be there."""
    with locked(session_dir / f"refused-{name}.lock"):
        target = session_dir / f"refused-{name}"
        if not target.is_dir():
            save_checkpoint(make_model(*models[name]), target)
    for module in (model, pipeline, plan):
        monkeypatch.setattr(module, "require_export_stack", lambda _: None)
    monkeypatch.setattr(tensorrt, "resolve_architectures", lambda _, given: given)
    options = [] if backend == "ort-cuda" else ["--sm", "89"]
    line = refuse_cli("build", target, "-o", tmp_path / "bundle", "--backend", backend, "--no-cache", "-q", *options)
    assert said in line
    assert backend in line or "TensorRT" in line or "paged attention" in line

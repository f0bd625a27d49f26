"""The stages of a build that only GPU backends have: plan the memory, lower, build an engine for each architecture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.backends.memory_plan import (
    MemoryPlan,
    plan_memory,
    require_gpu_memory,
    require_host_memory,
)
from specexport.backends.ort_cuda import _ORT_CUDA, _build_ort_cuda
from specexport.backends.profiles import engine_kv_capacity, plan_profiles
from specexport.backends.trt_package import PACKAGES, resolve_architectures
from specexport.build.progress import StageClock
from specexport.host import memory_bytes
from specexport.lowering.step_inputs import step_inputs
from specexport.recipe import TENSORRT_BACKENDS, BuildRecipe
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.manifest import ModelEntry

if TYPE_CHECKING:
    import onnx_ir as ir


def is_tensorrt(recipe: BuildRecipe) -> bool:
    """Whether the recipe builds TensorRT engines."""
    return recipe.backend in TENSORRT_BACKENDS


def architectures_of(recipe: BuildRecipe) -> tuple[str, ...]:
    """The architectures a TensorRT recipe builds for, checked against the package before any work.

    Raises:
        MissingDependencyError: the package is not installed.
        RecipeError, IncompatibleError: see ``resolve_architectures``.
    """
    return resolve_architectures(PACKAGES[recipe.backend], recipe.sm)


def memory_plan_of(recipe: BuildRecipe, num_parameters: int, layers: Sequence[LayerGeometry]) -> MemoryPlan:
    """What one model of a resolved TensorRT recipe needs to build and to run."""
    return plan_memory(
        num_parameters=num_parameters,
        dtype=recipe.dtype,
        layers=layers,
        kv_capacity=_capacity(recipe),
        max_num_seqs=int(recipe.max_num_seqs or 1),
        num_engines=len(recipe.sm),
    )


def _capacity(recipe: BuildRecipe) -> int:
    return engine_kv_capacity(int(recipe.max_model_len), recipe.lookahead)


def check_memory(recipe: BuildRecipe, plan: MemoryPlan, clock: StageClock) -> None:
    """Tell what a build needs, and refuse it if this machine or the GPU it is meant for has too little.

    Raises:
        IncompatibleError: names what is needed and what there is.
    """
    clock.note(plan.describe())
    total, free, limit = memory_bytes()
    require_host_memory(plan, min(free, limit) if limit else free if total else 0)
    if recipe.gpu_memory_gb is not None:
        require_gpu_memory([plan], 0, recipe.gpu_memory_gb)


def check_bundle_memory(recipe: BuildRecipe, entries: Mapping[str, ModelEntry]) -> None:
    """Refuse a bundle whose models together do not fit the GPU that ``gpu_memory_gb`` describes.

    Raises:
        IncompatibleError: they do not; names weights, caches and activations.
    """
    if recipe.gpu_memory_gb is None:
        return
    plans = [memory_plan_of(recipe, entry.num_parameters, entry.layers) for entry in entries.values()]
    activations = sum(max(engine.memory_bytes or 0 for engine in entry.engines) for entry in entries.values())
    require_gpu_memory(plans, activations, recipe.gpu_memory_gb)


def build_gpu_engines(
    ir_model: "ir.Model",
    recipe: BuildRecipe,
    role: str,
    layers: tuple[LayerGeometry, ...],
    *,
    folder: Path,
    clock: StageClock,
) -> dict[str, Any]:
    """Lower a model and build its engines.

    Args:
        ir_model: the traced model after its passes; changed, and its weights are let go.
        recipe: resolved.
        role: ``"target"`` or ``"draft"``.
        layers: cache sizes.
        folder: where the engines go.
        clock: times the stages and takes notes.

    Returns:
        the fields of the manifest entry that come from here.

    Raises:
        UnsupportedModelError: the lowering cannot do what a layer needs.
        CheckFailedError: the engine cannot be built, or not exactly.
    """
    from specexport.lowering import lower_model
    from specexport.passes.linear_flatten import LinearFlattenPass

    if recipe.backend == _ORT_CUDA:
        return _build_ort_cuda(ir_model, role, folder, clock)
    capacity = _capacity(recipe)
    with clock.stage("lower", role, f"{recipe.backend}, {recipe.lowering}"):
        LinearFlattenPass()(ir_model)
        lower_model(ir_model, recipe.backend, lowering=recipe.lowering, kv_capacity=capacity)
        inputs = step_inputs(ir_model)
    with clock.stage("build", role):
        from specexport.backends.trt import TrtPlan, write_trt_engines

        profiles = plan_profiles(
            role,
            lookahead=recipe.lookahead,
            max_num_seqs=int(recipe.max_num_seqs or 1),
            max_num_tokens=int(recipe.max_num_tokens or 1),
        )
        plan = TrtPlan(recipe.backend, recipe.sm, profiles, layers, capacity)
        engines = write_trt_engines(ir_model, plan, folder, note=clock.note, names=inputs)
    return {
        "path": engines[0].path,
        "inputs": inputs,
        "lowering": recipe.lowering,
        "engines": engines,
        "profiles": profiles,
        "kv_capacity": capacity,
        "max_num_seqs": recipe.max_num_seqs,
    }

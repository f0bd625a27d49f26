"""The stages of a build for the CPU: lower a model to its graphs, and write them over one weights file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specexport.build.progress import StageClock
from specexport.lowering.step_inputs import step_inputs
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.manifest import SMALL_DRAFT_PARAMETERS


def build_cpu_engine(
    ir_model: Any, recipe: BuildRecipe, role: str, checkpoint: Any, *, folder: Path, clock: StageClock
) -> dict[str, Any]:
    """All graphs of a model, over one weights file. See ``build_gpu_engines`` for the other backends.

    A target gets layers that can be switched off, for drafting with itself. A draft gets its norms joined with the
    additions before them instead: the two exclude each other, and a draft has no use for the first.

    Args:
        ir_model: the traced model, after the passes; changed in place.
        recipe: the resolved recipe.
        role: ``"target"`` or ``"draft"``.
        checkpoint: the checkpoint, for its sizes.
        folder: where the files go.
        clock: times the stages.

    Returns:
        fields of the manifest entry.
    """
    from specexport.backends import build_engine, build_full_engine, build_padded_engine
    from specexport.lowering import lower_model
    from specexport.lowering.fuse import fuse_rotary, rotary_rows
    from specexport.lowering.fuse_norm import fuse_norms
    from specexport.lowering.layer_gate import gate_layers
    from specexport.passes.residual_blocks import find_residual_blocks

    fused, num_gates, obstacle = [], 0, None
    with clock.stage("lower", role, recipe.backend):
        padded_model = ir_model.clone()  # shares the weights
        if recipe.fuse:
            rows = rotary_rows(int(recipe.max_model_len), checkpoint.max_positions)
            fused.append(("rotary-fuse", fuse_rotary(ir_model, rows)))
        full_model = _full_model(ir_model, recipe, role, checkpoint.num_parameters)
        blocks = find_residual_blocks(ir_model) if role == "target" else None
        lower_model(ir_model, recipe.backend)
        if blocks is not None and blocks.obstacle is None:
            num_gates = gate_layers(ir_model, blocks)
        elif recipe.fuse:
            fused.append(("norm-fuse", fuse_norms(ir_model)))
        if blocks is not None:
            obstacle = blocks.obstacle
        lower_model(padded_model, recipe.backend, padded_kv=True)
    fields: dict[str, Any] = {}
    with clock.stage("build", role):
        fields["path"] = build_engine(ir_model, recipe.backend, folder)
        fields["padded_path"] = build_padded_engine(padded_model, recipe.backend, folder)
        release_weights(padded_model.graph.initializers.values())
        if full_model is not None:
            fields["full_path"] = build_full_engine(full_model, recipe.backend, folder)
            fields["full_inputs"] = step_inputs(full_model)
            release_weights(full_model.graph.initializers.values())
    return {
        **fields,
        "inputs": step_inputs(ir_model),
        "padded_inputs": step_inputs(padded_model),
        "num_gates": num_gates,
        "gate_obstacle": obstacle,
        "quantize": recipe.quantization_of(role),
        "fused": tuple(fused),
    }


def _full_model(ir_model: Any, recipe: BuildRecipe, role: str, num_parameters: int) -> Any | None:
    """The graph for steps of one token a row, from the traced model; None where it is not worth its memory.

    A session packs its weights for itself. So this graph is for small drafts only: their steps are mostly fixed cost
    per operator, and there are far fewer operators in it.
    """
    from specexport.lowering.fuse_norm import fuse_norms
    from specexport.lowering.one_token import lower_one_token

    if role != "draft" or not recipe.fuse or num_parameters >= SMALL_DRAFT_PARAMETERS:
        return None
    full_model = ir_model.clone()  # shares the weights
    if not lower_one_token(full_model):
        return None
    fuse_norms(full_model)
    return full_model


def release_weights(values: Iterable[Any]) -> None:
    """Let go of the weights of a graph that has been written.

    The rewrite rules of onnxscript live as long as their module and remember the last graph they saw; without this the
    checkpoint would stay in memory beside the engine that the check loads.

    Args:
        values: onnx_ir values of the initializers, those that passes replaced too.
    """
    for value in values:
        value.const_value = None

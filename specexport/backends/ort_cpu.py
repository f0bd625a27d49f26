"""ONNX Runtime on a CPU: several graphs of a model over one weights file."""

from typing import TYPE_CHECKING, Any

from specexport.backends.base import Backend, BuildJob, HeadNeed, RecipeFields, release_weights
from specexport_runtime.abi import ITEM_BYTES
from specexport_runtime.bundle.entry import NO_GATES, EngineEntry, Gates, PaddedGraph
from specexport_runtime.bundle.quant_kinds import KEPT
from specexport_runtime.machine import available_cores

if TYPE_CHECKING:
    import onnx_ir as ir


class OrtCpu(Backend):
    """See the module."""

    name = "ort-cpu"
    dtypes = ("float32", "bfloat16", "float16")
    computes = "float32"
    modules = ("onnxruntime",)
    extra = "cpu"
    options = ("self_draft", "kv_cache_dtype")
    own_operators = True
    packs_linear = True
    has_states = True
    chooses_adapters = True
    groups_experts = True
    head_needs: frozenset[HeadNeed] | None = frozenset(
        ["later tokens", "earlier guesses", "lent caches", "corrected logits"]
    )
    key_fields = ("quantize_lm_head", "fuse", "self_draft", "kv_cache_dtype")

    def engine_key(self, recipe: RecipeFields) -> dict[str, Any]:
        """See ``Backend.engine_key``."""
        from specexport.backends.ort import rotary_len

        return {**super().engine_key(recipe), "rotary_len": rotary_len(recipe)}

    def build(self, ir_model: "ir.Model", job: BuildJob) -> EngineEntry:
        """See ``Backend.build``. Layers that can be switched off exclude norms that are joined with additions."""
        from specexport.backends.ort import write_onnx, write_padded_onnx
        from specexport.lowering.common import step_inputs
        from specexport.lowering.feature_gate import gate_features
        from specexport.lowering.fuse import fuse_norms, fuse_rotary, rotary_rows
        from specexport.lowering.layer_gate import gate_layers, gate_prefix
        from specexport.lowering.low_rank import expand_adapters
        from specexport.lowering.ort_cpu import lower_ort_cpu, use_int8_caches
        from specexport.passes.block_linear import packed_formats
        from specexport.passes.residual_blocks import find_residual_blocks

        recipe, role, folder = job.recipe, job.role, job.folder
        fused, gates = [], NO_GATES
        with job.clock.stage("lower", role, self.name):
            padded_model = _padded_model(ir_model, job)
            if recipe.fuse:
                rows = rotary_rows(int(recipe.max_model_len), job.max_positions)
                fused.append(("rotary-fuse", fuse_rotary(ir_model, rows, job.max_positions)))
            if job.cache_ranges is not None:
                for model in (ir_model, *([] if padded_model is None else [padded_model])):
                    use_int8_caches(model, job.cache_ranges)
            gate = gate_prefix if job.first_only and job.layers else gate_layers
            gated = gate is gate_prefix or (recipe.self_draft and role == "target")
            blocks = find_residual_blocks(ir_model) if gated else None
            lower_ort_cpu(ir_model, trees=role == "target")
            if blocks is not None and blocks.obstacle is None:
                gates = Gates(blocks.gate_kinds if gate(ir_model, blocks) else ())
            elif recipe.fuse:
                fused.append(("norm-fuse", fuse_norms(ir_model)))
            if blocks is not None:
                gates = gates._replace(obstacle=blocks.obstacle)
            feature_size = gate_features(ir_model) or job.feature_size
            if padded_model is not None:
                lower_ort_cpu(padded_model, padded_kv=True)
                expand_adapters(padded_model, job.adapters)
            expand_adapters(ir_model, job.adapters)  # last: marks are in the branches of gates by now
        formats, padded = packed_formats(ir_model.graph), None
        stored, count = sum(each.num_bytes for each in formats), sum(each.weights for each in formats)
        with job.clock.stage("build", role):
            path = write_onnx(ir_model, folder, workers=available_cores())
            if padded_model is not None:
                padded = PaddedGraph(write_padded_onnx(padded_model, folder), step_inputs(padded_model))
                release_weights(padded_model.graph.initializers.values())
        return EngineEntry(
            path=path,
            inputs=step_inputs(ir_model),
            padded=padded,
            gates=gates,
            feature_size=feature_size,
            fused=tuple(fused),
            weight_formats=() if recipe.quantization_of(role) == KEPT.name else formats,  # else those of the checkpoint
            packed_bytes=(stored, count * ITEM_BYTES[self.computes]),
        )


def _padded_model(ir_model: "ir.Model", job: BuildJob) -> "ir.Model | None":
    """What becomes the padded-KV graph; heads have none, nor have models with states, which padding would enter."""
    from specexport.lowering.feature_gate import drop_features

    if job.role == "head" or job.states:
        return None
    padded_model = ir_model.clone()  # shares the weights
    drop_features(padded_model)
    return padded_model

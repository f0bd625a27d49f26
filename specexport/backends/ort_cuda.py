"""ONNX Runtime on an NVIDIA GPU: one packed graph over paged attention."""

from typing import TYPE_CHECKING, Any

from specexport.backends.base import Backend, BuildJob, HeadNeed, RecipeFields
from specexport.backends.cuda_kernels import check_kernels
from specexport.backends.present_gpu import gpu_check_obstacle
from specexport_runtime.bundle.entry import NO_GATES, EngineEntry, Gates

if TYPE_CHECKING:
    import onnx_ir as ir


class OrtCuda(Backend):
    """See the module."""

    name = "ort-cuda"
    dtypes = ("float16", "bfloat16")
    modules = ("onnxruntime",)
    extra = "cuda"
    options = ("self_draft",)
    head_needs: frozenset[HeadNeed] | None = frozenset()
    fixed_sizes = True
    packs_linear = True
    key_fields = ("quantize_lm_head", "fuse", "self_draft")

    def engine_key(self, recipe: RecipeFields) -> dict[str, Any]:
        """See ``Backend.engine_key``."""
        from specexport.backends.ort import rotary_len

        return {**super().engine_key(recipe), "rotary_len": rotary_len(recipe)}

    def build(self, ir_model: "ir.Model", job: BuildJob) -> EngineEntry:
        """See ``Backend.build``. A graph with branches cannot be recorded: gates where asked for, features always.

        Layers that can be switched off exclude norms that are joined with additions.
        """
        from specexport.backends.ort import write_onnx
        from specexport.lowering.common import step_inputs
        from specexport.lowering.feature_gate import feature_size
        from specexport.lowering.fuse import fuse_norms, rotary_rows
        from specexport.lowering.layer_gate import gate_layers
        from specexport.lowering.ort_cuda import fuse_for_paging, lower_ort_cuda
        from specexport.passes.quantize_ort_cuda import nbits_bytes
        from specexport.passes.residual_blocks import find_residual_blocks

        fused, fuse = [], job.recipe.fuse
        with job.clock.stage("lower", job.role, self.name):
            if fuse:
                rows = rotary_rows(int(job.recipe.max_model_len), job.max_positions)
                fused.append(("rotary-fuse", fuse_for_paging(ir_model, rows, job.max_positions)))
            blocks = find_residual_blocks(ir_model) if job.recipe.self_draft and job.role == "target" else None
            lower_ort_cuda(ir_model)
            inputs = step_inputs(ir_model)
            if blocks is not None and blocks.obstacle is None:
                gate_layers(ir_model, blocks, separate=True)
            elif fuse:
                fused.append(("norm-fuse", fuse_norms(ir_model)))
            check_kernels(ir_model)
        with job.clock.stage("build", job.role):
            path = write_onnx(ir_model, job.folder)
        quantize = job.recipe.quantization_of(job.role)
        return EngineEntry(
            path=path,
            inputs=inputs,
            lowering="paged",
            gates=NO_GATES if blocks is None else Gates(blocks.gate_kinds, blocks.obstacle),
            feature_size=feature_size(ir_model) or job.feature_size,
            fused=tuple(fused),
            packed_bytes=None if quantize is None else nbits_bytes(ir_model.graph, job.recipe.dtype),
        )

    def check_obstacle(self, recipe: RecipeFields) -> str | None:
        """See ``Backend.check_obstacle``."""
        return gpu_check_obstacle(recipe)

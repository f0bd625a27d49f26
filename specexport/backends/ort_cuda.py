"""ONNX Runtime on an NVIDIA GPU: one packed graph over paged attention."""

from typing import TYPE_CHECKING

from specexport.backends.base import Backend, BuildJob, HeadNeed, PartRecipe
from specexport.backends.cuda_kernels import check_kernels
from specexport.backends.present_gpu import find_gpu_unchecked_reason
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
    key_fields = ("quantize_lm_head", "fuse", "self_draft", "rotary_len")

    def build(self, ir_model: "ir.Model", job: BuildJob) -> EngineEntry:
        """See ``Backend.build``. A graph with branches cannot be recorded: gates where asked for, features always."""
        from specexport.backends.ort import write_onnx
        from specexport.lowering.common import select_fusions, step_inputs
        from specexport.lowering.feature_gate import feature_size
        from specexport.lowering.fuse import rotary_pass
        from specexport.lowering.layer_gate import gate_passes
        from specexport.lowering.ort_cuda import can_fuse_rotation, operator_passes
        from specexport.passes.pipeline import run_lowering
        from specexport.passes.quantize_ort_cuda import nbits_bytes
        from specexport.passes.residual_blocks import find_residual_blocks

        fuse = job.recipe.fuse
        with job.clock.stage("lower", job.role, self.name):
            blocks = find_residual_blocks(ir_model) if job.recipe.self_draft and job.role == "target" else None
            rotary = [rotary_pass(job.max_model_len, job.max_positions, can_fuse_rotation)] if fuse else []
            done = run_lowering(ir_model, [*rotary, *operator_passes()])
            inputs = step_inputs(ir_model)  # the executor binds gates apart from them
            done |= run_lowering(ir_model, gate_passes(blocks, fuse=fuse, separate=True))
            check_kernels(ir_model)
        with job.clock.stage("build", job.role):
            path = write_onnx(ir_model, job.folder)
        return EngineEntry(
            path=path,
            inputs=inputs,
            lowering="paged",
            gates=NO_GATES if blocks is None else Gates(blocks.gate_kinds, blocks.obstacle),
            feature_size=feature_size(ir_model) or job.feature_size,
            fused=select_fusions(done),
            packed_bytes=None if job.quantize is None else nbits_bytes(ir_model.graph, job.recipe.dtype),
        )

    def find_unchecked_reason(self, recipe: PartRecipe) -> str | None:
        """See ``Backend.find_unchecked_reason``."""
        return find_gpu_unchecked_reason(recipe)

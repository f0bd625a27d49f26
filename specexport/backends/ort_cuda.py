"""ONNX Runtime on an NVIDIA GPU: one packed graph over paged attention."""

from typing import TYPE_CHECKING, Any

from specexport.backends.base import Backend, BuildJob, RecipeFields
from specexport.backends.present_gpu import gpu_check_obstacle

if TYPE_CHECKING:
    import onnx_ir as ir


class OrtCuda(Backend):
    """See the module."""

    name = "ort-cuda"
    dtypes = ("float16", "bfloat16")
    modules = ("onnxruntime",)
    extra = "cuda"
    quantizations = ("int4",)
    quantize_operator = "MatMulNBits"
    quantize_block = 32  # loses least, and the only one that the tensor-core kernel of ONNX Runtime's wheels takes
    key_fields = ("quantize_lm_head",)
    draft_differs = False

    def build(self, ir_model: "ir.Model", job: BuildJob) -> dict[str, Any]:
        """See ``Backend.build``."""
        from specexport.backends.ort import write_onnx
        from specexport.lowering.ort_cuda import lower_ort_cuda
        from specexport.lowering.step_inputs import step_inputs
        from specexport.passes.quantize_graph import nbits_bytes

        with job.clock.stage("lower", job.role, self.name):
            lower_ort_cuda(ir_model)
            inputs = step_inputs(ir_model)
        with job.clock.stage("build", job.role):
            path = write_onnx(ir_model, job.folder)
        quantize = job.recipe.quantization_of(job.role)
        return {
            "path": path,
            "inputs": inputs,
            "lowering": "paged",
            "quantize": quantize,
            "quantized_bytes": None if quantize is None else nbits_bytes(ir_model.graph, job.recipe.dtype),
        }

    def check_obstacle(self, recipe: RecipeFields) -> str | None:
        """See ``Backend.check_obstacle``."""
        return gpu_check_obstacle(recipe)

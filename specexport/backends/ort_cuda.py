"""The stages of a build for ONNX Runtime on an NVIDIA GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.build.progress import StageClock

if TYPE_CHECKING:
    import onnx_ir as ir
from specexport.lowering.step_inputs import step_inputs

_ORT_CUDA = "ort-cuda"


def _build_ort_cuda(ir_model: "ir.Model", role: str, folder: Path, clock: StageClock) -> dict[str, Any]:
    from specexport.backends.ort import write_onnx
    from specexport.lowering import lower_model

    with clock.stage("lower", role, _ORT_CUDA):
        lower_model(ir_model, _ORT_CUDA)
        inputs = step_inputs(ir_model)
    with clock.stage("build", role):
        return {"path": write_onnx(ir_model, folder), "inputs": inputs, "lowering": "paged"}

"""Sessions of ONNX Runtime that know our operators, as the runtime opens them."""

from pathlib import Path
from typing import Any

from specexport_runtime.executors.operators import register


def session_of(model: Any, *, num_threads: int = 1, optimized: Path | None = None, **entries: str) -> Any:
    import onnx_ir as ir
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = num_threads, 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    register(options)
    if isinstance(model, ir.Model):
        model = ir.to_proto(model).SerializeToString()
    given = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])

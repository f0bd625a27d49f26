"""The layers of a finished engine, asked of TensorRT's own engine inspector.

That needs the engine to be deserialized, so a GPU that it runs on. Elsewhere the builder's text is read
(``trt_report.parse_layers``). Imports nothing heavy.
"""

from pathlib import Path
from typing import Any

from specexport.backends import present_gpu
from specexport.backends.base import ANY_ARCHITECTURE
from specexport.backends.trt_report import Layer, read_layers


def can_inspect(sm: str) -> bool:
    """Whether this machine's GPU is one that an engine for ``sm`` runs on."""
    present = present_gpu.present_architecture()
    return present is not None and sm in (present, ANY_ARCHITECTURE)


def inspect_engine(trt: Any, logger: Any, path: Path, num_profiles: int) -> list[Layer] | None:
    """The layers of every profile, with the sizes of the step that each profile is tuned for.

    The engine was built with ``ProfilingVerbosity.DETAILED``. None where TensorRT does not load it, take its sizes, or
    tell its layers in this form; ``logger`` gets the reason.
    """
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        return None
    layers: list[Layer] = []
    for profile in range(num_profiles):
        context = _make_context(trt, engine, profile)
        if context is None:
            return None
        inspector = engine.create_engine_inspector()
        inspector.execution_context = context
        found = read_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON), profile)
        if found is None:
            return None
        layers += found
    return layers


def _make_context(trt: Any, engine: Any, profile: int) -> Any:
    """A context that is never run, and needs no device memory: the inspector reads its sizes. None if refused."""
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if context is None or not context.set_optimization_profile_async(profile, 0):
        return None
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            _, best, _ = engine.get_tensor_profile_shape(name, profile)
            if not context.set_input_shape(name, best):
                return None
    return context

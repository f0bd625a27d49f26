"""TensorRT engines over lowered graphs."""

from typing import Any

import numpy as np

from specexport_runtime.executors.trt_engine import EngineTensor
from tests.support.fakes.trt_fakes import FakeContext, FakeEngine, FakeGpu
from tests.support.references.trt_evaluator import make_evaluator


class GraphContext(FakeContext):
    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        engine, gpu = self.engine, self.engine.gpu
        engine.runs.append(self.profile)
        feeds = {
            tensor.name: gpu.array(addresses[tensor.name], shapes[tensor.name], engine.dtypes[tensor.name]).copy()
            for tensor in engine.tensors
            if tensor.is_input
        }
        with np.errstate(all="ignore"):  # padding slots may hold NaN
            found = dict(zip(engine.evaluator.output_names, engine.evaluator.run(None, feeds), strict=True))
        for name, value in found.items():
            gpu.array(addresses[name], value.shape, str(value.dtype))[:] = value


class GraphEngine(FakeEngine):
    def __init__(self, gpu: FakeGpu, entry: Any, model: Any) -> None:
        self.gpu, self.entry = gpu, entry
        self.activation_bytes = 4096
        values = [*((value, True) for value in model.graph.inputs), *((value, False) for value in model.graph.outputs)]
        self.tensors = tuple(
            EngineTensor(str(v.name), tuple(d if isinstance(d, int) else -1 for d in v.shape), is_input)
            for v, is_input in values
        )
        self.dtypes = {str(value.name): value.dtype.numpy().name for value, _ in values}
        self.evaluator = make_evaluator(model, ("float32",))
        self.contexts, self.runs = [], []
        self.capturable, self.broken, self.closed = True, None, False

    def make_context(self, profile: int, activations: int, stream: int, *, is_fixed: bool) -> GraphContext:
        self.contexts.append(GraphContext(self, self.entry.engine.limits.profiles[profile]))
        return self.contexts[-1]

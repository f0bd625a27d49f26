"""Sessions of the GPU executor's ONNX Runtime, played by a CPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from specexport_runtime.abi import LayerGeometry, StepShape
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.executors.ort_cuda import OrtCudaExecutor
from specexport_runtime.executors.paged import BLOCK_ENTRIES
from tests.support.cases.entries import changed, make_entry
from tests.support.fakes import loop
from tests.support.fakes.fake_onnxruntime import FakeBinding, FakeOrt, view

VOCAB, CAPACITY, ROWS = 32, BLOCK_ENTRIES + 40, 4
INPUTS = ("input_ids", "positions", "logit_rows", "kv_lens", "cu_new_tokens")
LAYERS = (LayerGeometry(2, 16, 16), LayerGeometry(1, 10, 20))
ENTRY = make_entry(
    backend="ort-cuda", dtype="float16", vocab_size=VOCAB, layers=LAYERS, inputs=INPUTS, lowering="paged"
)
CACHES = [f"{kind}_cache.{i}" for i in range(len(LAYERS)) for kind in "kv"]


class FakeSession:
    """Keeps each token in its cache entry and computes logits from what it finds there, like ``FakeExecutor``."""

    def __init__(self, ort, inputs, model=None):
        self.ort, self.names = ort, inputs
        self.model = model or FakeExecutor(VOCAB, 1, 1)
        self.broken = self.records = None

    def get_inputs(self):
        return [SimpleNamespace(name=name) for name in self.names]

    def get_outputs(self):
        return [SimpleNamespace(name="logits")]

    def get_providers(self):
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def io_binding(self):
        return FakeBinding()

    def refuse(self, options):
        if self.records is False and options.config.get("gpu_graph_id") != "-1":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    def run_with_iobinding(self, binding, options):
        if self.broken is not None:
            raise RuntimeError(self.broken)
        self.ort.runs.append((binding, {k: v for k, v in options.config.items() if k == "gpu_graph_id"}))
        assert set(binding.inputs) == set(self.names)
        step = {name: view(binding.inputs[name], binding.inputs[name][1]) for name in self.names if name not in CACHES}
        assert binding.inputs["attention_metadata"][:3] == ("cpu", np.int32, (3,))
        assert all(bound[0] == "cuda" for name, bound in binding.inputs.items() if name != "attention_metadata")
        assert set(binding.outputs) == {"logits", "token_ids", *(n.replace("_cache.", "_cache_out.") for n in CACHES)}
        for name in CACHES:
            assert binding.inputs[name] == binding.outputs[name.replace("_cache.", "_cache_out.")]
            assert binding.inputs[name][1] == self.ort.element_type
        cache = view(binding.inputs["k_cache.1"], np.uint16)
        lens, cu, table = step["kv_lens"][:, 0], step["cu_new_tokens"], step["block_table"]
        counts, most, (query_bound, kv_bound, low) = np.diff(cu), 0, step["attention_metadata"]
        after = {}
        for row in range(len(lens)):
            total = int(lens[row] + counts[row])
            most = max(most, total)
            entries = [(table[row, at // BLOCK_ENTRIES], at % BLOCK_ENTRIES, 0, 0) for at in range(total)]
            for j in range(counts[row]):
                cache[entries[lens[row] + j]] = step["input_ids"][cu[row] + j]
                held = [int(cache[at]) for at in entries[: lens[row] + j + 1]]
                after[int(cu[row] + j)] = self.model.logits_after(held)
        assert low <= most <= kv_bound <= table.shape[1] * BLOCK_ENTRIES
        assert counts.max() <= query_bound
        logits = view(binding.outputs["logits"], np.float32)
        logits[...] = np.stack([after[int(at)] for at in step["logit_rows"]])
        view(binding.outputs["token_ids"], np.int64)[...] = logits.argmax(axis=1)


def fake_ort(patch: pytest.MonkeyPatch, model: FakeExecutor | None = None) -> FakeOrt:
    """ONNX Runtime with such sessions, in its place; their inputs are those that it has by then."""
    ort = FakeOrt(lambda ort, _path: FakeSession(ort, ort.inputs, model))
    ort.inputs = [*INPUTS, "block_table", "attention_metadata", *CACHES]
    return ort.install(patch)


class Opened(NamedTuple):
    """A draft model on a GPU that a CPU plays."""

    executor: Any
    waits: Callable[[], int]
    launches: Callable[[], int]


def open_cuda(folder: Path, patch: pytest.MonkeyPatch, model: FakeExecutor) -> Opened:
    del folder
    ort = fake_ort(patch, model)
    entry = changed(ENTRY, vocab_size=loop.VOCAB)
    executor = OrtCudaExecutor(Path("model.onnx"), entry, num_rows=model.num_rows, kv_capacity=loop.CAPACITY)
    rows = range(1, model.num_rows + 1)
    executor.capture([StepShape(0, count, count * new, new, count) for count in rows for new in (1, 2)])
    return Opened(executor, lambda: ort.gpus[0].waits, lambda: len(ort.runs))


def make_executor(entry=ENTRY, **arguments):
    arguments = {"num_rows": ROWS, "kv_capacity": CAPACITY} | arguments
    return OrtCudaExecutor(Path("model.onnx"), entry, **arguments)

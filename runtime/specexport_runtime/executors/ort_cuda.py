"""ONNX Runtime executor for NVIDIA GPUs: a KV arena of blocks, everything bound in device memory.

The engine's attention is ``com.microsoft.PagedAttention``: each cache is a pool of blocks of 256 entries, and a table
says which blocks each row of the step has. So the whole arena is bound once and stays where it is; a step on rows
[r, r+B) is a matter of the table, and a row moves by exchanging blocks. Verify steps may have a row for each token
(``paged``). Imports onnxruntime when an executor is made.
"""

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import CACHE_INPUTS, CU_NEW_TOKENS, KV_LENS, LOGITS, STEP_INPUTS, TOKEN_IDS, StepShape
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.profiles import head_steps
from specexport_runtime.errors import BundleError, IncompatibleError, InvalidRequestError, SpecexportError
from specexport_runtime.executors.base import (
    EngineBackend,
    EngineRequest,
    Float32Array,
    Int64Array,
    StepBuffers,
    StepOutput,
    Want,
)
from specexport_runtime.executors.features import WithFeatures
from specexport_runtime.executors.ort_cuda_graphs import SPLIT_BOUND, StepGraphs, say_graphs_are_off
from specexport_runtime.executors.ort_cuda_session import (
    compute_capability,
    import_onnxruntime,
    open_session,
    reason_of,
)
from specexport_runtime.executors.ort_features import OrtFeatures
from specexport_runtime.executors.ort_gates import GatedByInputs, OrtGates, is_gate
from specexport_runtime.executors.paged import (
    ATTENTION_METADATA,
    BLOCK_ENTRIES,
    BLOCK_TABLE,
    paged_head_size,
    pays,
    spread,
    token_row_shapes,
    token_rows,
)

_CACHE_TYPES: dict[str, tuple[int, type]] = {"float16": (10, np.uint16), "bfloat16": (16, np.uint16)}
"""ONNX TensorProto.DataType, and bytes of its size: numpy has no bfloat16."""
_MEMORY_HINT = "if its memory is full, lower `max_num_seqs` or `max_model_len`."
_MAX_SHAPES = 256
_MAX_DEVICE_SHAPES = 64


class _DeviceStep(NamedTuple):
    """What the steps of one size share on the device, whatever rows they are on."""

    binding: Any
    inputs: dict[str, Any]
    table: Any
    metadata: npt.NDArray[np.int32]
    outputs: dict[str, Any]
    options: tuple[Any, Any]
    replayed: bool
    similarity: Float32Array
    rows: list[int]
    """Cache rows whose blocks ``table`` holds now."""


class OrtCudaExecutor(GatedByInputs, WithFeatures):
    """Runs one engine with ONNX Runtime on an NVIDIA GPU.

    Step inputs are copied into memory that stays bound; only the output that is asked for comes back. Gates are in host
    memory, where ONNX Runtime reads them.

    IncompatibleError without a GPU, driver or enough memory, InvalidRequestError for CUDA graphs with gates,
    BundleError if ONNX Runtime cannot load the engine.
    """

    def __init__(
        self,
        path: Path,
        entry: ModelEntry,
        *,
        num_rows: int,
        kv_capacity: int,  # entries of each row (L); the arena rounds it up to whole blocks
        # Let the provider record the shapes given to :meth:`capture` and replay them. None does so where it can: the
        # engine has no gates, and ONNX Runtime does not refuse.
        cuda_graphs: bool | None = None,
        device_id: int = 0,
    ) -> None:
        if entry.dtype not in _CACHE_TYPES:
            raise IncompatibleError(f"{path}: there is no paged attention for {entry.dtype}.", "build it for float16.")
        if cuda_graphs and entry.engine.gates.kinds:
            raise InvalidRequestError(
                f"CUDA graphs are asked for, and {path} has branches, so that it can draft with some of its layers: "
                "ONNX Runtime records no graph with branches.",
                "leave --cuda-graphs out, or build it without --self-draft.",
            )
        self.vocab_size = entry.lm_head_rows
        self.num_rows = num_rows
        self.kv_capacity = kv_capacity
        self._device = ("cuda", device_id)
        self._ort = import_onnxruntime(device_id)
        self._session, self._graphs = self._open(path, entry, cuda_graphs)
        self._check_contract(path, entry)
        # Steps of few tokens are handed to the engine as a row for each token.
        self.splits_rows = pays(entry, compute_capability(device_id), os.environ)
        self.gate_kinds = entry.engine.gates.kinds
        self.num_gates = len(self.gate_kinds)
        self._gates = OrtGates(self._session, self.num_gates, path, separate=True)
        self._similarity: Float32Array = np.zeros((self.num_gates // 2, 0), np.float32)
        self._features: OrtFeatures = OrtFeatures(self._session, entry.engine.feature_size, path, on_gpu=True)
        self._tell_features(self._features)
        self.num_draft_heads = 0 if entry.draft_head is None else entry.draft_head.num_draft_heads
        self._paged = bool(entry.attention.layers)  # heads over one feature have no attention
        self._inputs = [spec for spec in STEP_INPUTS if spec.name in entry.engine.inputs]
        self._element_type, self._cache_bytes = _CACHE_TYPES[entry.dtype]
        self._row_blocks = np.arange(num_rows * -(-kv_capacity // BLOCK_ENTRIES), dtype=np.int32).reshape(num_rows, -1)
        self._caches: dict[str, Any] = {}
        for i, layer in enumerate(entry.attention.layers):
            shape = (self._row_blocks.size, BLOCK_ENTRIES, layer.kv_heads, paged_head_size(layer))
            for spec in CACHE_INPUTS:
                # Zeros, because 0 times anything finite is 0.
                self._caches[spec.name.format(i=i)] = self._to_device(np.zeros(shape, self._cache_bytes))
        self._steps: OrderedDict[tuple[StepShape, bool], _DeviceStep] = OrderedDict()
        self._buffers: OrderedDict[StepShape, StepBuffers] = OrderedDict()
        self._current: StepShape | None = None

    def _open(self, path: Path, entry: ModelEntry, cuda_graphs: bool | None) -> tuple[Any, StepGraphs]:
        """The session, for graphs where they are wanted or can be had, and their numbers."""
        optional, device_id = cuda_graphs is None, self._device[1]
        enabled = not entry.engine.gates.kinds if cuda_graphs is None else cuda_graphs
        try:
            session = open_session(self._ort, path, device_id, enabled)
        except BundleError as error:
            if not (optional and enabled):
                raise
            enabled = False
            session = open_session(self._ort, path, device_id, enabled)
            say_graphs_are_off(error)
        return session, StepGraphs(self._ort, enabled=enabled, optional=optional)

    def _check_contract(self, path: Path, entry: ModelEntry) -> None:
        expected = {spec.name.format(i=i) for i in range(len(entry.attention.layers)) for spec in CACHE_INPUTS}
        expected |= {*entry.engine.inputs}
        expected |= {BLOCK_TABLE.name, ATTENTION_METADATA.name} if entry.attention.layers else set()
        odd = sorted(expected ^ {value.name for value in self._session.get_inputs() if not is_gate(value.name)})
        if odd:
            raise IncompatibleError(f"{path}: inputs differ from the manifest's: {', '.join(odd)}.", "build it again.")

    @property
    def kv_bytes(self) -> int:
        """Bytes of device memory that the KV arena takes."""
        return sum(int(cache.tensor_size_in_bytes()) for cache in self._caches.values())

    def prepare(self, shape: StepShape) -> StepBuffers:
        """The host arrays of ``shape``, to be filled. See ``Executor.prepare``."""
        if shape.kv_span:
            raise SpecexportError("backend ort-cuda has no padded-KV graphs.", "use `unpad_kv=True`.")
        if shape.first_row + shape.num_seqs > self.num_rows:
            raise SpecexportError(f"{shape} does not fit {self.num_rows} rows.")
        buffers = self._buffers.get(shape)
        if buffers is None:
            while len(self._buffers) >= _MAX_SHAPES:
                self._buffers.popitem(last=False)
            arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in STEP_INPUTS}
            buffers = StepBuffers(**arrays, token_features=self._features.host_rows(shape.num_tokens))
            self._buffers[shape] = buffers
        else:
            self._buffers.move_to_end(shape)
        self._current = shape
        return buffers

    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step: logits [R, V] float32, or each row's greedy token, int64 [R], -1 for a NaN."""
        shape = self._current
        if shape is None:
            raise SpecexportError("execute() was called before prepare().")
        start = time.perf_counter()
        size = self._size_of(shape)
        step = self._device_step(size)
        try:
            if not self._run(step, size, shape):
                self._steps.clear()
                step = self._device_step(size)
                self._run(step, size, shape)
            result: StepOutput = step.outputs[want].numpy()
            self._bound = self._features.fetch(step.outputs)
        except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
            raise SpecexportError(f"ONNX Runtime failed on the GPU in {shape}: {error}", _MEMORY_HINT) from error
        self.engine_seconds += time.perf_counter() - start
        self._similarity = step.similarity
        return result

    def _size_of(self, shape: StepShape) -> StepShape:
        """The step's size as the engine sees it, whatever rows it is on."""
        return (token_rows(shape) if self.splits_rows else None) or shape._replace(first_row=0)

    def _run(self, step: _DeviceStep, size: StepShape, shape: StepShape) -> bool:
        """Run a step on the device; False if it was to be recorded and cannot be."""
        is_long = self._fill(step, size, shape)
        try:
            self._session.run_with_iobinding(step.binding, step.options[is_long])
        except Exception as error:  # as below
            if self._graphs.give_up(size, is_long, error):
                return False
            raise
        self._graphs.note(size, is_long)
        return True

    def _fill(self, step: _DeviceStep, size: StepShape, shape: StepShape) -> bool:
        """Bring the prepared arrays to the device; returns whether the step is one for which entries are split."""
        buffers = self._buffers[shape]
        rows, kv_lens, cu_new_tokens = np.arange(shape.num_seqs), buffers.kv_lens, buffers.cu_new_tokens
        if size.max_new_tokens != shape.max_new_tokens:
            rows, kv_lens, cu_new_tokens = spread(buffers)
        by_row = {KV_LENS.name: kv_lens, CU_NEW_TOKENS.name: cu_new_tokens}
        for name, value in step.inputs.items():
            value.update_inplace(by_row[name] if name in by_row else getattr(buffers, name))
        blocks = self._row_blocks[shape.first_row + rows]
        firsts = blocks[:, 0].tolist()
        if step.rows != firsts:
            step.table.update_inplace(blocks)
            step.rows[:] = firsts
        if not step.replayed:
            counts = np.diff(cu_new_tokens)
            longest = int((kv_lens[:, 0] + counts).max())
            step.metadata[:] = counts.max(), longest, longest
            return False
        is_single = size.max_new_tokens == 1 and size.num_seqs == size.num_tokens
        is_long = is_single and int(kv_lens.max()) >= SPLIT_BOUND - 1
        step.metadata[2] = SPLIT_BOUND if is_long else 0
        return is_long

    def capture(self, shapes: list[StepShape]) -> None:
        """With CUDA graphs, the next step of each of ``shapes`` is recorded, for any rows; nothing runs before."""
        for size in self._graphs.add(map(self._size_of, shapes)):
            self._steps.pop((size, False), None)

    def move_row(self, source: int, destination: int, kv_len: int) -> None:  # noqa: ARG002
        """Give row ``destination`` the entries of row ``source`` by exchanging their blocks; nothing is copied."""
        self._row_blocks[[source, destination]] = self._row_blocks[[destination, source]]

    def clear_row(self, row: int) -> None:
        """Nothing: attention reads no entry beyond a row's length."""

    def move_entries(self, row: int, entries: Int64Array) -> None:
        """Refuse (SpecexportError): only padded-KV graphs move entries, and this backend has none."""
        raise SpecexportError(f"backend ort-cuda cannot move {len(entries)} entries of row {row}.", "use unpadded KV.")

    def close(self) -> None:
        """Release the session and the arena."""
        self._steps.clear()
        self._buffers.clear()
        self._caches.clear()
        self._current = None
        self._session = None

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        """A device value with the content of ``array``."""
        try:
            value = self._ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, *self._device)
            value.update_inplace(array)
        except Exception as error:  # as above
            size = array.nbytes / 2**20
            raise IncompatibleError(f"the GPU gives no {size:.0f} MiB: {reason_of(error)}.", _MEMORY_HINT) from error
        return value

    def _device_step(self, size: StepShape) -> _DeviceStep:
        key = (size, self._gates.wanted)
        step = self._steps.get(key)
        if step is not None:
            self._steps.move_to_end(key)
            return step
        # A graph keeps the addresses that it was recorded with: those stay.
        others = [old for old in self._steps if old[0] not in self._graphs.sizes]
        if len(others) >= _MAX_DEVICE_SHAPES:
            del self._steps[others[0]]
        step = self._bind(*key)
        self._steps[key] = step
        return step

    def _bind(self, size: StepShape, measured: bool) -> _DeviceStep:
        binding = self._session.io_binding()
        values = {s.name: self._to_device(np.zeros(size.shape_of(s), s.dtype)) for s in self._inputs}
        values |= self._features.device_inputs(size, self._to_device)
        table = self._to_device(np.zeros((size.num_seqs, self._row_blocks.shape[1]), np.int32))
        for name, value in (*values.items(), *([(BLOCK_TABLE.name, table)] if self._paged else [])):
            binding.bind_ortvalue_input(name, value)
        # Bounds for every replay; the last one has a graph for each value. Without replay, each step writes its own.
        metadata = np.array([size.max_new_tokens, self.kv_capacity, 0], np.int32)
        if self._paged:
            binding.bind_input(ATTENTION_METADATA.name, "cpu", 0, np.int32, metadata.shape, metadata.ctypes.data)
        for name, cache in self._caches.items():
            bound = (*self._device, self._element_type, cache.shape(), cache.data_ptr())
            binding.bind_input(name, *bound)
            binding.bind_output(name.replace("_cache.", "_cache_out."), *bound)
        outputs = {
            LOGITS.name: self._to_device(np.zeros((size.num_logit_rows, self.vocab_size), np.float32)),
            TOKEN_IDS.name: self._to_device(np.zeros(size.num_logit_rows, np.int64)),
            **self._features.device_outputs(size, self._to_device),
        }
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        replayed = self._graphs.keep(size, sum(int(value.tensor_size_in_bytes()) for value in outputs.values()))
        options = self._graphs.options(size)
        similarity = self._gates.bind(binding, size, measured)
        return _DeviceStep(binding, values, table, metadata, outputs, options, replayed, similarity, [])


def open_ort_cuda_executor(request: EngineRequest) -> OrtCudaExecutor:
    """Open an engine on an NVIDIA GPU; its rounds are recorded as CUDA graphs unless that is switched off."""
    executor = OrtCudaExecutor(
        request.folder / request.entry.engine.path,
        request.entry,
        num_rows=request.num_rows,
        kv_capacity=request.kv_capacity,
        cuda_graphs=request.cuda_graphs,
    )
    executor.capture(_round_shapes(request) + (token_row_shapes() if executor.splits_rows else []))
    return executor


def _round_shapes(request: EngineRequest) -> list[StepShape]:
    """Steps that rounds are made of: one token a row, and what verifies (or catches up), for every batch size."""
    head, rows = request.entry.draft_head, request.num_rows
    if head is None:
        width = request.lookahead + 1 if request.role == "target" else 2
        sizes = [(1, 1, rows), (width, width if request.role == "target" else 1, rows)]
    else:
        steps = head_steps(
            request.lookahead,
            num_draft_heads=head.num_draft_heads,
            has_mask=head.mask_token_id is not None,
        )
        sizes = [(width, steps.logits, 1 if steps.fresh else rows) for width in steps.widths]
        sizes += [(1, 1, rows)] if steps.steps_alone else []
    return [
        StepShape(0, count, count * new, new, count * wanted)
        for new, wanted, most in sizes
        for count in range(1, most + 1)
    ]


BACKEND = EngineBackend(
    open_ort_cuda_executor,
    on_gpu=True,
    has_gates=True,
    modules=("onnxruntime",),
    provider="CUDAExecutionProvider",
)

"""ONNX Runtime executor for NVIDIA GPUs: a KV arena of blocks, everything bound in device memory.

The engine's attention is ``com.microsoft.PagedAttention``: each cache is a pool of blocks of 256 entries, and a table
says which blocks each row of the step has. So the whole arena is bound once and stays where it is; a step on rows
[r, r+B) is a matter of the table, and a row moves by exchanging blocks. Verify steps may have a row for each token
(``paged``). Imports onnxruntime and cuda-python when an executor is made.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import (
    CACHE_INPUTS,
    CU_NEW_TOKENS,
    INPUT_IDS,
    KV_LENS,
    LOGITS,
    STEP_INPUTS,
    TOKEN_FEATURES,
    TOKEN_IDS,
    StepShape,
    with_feature_size,
)
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.profiles import head_steps
from specexport_runtime.errors import BundleError, IncompatibleError, InvalidRequestError, SpecexportError
from specexport_runtime.executors.base import (
    EngineBackend,
    EngineRequest,
    Float32Array,
    Int64Array,
    StepBuffers,
)
from specexport_runtime.executors.device_rows import open_sampler
from specexport_runtime.executors.gpu import MEMORY_HINT, GpuDriver
from specexport_runtime.executors.gpu_memory import ID_BYTES, GpuFeatures, HostOutput, lay_out
from specexport_runtime.executors.gpu_steps import GpuSteps, IssuedStep
from specexport_runtime.executors.ort_cuda_graphs import SPLIT_BOUND, StepGraphs, log_graphs_off
from specexport_runtime.executors.ort_cuda_memory import INPUTS, HostStep, StepLayout, StepMemory
from specexport_runtime.executors.ort_cuda_session import (
    compute_capability,
    import_onnxruntime,
    is_out_of_memory,
    open_session,
    summarize_error,
)
from specexport_runtime.executors.ort_features import feature_shapes
from specexport_runtime.executors.ort_gates import InputGatesMixin, is_gate
from specexport_runtime.executors.paged import (
    ATTENTION_METADATA,
    BLOCK_ENTRIES,
    BLOCK_TABLE,
    is_faster_with_token_rows,
    paged_head_size,
    spread_tokens,
    to_token_rows,
    token_row_shapes,
)
from specexport_runtime.executors.warm_up import warm_up

_CACHE_TYPES = {"float16": (10, "uint16"), "bfloat16": (16, "uint16")}
"""ONNX TensorProto.DataType, and a numpy type of its size: numpy has no bfloat16."""
_DEVICE_ID = 0
_DEVICE = ("cuda", _DEVICE_ID)
_MIN_BFLOAT16 = 80  # onnxruntime's MemoryEfficientAttention has no bfloat16 below, its FlashAttention nothing
_MAX_SHAPES = 256


class _DeviceStep(NamedTuple):
    """What the steps of one size share on the device, whatever rows they are on."""

    binding: Any
    layout: StepLayout
    at: Mapping[str, int]
    """Addresses of its buffers."""
    metadata: npt.NDArray[np.int32]
    options: tuple[Any, Any]
    replayed: bool
    similarity: Float32Array


class _PreparedStep(NamedTuple):
    """A step as it was asked for."""

    shape: StepShape
    size: StepShape  # as the engine sees it
    buffers: StepBuffers


class OrtCudaExecutor(InputGatesMixin, GpuSteps):
    """Runs one engine with ONNX Runtime on an NVIDIA GPU, on a stream of its own.

    A step costs the host its inputs gathered in pinned memory, one copy to the device, one run, which waits for
    nothing, one copy of the output that is asked for, and one wait. Gates are in host memory, where ONNX Runtime reads
    them; runs of an engine with gates wait themselves.

    IncompatibleError without a GPU, driver or enough memory, InvalidRequestError for CUDA graphs with gates,
    BundleError if ONNX Runtime cannot load the engine, MissingDependencyError without it or cuda-python.
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
        driver: GpuDriver | None = None,  # stream and memory, closed with the executor; None makes a ``CudaDriver``
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
        self._ort = import_onnxruntime(_DEVICE_ID)
        if driver is None:
            from specexport_runtime.executors.cuda_driver import CudaDriver

            driver = CudaDriver()
        self.driver = driver
        self._session: Any = None
        self._steps: OrderedDict[tuple[StepShape, bool], _DeviceStep] = OrderedDict()
        self._buffers: OrderedDict[StepShape, _PreparedStep] = OrderedDict()
        self._current: _PreparedStep | None = None
        self._last: _DeviceStep | None = None
        self._hosts: list[HostStep] = []
        with ExitStack() as stack:
            stack.callback(driver.close)
            self._load(path, entry, cuda_graphs, stack)
            self._resources = stack.pop_all()

    def _load(self, path: Path, entry: ModelEntry, cuda_graphs: bool | None, stack: ExitStack) -> None:
        """Open the session and allocate everything around it; ``stack`` gives it back."""
        driver, num_rows = self.driver, self.num_rows
        self._session, self._graphs = self._open(path, entry, cuda_graphs)
        stack.callback(self._forget_session)
        self._check_contract(path, entry)
        capability = compute_capability(_DEVICE_ID)
        if entry.dtype == "bfloat16" and 0 < capability < _MIN_BFLOAT16:
            raise IncompatibleError(
                f"{path}: attention in bfloat16 needs compute capability 8.0, and this GPU has {capability / 10:.1f}.",
                "build it again with --dtype float16.",
            )
        # Steps of few tokens are handed to the engine as a row for each token.
        self.splits_rows = is_faster_with_token_rows(entry, capability, os.environ)
        self.gate_kinds = entry.engine.gates.kinds
        self.num_gates = len(self.gate_kinds)
        self.chains = not self.num_gates  # runs with gates wait
        self.open_gates(self._session, path, separate=True)
        size = entry.engine.feature_size
        self._features: GpuFeatures = GpuFeatures(feature_shapes(self._session), size, path, driver)
        self._set_feature_traits(self._features)
        self.num_draft_heads = 0 if entry.draft_head is None else entry.draft_head.num_draft_heads
        self._paged = bool(entry.attention.layers)  # heads over one feature have no attention
        read = [TOKEN_FEATURES] if self.reads_features else []
        specs = [spec for spec in STEP_INPUTS if spec.name in entry.engine.inputs]
        self._inputs = [*specs, *(with_feature_size(spec, size) for spec in read)]
        blocks = np.arange(num_rows * -(-self.kv_capacity // BLOCK_ENTRIES), dtype=np.int32)
        self._row_blocks = blocks.reshape(num_rows, -1)
        self._element_type, cache_bytes = _CACHE_TYPES[entry.dtype]
        shapes = {
            spec.name.format(i=i): (self._row_blocks.size, BLOCK_ENTRIES, layer.kv_heads, paged_head_size(layer))
            for i, layer in enumerate(entry.attention.layers)
            for spec in CACHE_INPUTS
        }
        self._caches, self.kv_bytes = lay_out((name, shape, cache_bytes) for name, shape in shapes.items())
        self._arena = driver.allocate(self.kv_bytes, f"{path}: the KV cache of {num_rows} rows")
        stack.callback(driver.free, self._arena)
        driver.clear(self._arena, self.kv_bytes)  # because 0 times anything finite is 0
        self._memory = StepMemory(driver, path)
        self._logits = HostOutput(driver, (self.vocab_size,), "float32")
        for each in (self._memory, self._logits, self._features):
            stack.callback(each.close)
        self._set_up_steps(driver, open_sampler(driver, self.vocab_size, num_rows))
        if self.rows is not None:
            stack.callback(self.rows.close)

    def _open(self, path: Path, entry: ModelEntry, cuda_graphs: bool | None) -> tuple[Any, StepGraphs]:
        """The session, for graphs where they are wanted or can be had, and their numbers."""
        optional, has_gates = cuda_graphs is None, bool(entry.engine.gates.kinds)
        enabled = not has_gates if cuda_graphs is None else cuda_graphs
        try:
            session = open_session(self._ort, path, _DEVICE_ID, self.driver.stream, enabled)
        except BundleError as error:
            if not (optional and enabled):
                raise
            enabled = False
            session = open_session(self._ort, path, _DEVICE_ID, self.driver.stream, enabled)
            log_graphs_off(error)
        return session, StepGraphs(self._ort, self.driver, enabled=enabled, optional=optional, waits=has_gates)

    def _check_contract(self, path: Path, entry: ModelEntry) -> None:
        expected = {spec.name.format(i=i) for i in range(len(entry.attention.layers)) for spec in CACHE_INPUTS}
        expected |= {*entry.engine.inputs}
        expected |= {BLOCK_TABLE.name, ATTENTION_METADATA.name} if entry.attention.layers else set()
        odd = sorted(expected ^ {value.name for value in self._session.get_inputs() if not is_gate(value.name)})
        if odd:
            raise IncompatibleError(
                f"{path}: inputs differ from the manifest's: {', '.join(odd)}.",
                "run `specexport build --backend ort-cuda` again.",
            )

    @property
    def logits_address(self) -> int:
        """Where the logits of the last step [R, V], float32, lie on the device until the next one; 0 before any."""
        return 0 if self._last is None else self._last.at[LOGITS.name]

    def prepare(self, shape: StepShape) -> StepBuffers:
        """The host arrays of ``shape``, to be filled. See ``Executor.prepare``."""
        if shape.kv_span:
            raise SpecexportError("backend ort-cuda has no padded-KV graphs.", "use `unpad_kv=True`.")
        if shape.first_row + shape.num_seqs > self.num_rows:
            raise SpecexportError(f"{shape} does not fit {self.num_rows} rows.")
        prepared = self._buffers.get(shape)
        if prepared is None:
            while len(self._buffers) >= _MAX_SHAPES:
                self._buffers.popitem(last=False)
            arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in STEP_INPUTS}
            features = np.zeros((shape.num_tokens, self.feature_size), np.float32) if self.reads_features else None
            buffers = StepBuffers(**arrays, token_features=features)
            prepared = self._buffers[shape] = _PreparedStep(shape, self._size_of(shape), buffers)
        else:
            self._buffers.move_to_end(shape)
        self._current = prepared
        return prepared.buffers

    def _enqueue_step(self, number: int | None, *, fed: bool) -> IssuedStep:
        if self._current is None:
            raise SpecexportError("execute() was called before prepare().")
        host, size = self._host_step(number or 0), self._current.size
        step = self._run(self._current, host, self._last if fed else None)
        features = step.at.get(self._features.output or "", 0)
        ids, rows = step.at[TOKEN_IDS.name], size.num_logit_rows
        return IssuedStep(step, size, rows, slice(size.num_tokens), host.ids, self.logits_address, ids, features)

    def _on_steps_done(self, steps: Sequence[IssuedStep]) -> None:
        if steps:
            self._similarity = steps[-1].placed.similarity

    @contextmanager
    def _time_engine(self) -> Iterator[None]:
        try:
            with super()._time_engine():
                yield
        except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
            if self._current is None or isinstance(error, IncompatibleError):  # a GPU without memory has said so
                raise
            raise self._make_step_error(error) from error

    def _host_step(self, i: int) -> HostStep:
        """Pinned memory of the i-th step of a chain."""
        if i == len(self._hosts):
            self._hosts.append(HostStep(self.driver))
            self._resources.callback(self._hosts[i].close)
        return self._hosts[i]

    def _make_step_error(self, error: Exception) -> Exception:
        """What to raise for an error in the prepared step."""
        where = None if self._current is None else self._current.shape
        if is_out_of_memory(error):
            return IncompatibleError(f"the GPU has no memory left in {where}: {summarize_error(error)}.", MEMORY_HINT)
        return SpecexportError(f"ONNX Runtime failed on the GPU in {where}: {error}", "see `specexport doctor`.")

    def _size_of(self, shape: StepShape) -> StepShape:
        """The step's size as the engine sees it, whatever rows it is on."""
        return (to_token_rows(shape) if self.splits_rows else None) or shape._replace(first_row=0)

    def _run(self, prepared: _PreparedStep, host: HostStep, before: _DeviceStep | None = None) -> _DeviceStep:
        """Put a step on the stream, fed with the ids of ``before``; one that cannot be recorded runs eagerly."""
        size = prepared.size
        step = self._device_step(size)
        is_long = self._fill(step, prepared, host)
        host.send(step.at[INPUTS], step.layout.sizes[INPUTS])
        if before is not None:
            width = ID_BYTES * size.num_tokens
            self.driver.copy_rows(step.at[INPUTS] + step.layout.ids, before.at[TOKEN_IDS.name], width, 1, width)
        try:
            self._session.run_with_iobinding(step.binding, step.options[is_long])
        except Exception as error:  # as above
            if not self._graphs.disable_if_optional(size, is_long, error):
                raise
            self._steps.clear()
            return self._run(prepared, host, before)
        self._graphs.record_run(size, is_long)
        self._last = step
        return step

    def _fill(self, step: _DeviceStep, prepared: _PreparedStep, host: HostStep) -> bool:
        """Gather the prepared arrays in pinned memory; returns whether the step is one for which entries are split."""
        shape, size, buffers = prepared
        kv_lens, cu_new_tokens = buffers.kv_lens, buffers.cu_new_tokens
        blocks = self._row_blocks[shape.first_row : shape.first_row + shape.num_seqs]
        if size.max_new_tokens != shape.max_new_tokens:
            rows, kv_lens, cu_new_tokens = spread_tokens(buffers)
            blocks = blocks[rows]
        by_row = {KV_LENS.name: kv_lens, CU_NEW_TOKENS.name: cu_new_tokens, BLOCK_TABLE.name: blocks}
        for name, array in host.arrays(size, step.layout).items():
            array[...] = by_row[name] if name in by_row else getattr(buffers, name)
        # ONNX Runtime reads the metadata while it launches a step, and not of one that is replayed.
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
            self._make_room(self._lay_out(size))

    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """Give row ``destination`` the entries of row ``source`` by exchanging their blocks; nothing is copied."""
        self.swap_rows(source, destination, (kv_len, 0))

    copies_rows = True

    def copy_row(self, source: int, destination: int, kv_len: int, floor: int = 0) -> None:  # noqa: ARG002
        """See ``Executor.copy_row``. The blocks of a row lie one after the other."""
        for cache in self._caches:
            num_bytes = int(np.prod(cache.shape[1:])) * np.dtype(cache.dtype).itemsize
            begin, end = (
                self._arena + cache.offset + int(self._row_blocks[row, 0]) * num_bytes for row in (source, destination)
            )
            width = kv_len * num_bytes // BLOCK_ENTRIES
            self.driver.copy_rows(end, begin, width, 1, width)

    def swap_rows(
        self,
        one: int,
        other: int,
        kv_lens: tuple[int, int],  # noqa: ARG002
        floors: tuple[int, int] = (0, 0),  # noqa: ARG002
    ) -> None:
        """See ``Executor.swap_rows``: the rows exchange their blocks, and nothing is copied."""
        self._row_blocks[[one, other]] = self._row_blocks[[other, one]]

    def clear_row(self, row: int) -> None:
        """Nothing: attention reads no entry beyond a row's length."""

    def move_entries(self, row: int, entries: Int64Array, start: int = 0) -> None:  # noqa: ARG002
        """Refuse (SpecexportError): only padded-KV graphs move entries, and this backend has none."""
        raise SpecexportError(f"backend ort-cuda cannot move {len(entries)} entries of row {row}.", "use unpadded KV.")

    def close(self) -> None:
        """Release the session and its memory. A GPU that has failed cannot give anything back any more."""
        self._buffers.clear()
        self._current = None
        with suppress(SpecexportError):
            self._resources.close()

    def _forget_session(self) -> None:
        """Drop the session and what refers to it, before its stream goes."""
        self._steps.clear()
        self._last = self._session = None

    def _device_step(self, size: StepShape) -> _DeviceStep:
        key = (size, bool(self._measures[0]))
        step = self._steps.get(key)
        if step is not None:
            self._steps.move_to_end(key)
            return step
        layout = self._lay_out(size)
        self._make_room(layout)
        others = [old for old in self._steps if old[0] not in self._graphs.sizes]
        if len(others) >= _MAX_SHAPES:
            del self._steps[others[0]]
        step = self._steps[key] = self._bind(size, layout, key[1])
        return step

    def _lay_out(self, size: StepShape) -> StepLayout:
        table = [(BLOCK_TABLE.name, (size.num_seqs, self._row_blocks.shape[1]), "int32")] if self._paged else []
        inputs, num_bytes = lay_out([*((s.name, size.shape_of(s), s.dtype) for s in self._inputs), *table])
        outputs = {
            LOGITS.name: 4 * size.num_logit_rows * self.vocab_size,
            TOKEN_IDS.name: ID_BYTES * size.num_logit_rows,
        }
        if self._features.output is not None:
            outputs[self._features.output] = 4 * self._features.num_rows(size) * self.feature_size
        ids = next(tensor.offset for tensor in inputs if tensor.name == INPUT_IDS.name)
        return StepLayout(inputs, {INPUTS: num_bytes, **outputs}, ids)

    def _make_room(self, layout: StepLayout) -> None:
        """Buffers that hold a step. Where one moves, steps are bound anew, but for those with a graph over it."""
        if self._memory.needs_growth(layout.sizes):
            has_graphs = self._graphs.has_recorded
            for key in [old for old in self._steps if not (has_graphs and old[0] in self._graphs.sizes)]:
                del self._steps[key]
            self._memory.grow(layout.sizes, keeps=has_graphs or bool(self._chain))

    def _bind(self, size: StepShape, layout: StepLayout, measured: bool) -> _DeviceStep:
        binding, at = self._session.io_binding(), dict(self._memory.addresses)
        for tensor in layout.inputs:
            kind = np.dtype(tensor.dtype).type
            binding.bind_input(tensor.name, *_DEVICE, kind, tensor.shape, at[INPUTS] + tensor.offset)
        # Bounds for every replay; the last one has a graph for each value. Without replay, each step writes its own.
        metadata = np.array([size.max_new_tokens, self.kv_capacity, 0], np.int32)
        if self._paged:
            binding.bind_input(ATTENTION_METADATA.name, "cpu", 0, np.int32, metadata.shape, metadata.ctypes.data)
        for cache in self._caches:
            bound = (*_DEVICE, self._element_type, cache.shape, self._arena + cache.offset)
            binding.bind_input(cache.name, *bound)
            binding.bind_output(cache.name.replace("_cache.", "_cache_out."), *bound)
        rows = size.num_logit_rows
        binding.bind_output(LOGITS.name, *_DEVICE, np.float32, (rows, self.vocab_size), at[LOGITS.name])
        binding.bind_output(TOKEN_IDS.name, *_DEVICE, np.int64, (rows,), at[TOKEN_IDS.name])
        if (features := self._features.output) is not None:
            shape = (self._features.num_rows(size), self.feature_size)
            binding.bind_output(features, *_DEVICE, np.float32, shape, at[features])
        similarity = self.bind_gates(binding, size, measured)
        options = self._graphs.options(size)
        return _DeviceStep(binding, layout, at, metadata, options, size in self._graphs.sizes, similarity)


def open_ort_cuda_executor(request: EngineRequest) -> OrtCudaExecutor:
    """Open an engine on an NVIDIA GPU, warm it up, and record rounds as CUDA graphs unless that is off."""
    path = request.folder / request.entry.engine.path
    executor = OrtCudaExecutor(
        path,
        request.entry,
        num_rows=request.num_rows,
        kv_capacity=request.kv_capacity,
        cuda_graphs=request.cuda_graphs,
    )
    shapes = _round_shapes(request)
    try:
        executor.capture(shapes + (token_row_shapes() if executor.splits_rows else []))
        shapes.sort(key=lambda shape: shape.num_seqs)
        if executor.splits_rows and request.role == "target":  # shorter drafts
            shapes += [StepShape(0, 1, count, count, count) for count in range(2, request.lookahead + 1)]
        warm_up(executor, shapes, (0, SPLIT_BOUND - 1), path)
        executor.reserve_rows(request)
    except BaseException:
        executor.close()
        raise
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
    copies_rows=True,
    modules=("onnxruntime", "cuda"),
    provider="CUDAExecutionProvider",
)

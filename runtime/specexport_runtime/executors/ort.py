"""ONNX Runtime executor: persistent bindings, a KV arena updated in place, rows bound by pointer."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import (
    ADAPTER_IDS,
    CACHE_INPUTS,
    K_CACHE,
    K_CACHE_OUT,
    KV_POSITIONS,
    LOGITS,
    PADDED_STEP_INPUTS,
    PARENTS,
    STATE_INPUTS,
    STATE_OUTPUTS,
    STATE_STEPS,
    STEP_INPUTS,
    V_CACHE,
    V_CACHE_OUT,
    StepShape,
    num_pending,
)
from specexport_runtime.bundle.entry import SMALL_DRAFT_PARAMETERS, ModelEntry
from specexport_runtime.errors import BundleError, IncompatibleError, SpecexportError
from specexport_runtime.executors.base import (
    CacheLender,
    EngineBackend,
    EngineRequest,
    Float32Array,
    StepBuffers,
    StepOutput,
    Want,
)
from specexport_runtime.executors.features import BoundFeatures, FeaturesMixin
from specexport_runtime.executors.host_rows import HostRowsMixin
from specexport_runtime.executors.logit_rows import argmax_ids
from specexport_runtime.executors.ort_arena import CAN_GIVE_BACK, ArenaRows
from specexport_runtime.executors.ort_features import OrtFeatures
from specexport_runtime.executors.ort_gates import InputGatesMixin
from specexport_runtime.executors.ort_session import OrtGraph, open_graph, use_shared_threads
from specexport_runtime.machine import available_cores

__all__ = ["MAX_BINDINGS", "OrtExecutor", "available_cores"]

MAX_BINDINGS = 256
_OUTPUT_OF = {
    given.name.partition(".")[0]: made.name
    for given, made in zip((K_CACHE, V_CACHE, *STATE_INPUTS), (K_CACHE_OUT, V_CACHE_OUT, *STATE_OUTPUTS), strict=True)
}
"""Name of the output that has the memory of an input."""


class _Binding(NamedTuple):
    """Everything of one step shape that stays the same from step to step."""

    shape: StepShape
    session: Any
    io: Any
    buffers: StepBuffers
    logits: Float32Array
    similarity: Float32Array
    features: BoundFeatures


class OrtExecutor(ArenaRows, InputGatesMixin, FeaturesMixin, HostRowsMixin):
    """Runs one engine with ONNX Runtime on the CPU.

    A binding is kept for each step shape and refilled, because binding everything anew costs more than a small model's
    step. A step on rows [r, r+B) binds the address of row r, so no cache entry is ever copied; gates are bound by
    pointer too.

    BundleError if ONNX Runtime cannot load the engine, IncompatibleError if the inputs break the contract.
    """

    can_lend = True

    def __init__(
        self,
        path: Path,
        entry: ModelEntry,
        *,
        num_rows: int,
        kv_capacity: int,  # entries of each row (L)
        num_threads: int | None = None,  # compute threads; None takes the cores really available
        spin: bool = True,  # let idle threads spin: faster on an idle machine, much slower on a busy one
        unpad_kv: bool = True,  # False if ``path`` is the entry's padded-KV graph
        lookahead: int = 0,  # K of the steps it will verify
        lender: CacheLender | None = None,  # whose caches a head reads that has none; None lets it read zeros
        lends: bool = False,  # a head reads these caches: they keep what lies before their own windows
        gives_back: bool = False,  # unused pages go back to the system, if it takes them; rows then begin at pages
    ) -> None:
        self.vocab_size = entry.lm_head_rows
        self.num_rows = num_rows
        self.kv_capacity = kv_capacity
        self.gives_back = gives_back and CAN_GIVE_BACK
        engine, attention, head = entry.engine, entry.attention, entry.draft_head
        names = engine.inputs if unpad_kv or engine.padded is None else engine.padded.inputs
        self.takes_trees = unpad_kv and PARENTS.name in names
        threads = num_threads or available_cores()
        self._graph = open_graph(path, entry, names, num_threads=threads, spin=spin)
        self.gate_kinds = engine.gates.kinds
        self.num_gates = len(self.gate_kinds) if unpad_kv else 0  # a padded-KV graph never has gates
        self.open_gates(self._graph.session, path)
        self._features: OrtFeatures = OrtFeatures(self._graph.session, engine.feature_size if unpad_kv else 0, path)
        self._set_feature_traits(self._features)
        self.num_adapters = len(entry.chosen_adapters)
        self.num_draft_heads = 0 if head is None else head.num_draft_heads
        self.reads_draft = head is not None and head.reads_draft
        self.num_modules = 0 if head is None else head.num_modules
        self.borrows_cache = bool(attention.target_layers)
        self._lent: dict[str, npt.NDArray[Any]] = {}
        self.num_pending = num_pending(lookahead, drafts_itself=self.num_gates > 0) if entry.states else 0
        layers = () if self.borrows_cache and lender is not None else attention.layers
        self.make_arena(layers, attention.cache_dtype, () if lends else attention.windows)
        self.make_states(entry.states, self.num_pending)
        if self.borrows_cache:
            self._lent = self._caches if lender is None else lender.lend(attention.target_layers)
            self._memory = {}
            self._check_lent(path, entry)
        self._row_values: dict[tuple[int, int], list[tuple[str, str, Any]]] = {}
        self._bindings: OrderedDict[tuple[StepShape, bool, bool], _Binding] = OrderedDict()
        self._logits: Float32Array = np.empty((0, self.vocab_size), np.float32)
        self._current: _Binding | None = None
        self.attach_library()

    def lend(self, layers: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """See ``CacheLender.lend``."""
        names = [(spec.name, i, layer) for i, layer in enumerate(layers) for spec in CACHE_INPUTS]
        caches = self._caches
        return {name.format(i=i): caches[name.format(i=layer)] for name, i, layer in names}

    def _check_lent(self, path: Path, entry: ModelEntry) -> None:
        for name, cache in self._lent.items():
            layer, values = entry.attention.layers[int(name.rpartition(".")[2])], name.startswith("v_")
            rows, _, heads, capacity, dim = cache.shape
            sizes = (self.num_rows, layer.kv_heads, layer.v_dim if values else layer.k_dim)
            if (rows, heads, dim) != sizes or capacity < self.kv_capacity or cache.dtype != entry.attention.cache_dtype:
                raise IncompatibleError(f"{path}: the target's caches are not those that it reads.", "build it again.")

    def prepare(self, shape: StepShape) -> StepBuffers:
        """Bind ``shape`` (or find its binding) and return the arrays to fill. See ``Executor.prepare``."""
        key = (shape, bool(self._measures[0]), self._features.wanted)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bind(*key)
        else:
            self._bindings.move_to_end(key)
        self._current = binding
        return binding.buffers

    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step; returns logits [R, V] float32, overwritten by the next call, or their argmax [R]."""
        binding = self._current
        if binding is None:
            raise SpecexportError("execute() was called before prepare().")
        start = time.perf_counter()
        try:
            binding.session.run_with_iobinding(binding.io)
        except Exception as error:  # onnxruntime raises its own types, bare Exceptions in part
            _, ours, reason = str(error).strip().partition("specexport: ")
            if not ours or reason.startswith("out of memory"):
                raise
            raise BundleError(f"an engine of this bundle cannot run this step: {reason}.", "build it again.") from error
        self.engine_seconds += time.perf_counter() - start
        self._similarity, self._bound = binding.similarity, binding.features
        return binding.logits if want == "logits" else argmax_ids(binding.logits)

    def step_inputs(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of what the prepared step gives to a graph, by name: all step inputs, read or not, and the caches."""
        binding = self._current
        if binding is None:
            raise SpecexportError("step_inputs() was called before prepare().")
        arrays = {name: array.copy() for name, array in binding.buffers._asdict().items() if array is not None}
        first, count = binding.shape.first_row, binding.shape.num_seqs
        caches = self._caches | self._lent | self._states
        return arrays | {name: cache[first : first + count].copy() for name, cache in caches.items()}

    def read_cache_entries(self, row: int, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the entries ``[start, stop)`` of a row, [H, entries, D] for each cache by the name of its input."""
        return {name: cache[row, 0, :, start:stop].copy() for name, cache in self._caches.items()}

    def capture(self, shapes: list[StepShape]) -> None:
        """Make the bindings of ``shapes`` ahead of time."""
        for shape in shapes:
            self.prepare(shape)

    def close(self) -> None:
        """Release the sessions and the arena."""
        self._bindings.clear()
        self._row_values.clear()
        self._memory, self._state_memory, self._lent = {}, {}, {}
        self._current = None
        self._graph = OrtGraph(None, frozenset())

    def _bind(self, shape: StepShape, measured: bool, featured: bool) -> _Binding:
        if not self._features.fits(shape.num_tokens):
            self._bindings.clear()
        if shape.num_logit_rows > len(self._logits):
            # All bindings share one logits array; a larger one makes the old addresses stale.
            self._bindings.clear()
            self._logits = np.empty((shape.num_logit_rows, self.vocab_size), np.float32)
        while len(self._bindings) >= MAX_BINDINGS:
            self._bindings.popitem(last=False)
        graph = self._graph
        io = graph.session.io_binding()
        if bool(shape.kv_span) != (KV_POSITIONS.name in graph.inputs):
            raise SpecexportError(
                f"{shape} does not fit this graph's KV cache.", "give `unpad_kv` to the executor and the engine alike."
            )
        specs = [*(PADDED_STEP_INPUTS if shape.kv_span else STEP_INPUTS)]
        if self._states:
            specs.append(STATE_STEPS)
        if self.num_adapters:
            specs.append(ADAPTER_IDS)
        arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in specs}
        if self.takes_trees:
            arrays[PARENTS.name] = np.ones(shape.num_tokens, PARENTS.dtype)
        for name, array in arrays.items():
            if name in graph.inputs:
                io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, out_name, rows in self._bind_rows(shape.first_row, shape.num_seqs):
            io.bind_ortvalue_input(name, rows)
            if name not in self._lent:
                io.bind_ortvalue_output(out_name, rows)
        logits = self._logits[: shape.num_logit_rows]
        io.bind_output(LOGITS.name, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        features = self._features.bind(io, shape, featured)
        buffers = StepBuffers(**arrays, token_features=features.read)
        similarity = self.bind_gates(io, shape, measured)
        binding = _Binding(shape, graph.session, io, buffers, logits, similarity, features)
        self._bindings[shape, measured, featured] = binding
        return binding

    def _bind_rows(self, first_row: int, num_seqs: int) -> list[tuple[str, str, Any]]:
        """(input name, output name, value) of each cache for rows ``[first_row, first_row + num_seqs)``, kept."""
        import onnxruntime

        kept = self._row_values.get((first_row, num_seqs))
        if kept is None:
            kept = []
            for name, cache in (self._caches | self._lent | self._states).items():
                rows = cache[first_row : first_row + num_seqs]
                kind, _, index = name.rpartition(".")
                value = onnxruntime.OrtValue.ortvalue_from_numpy(rows)
                if value.data_ptr() != rows.ctypes.data:
                    version = onnxruntime.__version__
                    raise IncompatibleError(f"onnxruntime {version} copies bound arrays.", "install another version.")
                kept.append((name, _OUTPUT_OF[kind].format(i=index), value))
            self._row_values[first_row, num_seqs] = kept
        return kept


def open_ort_executor(request: EngineRequest) -> OrtExecutor:
    """Open an engine on the CPU; errors as :class:`OrtExecutor`.

    Two engines' spinning threads fight for the cores: a round of the demo pair took twice as long. So a small draft
    runs on the calling thread alone; a large one shares the target's threads where the process is ours, else it does
    not spin.
    """
    entry, num_threads, spin = request.entry, request.num_threads, request.spin
    graph = entry.engine if request.unpad_kv else entry.engine.padded
    if graph is None:
        raise IncompatibleError(f"{request.folder}: the {request.role} has no padded-KV graph.", "build it again.")
    shared = use_shared_threads(num_threads, spin=spin, begin=request.share_threads)
    if not shared and request.role in ("draft", "head"):
        small = entry.parameters.total < SMALL_DRAFT_PARAMETERS
        num_threads, spin = (1 if small else num_threads), spin and small
    return OrtExecutor(
        request.folder / graph.path,
        entry,
        num_rows=request.num_rows,
        kv_capacity=request.kv_capacity,
        num_threads=num_threads,
        spin=spin,
        unpad_kv=request.unpad_kv,
        lookahead=request.lookahead,
        lender=request.lender,
        lends=request.lends,
        gives_back=request.gives_back,
    )


BACKEND = EngineBackend(
    open_ort_executor,
    has_padded_kv=True,
    has_gates=True,
    copies_rows=True,
    stores_rows=True,
    gives_back=CAN_GIVE_BACK,
    same_bits=True,
    modules=("onnxruntime",),
)

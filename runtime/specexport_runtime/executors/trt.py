"""TensorRT executor: fixed profiles and CUDA graphs for decoding and verification, one synchronization a step.

A step costs the host: its inputs gathered in pinned memory, one copy to the device, one graph launch (or one enqueue),
one copy back, one wait. What runs is decided by ``profiles``, where a step lies in a profile by ``trt_pack``. Imports
neither CUDA nor TensorRT: ``cuda_driver`` and ``trt_engine`` do, when an executor is made.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import INPUT_IDS, STEP_INPUTS, StepShape
from specexport_runtime.bundle.entry import EngineFile, ModelEntry
from specexport_runtime.bundle.profiles import choose_profile
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Float32Array, Int32Array, Int64Array, StepBuffers
from specexport_runtime.executors.device_rows import open_sampler
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.gpu_memory import ID_BYTES, HostBlock, HostOutput
from specexport_runtime.executors.gpu_steps import GpuSteps, IssuedStep
from specexport_runtime.executors.trt_engine import EngineContext, load_engine
from specexport_runtime.executors.trt_graphs import GraphKey
from specexport_runtime.executors.trt_load import EngineLoader, TrtParts, load_parts
from specexport_runtime.executors.trt_memory import lay_out_inputs
from specexport_runtime.executors.trt_pack import PackPlan, Window, fill_step, place_step, plan_step, start_plan

MAX_SHAPES = 256
MAX_PLANS = 64
_NO_TOKENS = StepShape(0, 1, 0, 1, 0)


def make_buffers(shape: StepShape, feature_size: int = 0) -> StepBuffers:
    """Arrays of a step as it really is; ``feature_size`` is E of a draft head."""
    arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in STEP_INPUTS}
    features = np.zeros((shape.num_tokens, feature_size), np.float32) if feature_size else None
    return StepBuffers(**arrays, token_features=features)


class PlacedStep:
    """What is kept of one step shape: the arrays that the caller fills, and where they go."""

    def __init__(
        self,
        profile: int,  # number in the engine
        window: Window,  # in that profile
        block: HostBlock,  # for the engine's inputs
        names: tuple[str, ...],  # step inputs that the engine takes
        ends: Int32Array,  # of all cache rows, see ``fill_step``
        feature_size: int = 0,  # E of a draft head
    ) -> None:
        self.profile, self.window, self.block = profile, window, block
        self.ends = ends[window.shape.first_row :][: window.shape.num_seqs]
        # The engine's inputs in a block, and its bytes that are copied.
        self.tensors, self.num_bytes = lay_out_inputs(names, window.shape, feature_size)
        self.ids_at = next((tensor.offset for tensor in self.tensors if tensor.name == INPUT_IDS.name), 0)
        self._views: dict[int, Mapping[str, npt.NDArray[Any]]] = {}
        self.plans: dict[bytes, PackPlan] = {}  # by counts of new tokens and logit rows
        self.buffers: StepBuffers | None = None  # of the step as it really is

    def arrays(self, block: HostBlock) -> Mapping[str, npt.NDArray[Any]]:
        """The engine's inputs in a block."""
        if block.address not in self._views:
            self._views[block.address] = block.views(self.tensors)
        return self._views[block.address]


class TrtExecutor(GpuSteps):
    """Runs one TensorRT engine on one GPU; see ``Executor``. IncompatibleError if it does not fit the GPU."""

    def __init__(
        self,
        entry: ModelEntry,
        file: EngineFile,  # the one for this GPU, of ``entry.engine.files``
        folder: Path,  # of the bundle
        *,
        num_rows: int,
        driver: GpuDriver | None = None,  # stream and memory, closed with the executor; None makes a ``CudaDriver``
        use_graphs: bool = True,  # False runs decode and verify steps one kernel at a time
        load: EngineLoader = load_engine,  # tests give another
    ) -> None:
        if driver is None:
            from specexport_runtime.executors.cuda_driver import CudaDriver

            driver = CudaDriver()
        self._parts: TrtParts = load_parts(entry, file, folder, num_rows, driver, use_graphs=use_graphs, load=load)
        sizes = self._parts.sizes
        self.vocab_size = entry.lm_head_rows
        self.num_rows = num_rows
        self.kv_capacity = sizes.kv_capacity - sizes.scratch  # entries of a row that may be used
        # A step that mixes prompts and verification runs in a prefill profile.
        ranged = [profile.num_tokens for _, profile in sizes.profiles if not profile.is_fixed]
        self.max_num_tokens = max(ranged or [profile.num_tokens for _, profile in sizes.profiles])
        self.graphs = self._parts.graphs
        self._set_up_steps(driver, open_sampler(driver, self.vocab_size, num_rows))
        engine, head = entry.engine, entry.draft_head
        self._sizes, self._names = sizes, engine.inputs
        self._features, self._logits = self._parts.features, self._parts.logits
        self._set_feature_traits(self._features)
        self.num_draft_heads = 0 if head is None else head.num_draft_heads
        self._sees_ahead = head is not None and head.block_size is not None
        self._packed, self._dtype = engine.lowering == "plugin", entry.dtype
        self._ends: Int32Array = np.zeros((sizes.arena_rows, 1), np.int32)
        self._last_position = (entry.max_positions or sizes.kv_capacity) - 1
        self._steps: OrderedDict[StepShape, PlacedStep] = OrderedDict()
        self._current: PlacedStep | None = None
        self._hosts: list[tuple[HostBlock, HostOutput]] = []  # of the steps of a chain

    @property
    def _input_feature_size(self) -> int:
        """E of a draft head, whose steps bring features; 0 for all others."""
        return self.feature_size if self.reads_features else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV arena on the device."""
        return self._parts.kv.num_bytes

    def prepare(self, shape: StepShape) -> StepBuffers:
        """Choose a profile for ``shape`` (IncompatibleError if none is large enough). See ``Executor.prepare``."""
        step = self._steps.get(shape)
        if step is None:
            step = self._place(shape)
            while len(self._steps) >= MAX_SHAPES:
                self._steps.popitem(last=False)
            self._steps[shape] = step
        else:
            self._steps.move_to_end(shape)
        self._current = step
        if step.buffers is None:
            step.buffers = make_buffers(shape, self._input_feature_size)
        return step.buffers

    chains = True

    def _enqueue_step(self, number: int | None, *, fed: bool) -> IssuedStep:
        step, parts = self._current, self._parts
        if step is None or step.buffers is None:
            raise SpecexportError("execute() was called before prepare().")
        if number == len(self._hosts):
            self._hosts.append(parts.make_host())
        block, ids = (step.block, parts.token_ids) if number is None else self._hosts[number]
        plan = self._plan(step, step.buffers)
        self._gather(step, plan, step.buffers, block)
        self._run(step, block, plan if fed else None)
        rows, at = len(step.buffers.logit_rows), parts.at
        return IssuedStep(step, step.window.shape, rows, plan.tokens, ids, at.logits, at.token_ids, at.features)

    def _on_steps_done(self, steps: Sequence[IssuedStep]) -> None:
        """Record steps that ran for the first time."""
        for step in steps:
            if self.graphs.enabled and step.placed.window.fill != "ranged":
                self._record(step.placed)

    def capture(self, shapes: list[StepShape]) -> None:
        """Record the steps of ``shapes`` that run in fixed profiles, the largest first; each runs once beforehand."""
        steps: dict[GraphKey, PlacedStep] = {}
        for shape in shapes:
            step = self._place(shape)
            if step.window.fill != "ranged":
                steps.setdefault(GraphKey(step.profile, step.window.shape.first_row), step)
        sizes = {key: step.window.shape for key, step in steps.items()}
        for key in sorted(steps, key=lambda key: (-sizes[key].num_tokens, -sizes[key].num_seqs, key)):
            if not self.graphs.enabled:
                return
            if key not in self.graphs:
                self._warm_up(steps[key])
                self._record(steps[key])

    def fixed_shapes(self) -> list[StepShape]:
        """The step of each fixed profile on the first rows, for :meth:`capture`."""
        return [profile.largest for _, profile in self._sizes.profiles if profile.is_fixed]

    def read_cache_entries(self, row: int, start: int, stop: int) -> dict[str, Float32Array]:
        """Entries ``[start, stop)`` of a row, float32 [H, entries, D] for each cache by the name of its input."""
        return self._parts.kv.read_entries(row, start, stop, self._dtype)

    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """Copy the first ``kv_len`` cache entries of a row to another, in every layer."""
        self.copy_row(source, destination, kv_len)

    copies_rows = True

    def copy_row(self, source: int, destination: int, kv_len: int, floor: int = 0) -> None:  # noqa: ARG002
        """See ``Executor.copy_row``; dummies of later steps go after what is there."""
        self._parts.kv.copy_row(source, destination, kv_len)
        self._ends[destination] = kv_len

    def swap_rows(
        self,
        one: int,
        other: int,
        kv_lens: tuple[int, int],
        floors: tuple[int, int] = (0, 0),  # noqa: ARG002
    ) -> None:
        """See ``Executor.swap_rows``."""
        self._parts.kv.swap_rows(one, other, kv_lens)
        self._ends[[other, one], 0] = kv_lens

    def clear_row(self, row: int) -> None:
        """Zero the row: attention reads entries beyond its length, hidden, and 0 times NaN is NaN."""
        self._parts.kv.clear_row(row)
        self._ends[row] = 0

    def move_entries(self, row: int, entries: Int64Array, start: int = 0) -> None:  # noqa: ARG002
        """Refuse (SpecexportError): caches of GPU engines hold no padding."""
        raise SpecexportError(f"TensorRT engines have no padded KV cache: {len(entries)} entries of row {row} stay.")

    def close(self) -> None:
        """Release the engine and its memory. A GPU that has failed cannot give anything back any more."""
        self._steps.clear()
        self._hosts.clear()
        self._current = None
        with suppress(SpecexportError):
            if self.rows is not None:
                self.rows.close()
            self._parts.resources.close()

    def _place(self, shape: StepShape) -> PlacedStep:
        chosen = choose_profile([profile for _, profile in self._sizes.profiles], shape)
        number, profile = self._sizes.profiles[chosen]
        window = place_step(shape, profile, self._sizes.arena_rows, packed=self._packed)
        return PlacedStep(number, window, self._parts.blocks[number], self._names, self._ends, self._input_feature_size)

    def _plan(self, step: PlacedStep, buffers: StepBuffers) -> PackPlan:
        key = buffers.cu_new_tokens.tobytes() + buffers.logit_rows.tobytes()
        plan = step.plans.get(key)
        if plan is None:
            if len(step.plans) >= MAX_PLANS:
                step.plans.clear()
            counts = np.diff(buffers.cu_new_tokens).tolist()
            plan = step.plans[key] = plan_step(
                step.window, counts, buffers.logit_rows, self._names, sees_ahead=self._sees_ahead
            )
        return plan

    def _gather(self, step: PlacedStep, plan: PackPlan, buffers: StepBuffers, block: HostBlock) -> None:
        arrays = step.arrays(block)
        if block.plan is not plan:
            start_plan(plan, arrays)
            block.plan = plan
        fill_step(plan, buffers, arrays, step.ends, self._last_position)

    def _run(self, step: PlacedStep, block: HostBlock, fed: PackPlan | None = None) -> None:
        """Put a step on the stream: inputs, ids that the step before gave for ``fed``, then the graph or engine."""
        parts, shape = self._parts, step.window.shape
        parts.driver.copy_in(parts.at.inputs, block.address, step.num_bytes)
        for first, slot, count in () if fed is None else fed.runs:
            ids, width = parts.at.inputs + step.ids_at + ID_BYTES * slot, ID_BYTES * count
            parts.driver.copy_rows(ids, parts.at.token_ids + ID_BYTES * first, width, 1, width)
        if step.window.fill == "ranged" or not self.graphs.launch(GraphKey(step.profile, shape.first_row)):
            self._bind(step).enqueue(parts.driver.stream)

    def _bind(self, step: PlacedStep) -> EngineContext:
        is_fixed = step.window.fill != "ranged"
        return self._parts.contexts.bind(step.profile, step.window.shape, step.tensors, is_fixed=is_fixed)

    def _record(self, step: PlacedStep) -> None:
        key = GraphKey(step.profile, step.window.shape.first_row)
        if key in self.graphs:
            return
        context, stream = self._bind(step), self._parts.driver.stream
        self.graphs.record(key, lambda: context.enqueue(stream), capturable=context.is_capturable(stream))

    def _warm_up(self, step: PlacedStep) -> None:
        """Run a fixed profile with no sequence in it: engines set themselves up in their first run."""
        nothing = plan_step(step.window, [], np.empty(0, np.int64), self._names)
        step.block.plan = None
        self._gather(step, nothing, make_buffers(_NO_TOKENS, self._input_feature_size), step.block)
        self._run(step, step.block)
        self._parts.driver.synchronize()

"""Running a large engine for the build's check a part at a time, so that its weights are never all in memory.

The check knows all tokens beforehand. So its steps are written down first; then each part of the graph is opened once
and given all steps, one after the other, and what it gives is what the next part gets.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.backends.ort import DATA_NAME
from specexport_runtime.abi import (
    ADAPTER_IDS,
    CACHE_INPUTS,
    K_CACHE_OUT,
    LOGITS,
    PADDED_STEP_INPUTS,
    PARENTS,
    STEP_INPUTS,
    V_CACHE_OUT,
    StepShape,
    cache_shapes,
)
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor, Int64Array, StepBuffers, StepOutput, Want

LARGE_BYTES = 800 << 20
"""Engines with larger weights files are run in parts."""
PART_BYTES = 300 << 20
"""Weights of a part; a larger weight is a part of its own."""
_PART_NAME = "check-part.onnx"

Arrays = dict[str, npt.NDArray[Any]]


def is_large(folder: Path, entry: ModelEntry) -> bool:
    """Whether an engine is checked in parts: one graph without gates, of many weights, for the CPU."""
    from specexport_runtime.executors.open import find_engine_backend

    backend, data = find_engine_backend(entry.backend), folder / Path(entry.engine.path).parent / DATA_NAME
    whole = bool(entry.engine.gates.kinds) or backend is None or backend.on_gpu
    return not whole and data.is_file() and data.stat().st_size > LARGE_BYTES


class _Step(NamedTuple):
    """A step of the script."""

    feeds: Arrays  # its step inputs, by name
    num_rows: int  # logit rows
    moved: tuple[tuple[int, Int64Array, int], ...]  # before it, entries of these rows were packed, from a place on
    fresh: bool  # before it, all rows were forgotten


class PartwiseExecutor(Executor):
    """An executor driven twice through the same steps: it notes them, then :meth:`compute`, then it answers."""

    def __init__(self, path: Path, entry: ModelEntry, *, num_rows: int, kv_capacity: int, num_threads: int) -> None:
        self.vocab_size = entry.lm_head_rows
        self.num_rows, self.kv_capacity = num_rows, kv_capacity
        self.num_adapters = len(entry.chosen_adapters)
        self._path, self._entry, self._num_threads = path, entry, num_threads
        self._steps: list[_Step] = []
        self._answers: Iterator[StepOutput] | None = None
        self._buffers: StepBuffers | None = None
        self._moved: list[tuple[int, Int64Array, int]] = []
        self._fresh = True

    def prepare(self, shape: StepShape) -> StepBuffers:
        """See ``Executor.prepare``."""
        specs = [*(PADDED_STEP_INPUTS if shape.kv_span else STEP_INPUTS)]
        if self.num_adapters:
            specs.append(ADAPTER_IDS)
        arrays = {spec.name: np.zeros(shape.shape_of(spec), spec.dtype) for spec in specs}
        self._buffers = StepBuffers(**arrays, parents=np.ones(shape.num_tokens, PARENTS.dtype))
        return self._buffers

    def execute(self, want: Want = "logits") -> StepOutput:
        """Zeros, or what :meth:`compute` found. See ``Executor.execute``."""
        if self._buffers is None or want != "logits":
            raise SpecexportError("a step of a check was not prepared, or no logits are wanted of it.")
        if self._answers is not None:
            return next(self._answers)
        feeds = {name: array for name, array in self._buffers._asdict().items() if array is not None}
        num_rows = len(self._buffers.logit_rows)
        self._steps.append(_Step(feeds, num_rows, tuple(self._moved), self._fresh))
        self._moved, self._fresh = [], False
        return np.zeros((num_rows, self.vocab_size), np.float32)

    def move_entries(self, row: int, entries: Int64Array, start: int = 0) -> None:
        """See ``Executor.move_entries``."""
        self._moved.append((row, entries.copy(), start))

    def clear_row(self, row: int) -> None:
        """The check forgets all rows at once. See ``Executor.clear_row``."""
        del row
        self._fresh = True

    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """No check moves rows."""
        raise SpecexportError(f"a check cannot move {kv_len} entries of row {source} to row {destination}.")

    def close(self) -> None:
        """Forget the steps."""
        self._steps, self._answers = [], None

    def compute(self) -> None:
        """Run all steps that were written down."""
        from specexport_runtime.executors.ort_session import open_session
        from specexport_runtime.machine import return_freed_memory

        known: list[Arrays] = [dict(step.feeds) for step in self._steps]
        place = self._path.with_name(_PART_NAME)
        for part in split_graph(self._path):
            try:
                place.write_bytes(part.serialize_with_inputs(known[0] | self._empty_caches()))
                session = open_session(place, self._num_threads, False)
            finally:
                place.unlink(missing_ok=True)
            self._run_part(session, known)
            del session
            return_freed_memory()
            for values in known:
                for name in part.done:
                    values.pop(name, None)
        self._answers = iter([values[LOGITS.name] for values in known])

    def _run_part(self, session: Any, known: list[Arrays]) -> None:
        names = [value.name for value in session.get_inputs()]
        outputs = [value.name for value in session.get_outputs()]
        caches = self._empty_caches()
        for step, values in zip(self._steps, known, strict=True):
            if step.fresh:
                caches = self._empty_caches()
            for row, entries, start in step.moved:
                for cache in caches.values():
                    cache[row, :, :, start : start + len(entries)] = cache[row][:, :, entries]
            found = dict(zip(outputs, session.run(outputs, {n: (values | caches)[n] for n in names}), strict=True))
            for name, cache_out in self._cache_outputs().items():
                if cache_out in found:
                    caches[name] = found.pop(cache_out)
            values.update(found)

    def _empty_caches(self) -> Arrays:
        dtype = np.dtype(self._entry.attention.cache_dtype)
        shapes = cache_shapes(self._entry.attention.layers, self.num_rows, self.kv_capacity)
        return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}

    def _cache_outputs(self) -> dict[str, str]:
        return {
            given.name.format(i=i): out.name.format(i=i)
            for i in range(len(self._entry.attention.layers))
            for given, out in zip(CACHE_INPUTS, (K_CACHE_OUT, V_CACHE_OUT), strict=True)
        }


class GraphPart(NamedTuple):
    """Some nodes of a graph that follow each other."""

    model: ir.Model  # its inputs are values of other nodes, without types
    done: tuple[str, ...]  # the inputs that no later node reads

    def serialize_with_inputs(self, examples: Arrays) -> bytes:
        """The model as bytes; dtypes and ranks of its inputs are those of ``examples``."""
        for value in self.model.graph.inputs:
            array = examples[str(value.name)]
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape([None] * array.ndim)
        data: bytes = ir.to_proto(self.model).SerializeToString()
        return data


def split_graph(path: Path) -> Iterator[GraphPart]:
    """Cut a graph's nodes, in order, into parts of ``PART_BYTES`` of weights; their file is not read."""
    model = ir.load(path)
    graph = model.graph
    # What is made of constants alone goes to each part that reads it: kernels look at it when an engine is opened.
    constants = {value: {value} for value in graph.initializers.values()}
    nodes, reads = [], []
    for node in graph:
        values = _collect_read_values(node, graph)
        if values and values <= constants.keys():
            constants |= {value: set().union(*(constants[each] for each in values)) for value in node.outputs}
        else:
            nodes.append(node)
            reads.append(values)
    last_use = {value: at for at, values in enumerate(reads) for value in values}
    last_use |= dict.fromkeys(graph.outputs, len(nodes))
    known: list[ir.Value] = list(graph.inputs)
    for start, stop in _plan_part_ranges(
        [set().union(*(constants.get(each, ()) for each in values)) for values in reads]
    ):
        made = [value for node in nodes[start:stop] for value in node.outputs]
        outputs = [value for value in made if last_use.get(value, -1) >= stop]
        part = ir.convenience.extract(graph, known, outputs)
        unused = [value for value in part.inputs if not value.uses()]
        for value in unused:
            part.inputs.remove(value)
        for value in part.outputs:  # an engine knows its own
            value.type = value.shape = None
        names = {str(value.name) for value in known if last_use.get(value, -1) < stop}
        done = tuple(str(value.name) for value in part.inputs if value.name in names)
        yield GraphPart(ir.Model(part, ir_version=model.ir_version, functions=list(model.functions.values())), done)
        known = [value for value in [*known, *made] if last_use.get(value, -1) >= stop]


def _collect_read_values(node: ir.Node, graph: ir.Graph) -> set[ir.Value]:
    """Values of a graph that a node reads, those that nodes of its subgraphs read among them."""
    values = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        one = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
        for inner in attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else one:
            values |= {value for each in ir.traversal.RecursiveGraphIterator(inner) for value in each.inputs if value}
    return {value for value in values if value.graph is graph}


def _plan_part_ranges(weights: list[set[ir.Value]]) -> Iterator[tuple[int, int]]:
    """From where to where the nodes of each part go, by the weights that each node reads."""
    start, size, held = 0, 0, set[ir.Value]()
    for at, own in enumerate(weights):
        more = _num_bytes(own - held)
        if held and size + more > PART_BYTES:
            yield start, at
            start, size, held, more = at, 0, set(), _num_bytes(own)
        held |= own
        size += more
    yield start, len(weights)


def _num_bytes(weights: set[ir.Value]) -> int:
    return sum(value.const_value.nbytes for value in weights if value.const_value is not None)

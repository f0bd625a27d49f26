"""Running a large engine for the build's check a part at a time, so that its weights are never all in memory.

The check knows all tokens beforehand. So its steps are written down first; then each part of the graph is opened once
and given all steps, one after the other, and what it gives is what the next part gets.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    from specexport_runtime.executors.open import backend_of

    backend, data = backend_of(entry.backend), folder / Path(entry.engine.path).parent / DATA_NAME
    whole = bool(entry.engine.gates.kinds) or backend is None or backend.on_gpu
    return not whole and data.is_file() and data.stat().st_size > LARGE_BYTES


class _Step(NamedTuple):
    """A step of the script."""

    feeds: Arrays  # its step inputs, by name
    num_rows: int  # logit rows
    moved: tuple[tuple[int, Int64Array, int], ...]  # before it, entries of these rows were packed, from a place on
    fresh: bool  # before it, all rows were forgotten


class PartedExecutor(Executor):
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
                place.write_bytes(part.with_inputs(known[0] | self._empty_caches()))
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

    model: Any  # a protobuf model of them, without inputs
    inputs: tuple[str, ...]  # values of other nodes that they read
    done: tuple[str, ...]  # the inputs that no later node reads

    def with_inputs(self, examples: Arrays) -> bytes:
        """The model as bytes; dtypes and ranks of its inputs are those of ``examples``."""
        from onnx import helper

        for name in self.inputs:
            array = examples[name]
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            self.model.graph.input.append(helper.make_tensor_value_info(name, kind, [None] * array.ndim))
        data: bytes = self.model.SerializeToString()
        return data


def split_graph(path: Path) -> Iterator[GraphPart]:
    """Cut a graph's nodes, in order, into parts of ``PART_BYTES`` of weights; their file is not read."""
    import onnx

    whole = onnx.load(str(path), load_external_data=False)
    weights = {tensor.name: tensor for tensor in whole.graph.initializer}
    makers = _constant_makers(whole.graph.node, set(weights))
    of_constants = set(makers.values())
    nodes = [node for at, node in enumerate(whole.graph.node) if at not in of_constants]
    reads = [_reads(node) for node in nodes]
    # What is made of constants alone goes to each part that reads it: kernels look at it when an engine is opened.
    constants = [_behind(names, makers, whole.graph.node) for names in reads]
    last_use = {name: at for at, names in enumerate(reads) for name in names}
    results = {value.name for value in whole.graph.output}
    sizes = {name: _num_bytes(tensor) for name, tensor in weights.items()}
    for start, stop in _cuts([names | found for names, found in zip(reads, constants, strict=True)], sizes):
        made = {name for node in nodes[start:stop] for name in node.output if name}
        used = set[str]().union(*reads[start:stop], *constants[start:stop])
        own = [whole.graph.node[at] for at in sorted({makers[name] for name in used & makers.keys()})]
        inputs = sorted(used - made - weights.keys() - makers.keys())
        outputs = sorted(name for name in made if name in results or last_use.get(name, -1) >= stop)
        model = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
        model.graph.CopyFrom(
            onnx.GraphProto(
                name=f"nodes {start} to {stop}",
                node=[*own, *nodes[start:stop]],
                initializer=[weights[name] for name in sorted(used & weights.keys())],
                output=[onnx.ValueInfoProto(name=name) for name in outputs],
            )
        )
        done = tuple(name for name in inputs if last_use[name] < stop)
        yield GraphPart(model, tuple(inputs), done)


def _constant_makers(nodes: Iterable[Any], weights: set[str]) -> dict[str, int]:
    """The nodes that read constants alone, by what they make."""
    makers: dict[str, int] = {}
    for at, node in enumerate(nodes):
        names = _reads(node)
        if names and all(name in weights or name in makers for name in names):
            makers |= dict.fromkeys(node.output, at)
    return makers


def _behind(names: set[str], makers: dict[str, int], nodes: Sequence[Any]) -> set[str]:
    """What values that are made of constants are made of, with what lies between."""
    found, todo = set[str](), [name for name in names if name in makers]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _reads(nodes[makers[name]]) if name in makers else set[str]()
    return found


def _cuts(reads: list[set[str]], sizes: dict[str, int]) -> Iterator[tuple[int, int]]:
    start, held, total = 0, set[str](), 0
    for at, names in enumerate(reads):
        new = {name for name in names if name in sizes and name not in held}
        more = sum(sizes[name] for name in new)
        if total and total + more > PART_BYTES:
            yield start, at
            start, held, total = at, set[str](), 0
            new = {name for name in names if name in sizes}
            more = sum(sizes[name] for name in new)
        held |= new
        total += more
    yield start, len(reads)


def _reads(node: Any) -> set[str]:
    """Values of the graph around it that a node reads, those of its subgraphs' nodes among them."""
    found = {name for name in node.input if name}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own |= _outputs(graph.node)
            found |= set().union(*map(_reads, graph.node), {value.name for value in graph.output}) - own
    return found


def _outputs(nodes: Iterable[Any]) -> set[str]:
    return {name for node in nodes for name in node.output}


def _num_bytes(tensor: Any) -> int:
    lengths = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return lengths[0] if lengths else 0

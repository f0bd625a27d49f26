"""Section 7: ONNX Runtime's attention operators by themselves, decode and verify, at several lengths.

Each way runs in a separate process, because the kernels are chosen by environment variables that are read once, and
because a way that crashes must cost its own row only. The sizes are those of one layer of the large model, so that the
figures can be set against its steps.

What the operators take and how they choose is in ONNX Runtime 1.31's documentation (docs/contrib_ops/cuda/gqa.md,
paged_attention.md) and sources (contrib_ops/cuda/bert/paged_attention.cc). Both prefer cuDNN from sm 90 on, for caches
that are not quantized; ``ORT_ENABLE_CUDNN_FLASH_ATTENTION`` asks for it or forbids it. ``PagedAttention`` uses it for
one new token a row only. Several go to FlashAttention, which does not split the entries; those of a quantized cache are
first all turned back into float16.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.errors import CheckFailedError
from specexport_runtime.executors.paged import BLOCK_ENTRIES
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.needs import require_gpu, require_modules
from tools.gpu_check_lib.rows import judge

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]
PASTS = (8192, 256, 2048)
VERIFY_TOKENS = 5
NUM_LAYERS = 8
"""Nodes of the graph, each with separate caches: together more than an L2 cache holds."""
CUDNN, DEBUG = "ORT_ENABLE_CUDNN_FLASH_ATTENTION", "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
ELEMENT_TYPES = {"float32": 1, "int8": 3, "float16": 10, "float8e4m3fn": 17}  # ONNX TensorProto.DataType
INT8_STEP = 4.5 / 127  # numbers of the caches are normal: few lie beyond 4.5
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "int8": 5e-2, "float8e4m3fn": 1e-1}
"""Largest error by element type of the caches, as a share of the largest output."""
ALONE_SECONDS = 25.0
RESULT = "RESULT "


class Geometry(NamedTuple):
    """Sizes of one layer: query heads, KV heads, size of a head."""

    heads: int
    kv_heads: int
    head_size: int


class Way(NamedTuple):
    """One way to attend."""

    # ``"PagedAttention"``; ``"rows"``: the same, each new token as a row that shares the blocks of its sequence, so
    # that a verify step looks like decoding; or ``"GroupQueryAttention"``
    operator: str
    cache: str = "float16"  # element type of the caches
    cudnn: bool = True  # whether cuDNN's kernel is asked for, or forbidden

    @property
    def name(self) -> str:
        """For the report and for ``find_way``."""
        operator = "PagedAttention, a row for each token" if self.operator == "rows" else self.operator
        kind = "" if self.cache in {"float16", "float32"} else f", {self.cache} cache"
        return f"{operator}{kind}, cuDNN {'on' if self.cudnn else 'off'}"


WAYS = (
    Way("PagedAttention"), Way("PagedAttention", cudnn=False),
    Way("GroupQueryAttention"), Way("GroupQueryAttention", cudnn=False),
    Way("rows"), Way("rows", cudnn=False),
    Way("PagedAttention", "int8"), Way("PagedAttention", "float8e4m3fn"),
    Way("GroupQueryAttention", "int8"), Way("GroupQueryAttention", "float8e4m3fn"),
)  # fmt: skip
OURS = "our kernel"


class Step(NamedTuple):
    """What one step is given."""

    inputs: dict[str, Array]  # by name of graph input, caches apart
    caches: tuple[Array, Array]  # keys and values of one layer, as the operator stores them
    right: Array  # the output that is right, float32 [T, heads * head_size]


class Timing(NamedTuple):
    """One step: entries before, new tokens, microseconds a layer, ``error_of``, kernel and how it was launched."""

    past: int
    new: int
    microseconds: float
    error: float
    kernel: str
    how: str


def large_geometry() -> Geometry:
    """That of the large model."""
    from tools.gpu_check_lib.models import SIZES

    size = SIZES["large"]
    return Geometry(size.heads, size.kv_heads, size.head_size)


# graphs and what they are fed


def make_model(way: Way, geometry: Geometry, *, dtype: str = "float16", layers: int = NUM_LAYERS) -> "onnx.ModelProto":
    """A graph of one attention node a layer; all read the same tokens. ``dtype`` is that of tokens and output."""
    from onnx import helper

    grouped = way.operator == "GroupQueryAttention"
    head = ([1] if grouped else []) + ["tokens"]
    widths = {"query": geometry.heads, "key": geometry.kv_heads, "value": geometry.kv_heads}
    token, stored = ELEMENT_TYPES[dtype], ELEMENT_TYPES[way.cache]
    value = helper.make_tensor_value_info
    inputs = [value(name, token, [*head, count * geometry.head_size]) for name, count in widths.items()]
    lengths = ["seqlens_k", "total_length"] if grouped else ["cu_new_tokens", "past_lens", "block_table", "metadata"]
    ranks = {"block_table": 2, "total_length": 0}
    inputs += [value(name, 6, [None] * ranks.get(name, 1)) for name in lengths]  # int32
    attributes: dict[str, Any] = {"num_heads": geometry.heads, "kv_num_heads": geometry.kv_heads}
    attributes["scale"] = geometry.head_size**-0.5
    constants = []
    is_quantized = way.cache in {"int8", "float8e4m3fn"}
    if is_quantized:
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        attributes |= {"kv_cache_bit_width": 8} if grouped else {}
        constants = [helper.make_tensor("cache_scale", 1, [1], [_step_of(way.cache)])]
    nodes, outputs = [], [value("output.0", token, [*head, geometry.heads * geometry.head_size])]
    shape = [1, geometry.kv_heads, "capacity", geometry.head_size]
    if not grouped:
        shape = ["blocks", BLOCK_ENTRIES, geometry.kv_heads, geometry.head_size]
    for layer in range(layers):
        caches = [f"k_cache.{layer}", f"v_cache.{layer}"]
        written = [name.replace("cache", "cache_out") for name in caches]
        inputs += [value(name, stored, shape) for name in caches]
        outputs += [value(name, stored, shape) for name in written]
        names = [*widths, *caches, *lengths[:3]]
        names += [""] * ((12 if grouped else 14) - len(names))  # where both operators have the caches' scales
        names += ["cache_scale"] * 2 if is_quantized else [""] * 2
        names += [] if grouped else ["metadata"]
        while not names[-1]:
            names.pop()
        node = helper.make_node(
            "GroupQueryAttention" if grouped else "PagedAttention", names, [f"output.{layer}", *written],
            name=f"attention.{layer}", domain="com.microsoft", **attributes,
        )  # fmt: skip
        nodes.append(node)
    graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _step_of(cache: str) -> float:
    """What one unit of a quantized cache stands for."""
    return INT8_STEP if cache == "int8" else 1.0


def make_step(way: Way, geometry: Geometry, past: int, new: int, *, dtype: str = "float16", seed: int = 5) -> Step:
    """One sequence with ``past`` entries and ``new`` tokens: what its graph is fed, and what must come out.

    ``dtype`` is that of tokens and output.
    """
    random = np.random.default_rng(seed)
    total = past + new

    def normal(count: int, heads: int) -> Array:
        return random.standard_normal((count, heads, geometry.head_size), dtype=np.float32).astype(dtype)

    query, entries = normal(new, geometry.heads), [normal(total, geometry.kv_heads) for _ in range(2)]
    stored = [quantize(each, way.cache) for each in entries]
    keys, values = (each.astype(np.float32) * np.float32(_step_of(way.cache)) for each in stored)
    right = attend(query.astype(np.float32), keys, values, past)
    tokens = {"query": query, "key": entries[0][past:], "value": entries[1][past:]}
    tokens = {name: np.ascontiguousarray(array.reshape(new, -1)) for name, array in tokens.items()}
    if way.operator == "GroupQueryAttention":
        tokens = {name: array[None] for name, array in tokens.items()}
        lengths: dict[str, Array] = {
            "seqlens_k": np.array([total - 1], np.int32), "total_length": np.array(total, np.int32)
        }  # fmt: skip
        caches = [_with_room(each[:past], total).swapaxes(0, 1)[None] for each in stored]
    else:
        blocks = -(-total // BLOCK_ENTRIES)
        caches = [
            _with_room(each[:past], blocks * BLOCK_ENTRIES).reshape(blocks, BLOCK_ENTRIES, *each.shape[1:])
            for each in stored
        ]
        rows = new if way.operator == "rows" else 1
        counts, table = np.full(rows, new // rows), np.arange(blocks, dtype=np.int32)
        lengths = {
            "cu_new_tokens": np.concatenate([[0], counts.cumsum()]).astype(np.int32),
            "past_lens": np.array([past + row for row in range(rows)], np.int32),
            "block_table": np.broadcast_to(table, (rows, blocks)).copy(),
            # most new tokens of a row; most entries of the longest row, and fewest: the split over entries needs both
            "metadata": np.array([new // rows, total, total], np.int32),
        }
    return Step(tokens | lengths, (np.ascontiguousarray(caches[0]), np.ascontiguousarray(caches[1])), right)


def quantize(entries: Array, cache: str) -> Array:
    """Entries as a cache of that element type holds them."""
    if cache == "int8":
        whole: Array = np.rint(entries.astype(np.float32) / INT8_STEP)
        return whole.clip(-128, 127).astype(np.int8)
    if cache == "float8e4m3fn":
        import ml_dtypes

        small: Array = entries.astype(ml_dtypes.float8_e4m3fn)
        return small
    return entries


def _with_room(entries: Array, capacity: int) -> Array:
    room = np.zeros((capacity - len(entries), *entries.shape[1:]), entries.dtype)
    return np.concatenate([entries, room])


def attend(query: Array, keys: Array, values: Array, past: int) -> Array:
    """Causal attention in float32, [new, heads * size], of queries [new, heads, size] behind ``past`` entries.

    ``keys`` and ``values`` are [past + new, KV heads, size].
    """
    new, heads, size = query.shape
    group = heads // keys.shape[1]
    grouped = query.reshape(new, -1, group, size)
    scores = np.einsum("nhgd,lhd->hgnl", grouped, keys) * size**-0.5
    hidden = np.arange(len(keys)) > past + np.arange(new)[:, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    found: Array = np.einsum("hgnl,lhd->nhgd", weights, values).reshape(new, -1)
    return found


def error_of(found: Array, right: Array) -> float:
    """Largest difference, as a share of the largest right number; NaN if anything is."""
    return float(np.abs(found - right).max() / np.abs(right).max())


# one way, in its own process


def find_way(name: str) -> Way:
    """The way of that name."""
    return next(way for way in WAYS if way.name == name)


def sizes() -> Iterator[tuple[int, int]]:
    """(past, new tokens) of every step, the decisive ones first."""
    yield from ((past, new) for past in PASTS for new in (1, VERIFY_TOKENS))


def measure_way(way: Way) -> list[Timing]:
    """Every step of one way on this GPU, recorded as a CUDA graph if that is possible.

    SpecexportError: there is no GPU, or no onnxruntime for it.
    """
    from specexport_runtime.executors.ort_cuda_session import import_onnxruntime

    ort, geometry = import_onnxruntime(0), large_geometry()
    model = make_model(way, geometry).SerializeToString()
    steps = {size: make_step(way, geometry, *size) for size in sizes()}
    os.environ[DEBUG] = "1"  # sessions read it when they are made; each node then prints its kernel
    session = _open(ort, model, graphs=False)
    for step in steps.values():
        _Bound(ort, session, way, step).run("-1")
    del session
    os.environ[DEBUG] = "0"
    found = []
    for graphs in (True, False):
        session = _open(ort, model, graphs=graphs)
        try:
            for number, ((past, new), step) in enumerate(steps.items(), 1):
                bound = _Bound(ort, session, way, step)
                bound.run("-1")  # cuDNN plans its kernel outside of a recording
                run_id = str(number) if graphs else "-1"
                for _ in range(3):
                    bound.run(run_id)
                error = error_of(bound.output(), step.right)
                how = "recorded" if graphs else "launched one by one"
                found.append(Timing(past, new, bound.microseconds(run_id), error, "", how))
            break
        except Exception:  # recording is refused; whatever it is, launching may work
            if not graphs:
                raise
            found.clear()
    return found


def _open(ort: Any, model: bytes, *, graphs: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    provider = {"enable_cuda_graph": str(int(graphs))}
    return ort.InferenceSession(model, options, providers=[("CUDAExecutionProvider", provider)])


class _Bound:
    """One step's arrays on the GPU, bound to a session of ``make_model``."""

    def __init__(self, ort: Any, session: Any, way: Way, step: Step) -> None:
        self._session, self._options = session, ort.RunOptions
        self._binding = session.io_binding()
        self._kept: list[Any] = []
        self._host = [step.inputs[name] for name in ("metadata", "total_length") if name in step.inputs]
        for name, array in step.inputs.items():
            if any(array is each for each in self._host):  # kernels read these on the host
                self._binding.bind_input(name, "cpu", 0, np.int32, array.shape, array.ctypes.data)
            else:
                self._binding.bind_ortvalue_input(name, self._to_device(ort, array))
        for layer in range(NUM_LAYERS):
            for kind, array in zip("kv", step.caches, strict=True):
                cache = self._to_device(ort, array.view(np.uint8))  # bytes: numpy has no name for every type
                place = ("cuda", 0, ELEMENT_TYPES[way.cache], array.shape, cache.data_ptr())
                self._binding.bind_input(f"{kind}_cache.{layer}", *place)
                self._binding.bind_output(f"{kind}_cache_out.{layer}", *place)
        self._output = self._to_device(ort, np.zeros(step.inputs["query"].shape, step.inputs["query"].dtype))
        self._binding.bind_ortvalue_output("output.0", self._output)

    def _to_device(self, ort: Any, array: Array) -> Any:
        self._kept.append(ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        return self._kept[-1]

    def run(self, graph_id: str) -> None:
        """One run; ``"-1"`` for one that is neither recorded nor replayed."""
        options = self._options()
        options.add_run_config_entry("gpu_graph_id", graph_id)
        self._session.run_with_iobinding(self._binding, options)

    def output(self) -> Array:
        """Of the first layer, float32 [T, heads * size]."""
        found: Array = self._output.numpy().astype(np.float32)
        return found.reshape(-1, found.shape[-1])

    def microseconds(self, graph_id: str, *, repeats: int = 100, seconds: float = 0.5) -> float:
        """Median time of a run a layer."""
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 or (len(times) < repeats and time.perf_counter() - begin < seconds):
            start = time.perf_counter()
            self.run(graph_id)
            times.append(time.perf_counter() - start)
        return 1e6 * float(np.median(times)) / NUM_LAYERS


def read_output(text: str) -> list[Timing]:
    """What a way's process printed: its timings, each with the kernel that ONNX Runtime said it chose.

    CheckFailedError: it did not come to its end; says its last words.
    """
    lines = text.strip().splitlines()
    result = next((line for line in lines if line.startswith(RESULT)), None)
    if result is None:
        raise CheckFailedError(lines[-1] if lines else "it ended without a word.")
    found = [Timing(*item) for item in json.loads(result.removeprefix(RESULT))]
    kernels = re.findall(r"SdpaKernel=(\w+)", text)
    if len(kernels) != len(found) * NUM_LAYERS:  # it says so another way
        return [item._replace(kernel="/".join(sorted(set(kernels))) or "not told") for item in found]
    return [item._replace(kernel=kernels[i * NUM_LAYERS]) for i, item in enumerate(found)]


# all ways


def measure_operators(context: Context) -> None:
    """One row for each way, and one for our own kernel."""
    context.require_backend("ort-cuda")
    require_modules("onnxruntime", "onnx")
    with context.part(OURS):
        if context.has_time(OURS, 10):
            report_way(context, OURS, measure_ours(), "float16")
    for way in WAYS:
        if not context.has_time(way.name, 8):
            continue
        with context.part(way.name):
            report_way(context, way.name, run_way(context, way), way.cache)


def run_way(context: Context, way: Way) -> list[Timing]:
    """A way's timings, from a separate process; CheckFailedError says why it failed."""
    command = [sys.executable, "-m", "tools.gpu_check_lib.operators", way.name]
    environment = {**os.environ, CUDNN: str(int(way.cudnn))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=min(ALONE_SECONDS, context.left), check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CheckFailedError(f"it hung, and was ended after {error.timeout:.0f} s.") from error
    if done.returncode < 0:
        raise CheckFailedError(f"ended by signal {-done.returncode}.")
    return read_output(done.stdout)


def report_way(context: Context, name: str, timings: Sequence[Timing], cache: str) -> None:
    """The row of one way; ``cache`` is the element type of its caches, which decides the tolerance."""
    by_past = {
        past: {item.new: item for item in timings if item.past == past}
        for past in dict.fromkeys(item.past for item in timings)
    }
    parts = []
    for past, items in by_past.items():
        decode, verify = items[1], items[VERIFY_TOKENS]
        parts.append(f"{past}: {decode.microseconds:.1f} and {verify.microseconds:.1f} us "
                     f"({verify.microseconds / decode.microseconds:.2f}x)")  # fmt: skip
    kernels = [
        " ".join(dict.fromkeys(item.kernel for item in timings if item.new == new)) for new in (1, VERIFY_TOKENS)
    ]
    error = float(np.max([item.error for item in timings]))  # NaN stays NaN
    ways = " or ".join(dict.fromkeys(item.how for item in timings))
    context.recorder.row(
        name, f"decode(1) and verify({VERIFY_TOKENS}) a layer behind {'; '.join(parts)}; {ways}; kernels "
        f"{kernels[0]}, {kernels[1]}; off by {error:.1e} of the largest output",
        target=f"off by at most {TOLERANCES[cache]:.0e}", verdict=judge(error, at_most=TOLERANCES[cache]),
        timings=[item._asdict() for item in timings],
    )  # fmt: skip


def measure_ours() -> list[Timing]:
    """Our kernel with the tuning table's tiles, from torch: what an operator of our own would launch."""
    import torch

    from specexport.kernels import launch
    from specexport.kernels.spec import KernelSpec
    from tools.gpu_check_lib.kernels import Case, expected, make_inputs
    from tools.gpu_check_lib.timing import num_sets, time_rotating

    require_gpu()
    gpu, geometry = torch.cuda.get_device_properties(0), large_geometry()
    sm, scale = 10 * gpu.major + gpu.minor, geometry.head_size**-0.5
    cache_bytes = int(getattr(gpu, "L2_cache_size", 0)) or 64 * 2**20

    def call(tensors: "dict[str, torch.Tensor]", splits: int, new: int) -> "torch.Tensor":
        names = ("q", "k_cache", "v_cache", "kv_lens", "cu_new_tokens")
        given = (tensors[name] for name in names)
        return launch.ragged_attention(*given, scale=scale, num_splits=splits, new_tokens=new)

    found = []
    for past, new in sizes():
        case = Case(rows=((past, new),), heads=geometry.heads, kv_heads=geometry.kv_heads, head_size=geometry.head_size)
        spec = KernelSpec(
            kernel="ragged_attention", dtype="float16", num_heads=geometry.heads, kv_num_heads=geometry.kv_heads,
            head_size=geometry.head_size, new_tokens=new,
        )  # fmt: skip
        splits = spec.with_splits(sm, num_seqs=1, kv_len=past, multiprocessors=gpu.multi_processor_count).num_splits
        entry_bytes = 4 * geometry.kv_heads * geometry.head_size
        sets = [make_inputs(case, "float16", "cuda") for _ in range(min(16, num_sets(past * entry_bytes, cache_bytes)))]
        for tensors in sets:
            for name in ("k_cache", "v_cache"):
                tensors[name].normal_()
        calls = [partial(call, tensors, splits, new) for tensors in sets]
        right = expected(case, sets[0]["q"], sets[0]["k_cache"], sets[0]["v_cache"], scale)
        error = error_of(calls[0]()[: len(right)].float().cpu().numpy(), right.cpu().numpy())
        milliseconds, how = time_rotating(calls)
        found.append(Timing(past, new, 1e3 * milliseconds, error, "ours", how))
    return found


if __name__ == "__main__":
    try:
        print(RESULT + json.dumps(measure_way(find_way(sys.argv[1]))), flush=True)
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}".splitlines()[0], flush=True)
        sys.exit(1)

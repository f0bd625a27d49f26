"""What ONNX Runtime's CPU kernels take beside float32: a KV cache in 8 bits, and weights and activations in 16.

python benchmarks/kernel_probe.py
python benchmarks/kernel_probe.py --threads 2 --repeats 200

Each line is a model of one node, timed in turns with its float32 form; only the ratios mean something on a machine that
does other work. Where a kernel is missing, the line ends with what ONNX Runtime says. Needs the export stack.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from common import median, timed
from onnx import TensorProto, helper, numpy_helper

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
DEPTH, WIDTH = 2048, 8192
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Step = Callable[[], Any]
Session = ort.InferenceSession


def open_model(graph: onnx.GraphProto, options: ort.SessionOptions) -> Session:
    """A session on the CPU of a graph with ONNX's and Microsoft's operators."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Session(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def binding(session: Session, inputs: Mapping[str, tuple[np.ndarray, int]], shared: Mapping[str, str]) -> Any:
    """Inputs (array, ONNX type) bound once; ``shared`` outputs are written where the named input lies."""
    bound, values = session.io_binding(), {}
    for name, (array, kind) in inputs.items():
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
        bound.bind_ortvalue_input(name, values[name])
    for output in session.get_outputs():
        if output.name in shared:
            bound.bind_ortvalue_output(output.name, values[shared[output.name]])
        else:
            bound.bind_output(output.name)
    return bound


def in_turns(ways: Mapping[Any, Step], repeats: int) -> dict[Any, float]:
    """Median seconds of each way, which take turns."""
    times: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            times[name].append(timed(step)[0])
    return {name: median(found) for name, found in times.items()}


def first_line(error: Exception) -> str:
    """What ONNX Runtime says, cut."""
    return str(error).strip().splitlines()[0][:220]


# --- a KV cache in 8 bits ---


def attention(cache_kind: str, channels: bool, options: ort.SessionOptions) -> Session:
    """A step of grouped attention over a cache of ``cache_kind`` (float32 or int8)."""
    cache = TensorProto.INT8 if cache_kind == "int8" else TensorProto.FLOAT
    inputs = [("q", 1, None), ("k", 1, None), ("v", 1, None), ("pk", cache, None), ("pv", cache, None)]
    names = ["q", "k", "v", "pk", "pv", "last", "total"]
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    if cache_kind == "int8":
        kind = "PER_CHANNEL" if channels else "PER_TENSOR"
        attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        inputs += [("k_scale", 1, None), ("v_scale", 1, None)]
    node = helper.make_node("GroupQueryAttention", names, ["o", "nk", "nv"], domain="com.microsoft", **attributes)
    given = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs]
    given += [helper.make_tensor_value_info("last", TensorProto.INT32, [1])]
    given += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
    made = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("o", 1), ("nk", cache), ("nv", cache))]
    return open_model(helper.make_graph([node], "attention", given, made), options)


class Cache:
    """A cache of ``length`` random tokens, and what one step puts behind them.

    Args:
        length: tokens before the step.
        generator: of the numbers.
    """

    def __init__(self, length: int, generator: np.random.Generator) -> None:
        shape = (1, KV_HEADS, length + 8, HEAD_DIM)
        spread = generator.uniform(0.2, 3.0, (1, KV_HEADS, 1, HEAD_DIM))  # channels differ, as in models
        self.length = length
        self.k, self.v = ((generator.standard_normal(shape) * spread).astype(np.float32) for _ in range(2))
        self.q = generator.standard_normal((1, 8, HEADS * HEAD_DIM)).astype(np.float32)

    def inputs(self, tokens: int, start: int, *, eight_bits: bool, channels: bool) -> dict[str, tuple[np.ndarray, int]]:
        """Of a step of ``tokens`` new ones, from ``start`` of 8, with those before it in the cache."""
        behind, float32 = self.length + start, TensorProto.FLOAT
        found = {"q": (self.q[:, start : start + tokens], float32)}
        for name, values in (("k", self.k), ("v", self.v)):
            axes = (0, 2) if channels else None
            scale = np.abs(values).max(axes, keepdims=True) / 127
            stored = np.clip(np.rint(values / scale), -128, 127) if eight_bits else values.copy()
            stored[:, :, behind:] = 0
            new = values[:, :, behind : behind + tokens].transpose(0, 2, 1, 3).reshape(1, tokens, -1)
            found[name] = (np.ascontiguousarray(new), float32)
            kind = (np.int8, TensorProto.INT8) if eight_bits else (np.float32, float32)
            found[f"p{name}"] = (stored.astype(kind[0]), kind[1])
            if eight_bits:
                found[f"{name}_scale"] = (scale.reshape(-1).astype(np.float32), float32)
        found["last"] = (np.array([behind + tokens - 1], np.int32), TensorProto.INT32)
        found["total"] = (np.array(behind + tokens, np.int32), TensorProto.INT32)
        return {
            name: (np.ascontiguousarray(array) if array.ndim else array, kind) for name, (array, kind) in found.items()
        }


def probe_cache(length: int, options: ort.SessionOptions, repeats: int) -> None:
    """Lines: int8 against float32; time, error, and whether 8 tokens at once give the bits of 8 steps."""
    cache = Cache(length, np.random.default_rng(0))
    shared = {"nk": "pk", "nv": "pv"}
    plain = attention("float32", False, options)
    for channels in (False, True):
        name = f"int8 KV cache, per {'channel' if channels else 'tensor'}, {length} tokens"
        try:
            packed = attention("int8", channels, options)
            ways, outputs = {}, {}
            for tokens in (1, 8):
                for kind, session in (("float32", plain), ("int8", packed)):
                    bound = binding(
                        session, cache.inputs(tokens, 0, eight_bits=kind == "int8", channels=channels), shared
                    )
                    session.run_with_iobinding(bound)
                    outputs[kind, tokens] = bound.copy_outputs_to_cpu()[0]
                    ways[f"{kind} {tokens}"] = lambda s=session, b=bound: s.run_with_iobinding(b)
            same = []
            for start in range(8):  # the step of 8 has read its first tokens as it stored them
                bound = binding(packed, cache.inputs(1, start, eight_bits=True, channels=channels), shared)
                packed.run_with_iobinding(bound)
                same.append(np.array_equal(bound.copy_outputs_to_cpu()[0][0, 0], outputs["int8", 8][0, start]))
            error = np.abs(outputs["int8", 8] - outputs["float32", 8]).max() / np.abs(outputs["float32", 8]).max()
            took = in_turns(ways, repeats)
        except Exception as error_found:  # that is the finding
            print(f"{name}: {first_line(error_found)}")
            continue
        ratios = ", ".join(f"{n} new {took[f'int8 {n}'] / took[f'float32 {n}']:.2f}" for n in (1, 8))
        print(
            f"{name}: time of float32's {ratios}; error {error:.1e} of the largest; 8 at once = 8 steps: {sum(same)}/8"
        )


# --- 16-bit weights ---


def product(op: str, activations: str, options: ort.SessionOptions, stored: str | None = None) -> Session:
    """``x @ w``: by MatMul, Gemm or MatMulNBits; or with float32 products of weights stored in another type."""
    kind = TYPES[activations]
    weights = np.random.default_rng(0).standard_normal((DEPTH, WIDTH), np.float32) / 64
    nodes, constants = [], []
    if op == "MatMulNBits":
        shape = (WIDTH, DEPTH // 32, 16)
        blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        scales = np.full(WIDTH * DEPTH // 32, 1 / 512, NUMPY[activations])
        constants = [numpy_helper.from_array(blocks, "w"), numpy_helper.from_array(scales, "s")]
        settings = {"K": DEPTH, "N": WIDTH, "bits": 4, "block_size": 32}
        nodes = [helper.make_node(op, ["x", "w", "s"], ["y"], domain="com.microsoft", **settings)]
    else:
        constants = [numpy_helper.from_array(weights.astype(NUMPY[stored or activations]), "w")]
        if stored:
            nodes.append(helper.make_node("Cast", ["w"], ["wide"], to=kind))
        nodes.append(helper.make_node(op, ["x", "wide" if stored else "w"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", kind, ["n", DEPTH])],
        [helper.make_tensor_value_info("y", kind, ["n", WIDTH])],
        constants,
    )
    return open_model(graph, options)


def feed(session: Session, tokens: int, kind: str) -> Step:
    """A step of ``tokens`` rows."""
    rows = np.random.default_rng(1).standard_normal((tokens, DEPTH)).astype(NUMPY[kind])
    bound = binding(session, {"x": (rows, TYPES[kind])}, {})
    return lambda: session.run_with_iobinding(bound)


def loaded(op: str, activations: str, stored: str | None = None) -> str:
    """What ONNX Runtime runs in a product's place: its nodes, and the types of its constants."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        product(op, activations, options, stored)
        graph = onnx.load(options.optimized_model_filepath).graph
    constants = [TensorProto.DataType.Name(constant.data_type).lower() for constant in graph.initializer]
    return f"runs {', '.join(node.op_type for node in graph.node)} with constants of {', '.join(constants)}"


def probe_products(options: ort.SessionOptions, repeats: int) -> None:
    """Lines: each operator in float16 and bfloat16, and with 16-bit weights behind a Cast, against float32."""
    ways = [(op, kind, None) for op in ("MatMul", "Gemm", "MatMulNBits") for kind in ("float16", "bfloat16")]
    ways += [("MatMul", "float32", stored) for stored in ("float16", "bfloat16")]
    for op, kind, stored in ways:
        name = f"{op}, {kind}" + (f", weights stored as {stored} behind a Cast" if stored else "")
        plain = product(op, "float32", options)
        try:
            session = product(op, kind, options, stored)
            steps = {(n, s is plain): feed(s, n, k) for n in (1, 8) for s, k in ((plain, "float32"), (session, kind))}
            took = in_turns(steps, repeats)
            ratios = ", ".join(f"{n} tokens {took[n, False] / took[n, True]:.2f}" for n in (1, 8))
            print(f"{name}: time of float32's {ratios}; {loaded(op, kind, stored)}")
        except Exception as error:  # that is the finding
            print(f"{name}: {first_line(error)}")


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    options = ort.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.log_severity_level = 4
    ort.set_default_logger_severity(4)
    print(f"ONNX Runtime {ort.__version__}, {arguments.threads} threads, products of {DEPTH} x {WIDTH}")
    for length in (512, 2048):
        probe_cache(length, options, arguments.repeats)
    probe_products(options, arguments.repeats)


if __name__ == "__main__":
    main()

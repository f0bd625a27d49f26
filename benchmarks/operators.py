"""One packed matrix in ONNX Runtime against ``MatMulNBits`` and float32 ``MatMul``, with weights that come from memory.

    python benchmarks/operators.py int8 int4 q4_k q6_k bf16 --shapes 8960x1536,1536x8960

Shapes are K x N. Each way has a session of as many such matrices as the caches cannot hold; ways take turns, and each
figure is the least of its repeats, in microseconds a product. ``read`` is the share of the machine's read rate at which
a product of one token passes over its packed bytes.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import specexport_runtime
from specexport.passes.block_format import FLOATS, layout, packed_shape

TOKENS = [1, 2, 5, 9, 16, 100]
BEYOND_CACHES = 160_000_000


def session(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], k: int, threads: int, library: str
) -> ort.InferenceSession:
    """A session of nodes from ``x`` to outputs of their own."""
    graph = helper.make_graph(
        nodes,
        "operators",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", k])],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    domains = {"": 20, "specexport": 1, "com.microsoft": 1}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ours(name: str, n: int, k: int, copies: int, threads: int, library: str) -> ort.InferenceSession:
    """Random bytes of a format, but for scales that are no NaN: all bytes are small."""
    generator = np.random.default_rng(0)
    shape = packed_shape(name, n, k)
    weights = {f"w{i}": generator.integers(0, 60, shape, dtype=np.uint8) for i in range(copies)}
    nodes = [
        helper.make_node("BlockLinear", ["x", w], [f"y{i}"], domain="specexport", format=name, N=n, K=k)
        for i, w in enumerate(weights)
    ]
    return session(nodes, weights, k, threads, library)


def theirs(bits: int, n: int, k: int, copies: int, threads: int, library: str) -> ort.InferenceSession:
    """``MatMulNBits`` in blocks of 32 that quantizes activations; float32 ``MatMul`` for 32 bits."""
    generator = np.random.default_rng(0)
    weights, nodes = dict[str, np.ndarray](), []
    for i in range(copies):
        if bits == 32:
            weights[f"w{i}"] = generator.random((k, n), np.float32)
            nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]))
            continue
        weights[f"w{i}"] = generator.integers(0, 256, (n, k // 32, 4 * bits), dtype=np.uint8)
        weights[f"s{i}"] = np.full(n * k // 32, 0.01, np.float32)
        settings = {"K": k, "N": n, "bits": bits, "block_size": 32, "accuracy_level": 4}
        node = helper.make_node("MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft", **settings)
        nodes.append(node)
    return session(nodes, weights, k, threads, library)


def seconds(made: ort.InferenceSession, x: np.ndarray, n: int) -> float:
    """Of one run, with all outputs where they were."""
    bound = made.io_binding()
    bound.bind_cpu_input("x", x)
    for output in made.get_outputs():
        bound.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_numpy(np.empty((len(x), n), np.float32)))
    made.run_with_iobinding(bound)
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        made.run_with_iobinding(bound)
        best = min(best, time.perf_counter() - start)
    return best


def read_rate(threads: int) -> float:
    """Bytes a second that threads read together."""
    parts = [np.ones(1 << 25, np.float32) for _ in range(threads)]
    best = np.inf
    for _ in range(8):
        workers = [threading.Thread(target=part.max) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=["int8", "int4", "q4_k", "q6_k", "bf16"])
    parser.add_argument("--shapes", default="1536x8960,8960x1536,896x4864")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="leave out ONNX Runtime's own")
    default = Path(specexport_runtime.__file__).with_name("_operators.so")
    parser.add_argument("--library", default=str(default))
    given = parser.parse_args()
    rate = read_rate(given.threads)
    print(f"reading: {rate / 1e9:.1f} GB/s with {given.threads} threads")
    tokens = [int(count) for count in given.tokens.split(",")]
    for name in given.formats:
        bits = 32 if name in FLOATS else 8 if layout(name).bits > 4 else 4
        for shape in given.shapes.split(","):
            k, n = map(int, shape.split("x"))
            size = int(np.prod(packed_shape(name, n, k)))
            ways: dict[str, tuple[int, Callable[..., ort.InferenceSession], object]] = {"ours": (size, ours, name)}
            if not given.alone:
                ways["theirs"] = (k * n * bits // 8, theirs, bits)
            copies = {way: max(2, -(-BEYOND_CACHES // each)) for way, (each, _, _) in ways.items()}
            made = {
                way: make(what, n, k, copies[way], given.threads, given.library)
                for way, (_, make, what) in ways.items()
            }
            best = {(way, count): np.inf for way in ways for count in tokens}
            for _ in range(given.repeats):
                for count in tokens:
                    x = np.random.default_rng(count).standard_normal((count, k)).astype(np.float32)
                    for way in ways:
                        each = seconds(made[way], x, n) / copies[way]
                        best[way, count] = min(best[way, count], each)
            share = size / best["ours", tokens[0]] / rate
            print(f"{name} {k} x {n}, read {share:.2f}")
            for way in ways:
                figures = [f"{count}: {best[way, count] * 1e6:.0f}" for count in tokens]
                ratios = [f"{best[way, count] / best[way, tokens[0]]:.2f}" for count in tokens]
                print(f"  {way:7}{'  '.join(figures)}   over {tokens[0]}: {' '.join(ratios)}")
            if "theirs" in ways:
                print("  ours/theirs", " ".join(f"{best['ours', c] / best['theirs', c]:.2f}" for c in tokens))


if __name__ == "__main__":
    main()

"""A layer's experts in ONNX Runtime against ``QMoE``, with weights that come from memory.

    python benchmarks/experts.py int8 int4 q4_k bf16 --sizes 2048x768 --experts 64 --per-token 8

Sizes are those of a token and of an expert inside. ``QMoE`` has 8 or 4 bits in blocks of 32, quantizes activations too,
and chooses the same experts. Steps choose others each time; ways take turns, and each figure is the least of its
repeats, in microseconds a step.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import specexport_runtime
from specexport.passes.block_format import FLOATS, layout, packed_shape

Arrays = dict[str, np.ndarray]
STEPS = 6


def session(
    inputs: Arrays,
    weights: Arrays,
    given: argparse.Namespace,
    op: str,
    domain: str,
    order: list[str],
    **attributes: object,
) -> ort.InferenceSession:
    """A session of one node."""
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    graph = helper.make_graph(
        [helper.make_node(op, order, ["y"], domain=domain, **attributes)],
        "experts",
        [helper.make_tensor_value_info(name, kinds[array.dtype], [None, None]) for name, array in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid(*each) for each in (("", 20), ("specexport", 1), ("com.microsoft", 1))]
    options = ort.SessionOptions()
    options.register_custom_ops_library(given.library)
    options.intra_op_num_threads, options.log_severity_level = given.threads, 3
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def steps_of(tokens: int, given: argparse.Namespace, depth: int) -> list[tuple[Arrays, Arrays]]:
    """What both are fed, for steps with other experts each."""
    generator, made = np.random.default_rng(tokens), []
    for _ in range(STEPS):
        x = generator.standard_normal((tokens, depth)).astype(np.float32)
        scores = generator.standard_normal((tokens, given.experts)).astype(np.float32)
        ids = np.argsort(-scores, axis=1)[:, : given.per_token].astype(np.int64)
        shares = np.full(ids.shape, 1 / given.per_token, np.float32)
        made.append(({"x": x, "ids": ids, "shares": shares}, {"x": x, "scores": scores}))
    return made


def seconds(made: ort.InferenceSession, feeds: list[Arrays]) -> float:
    """Of one step."""
    start = time.perf_counter()
    for feed in feeds:
        made.run(None, feed)
    return (time.perf_counter() - start) / len(feeds)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=["int8", "int4"])
    parser.add_argument("--sizes", default="2048x768")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    default = Path(specexport_runtime.__file__).with_name("_operators.so")
    parser.add_argument("--library", default=str(default))
    given = parser.parse_args()
    depth, width = map(int, given.sizes.split("x"))
    count, generator = given.experts, np.random.default_rng(0)
    for kind in given.formats:
        bits = 8 if kind in FLOATS or layout(kind).bits > 4 else 4
        least = 60 if kind not in FLOATS and layout(kind).scale == "power" else 0
        weights, theirs = Arrays(), Arrays()
        for name, n, k in (("first", 2 * width, depth), ("last", depth, width)):
            tiles, size = packed_shape(kind, n, k)  # bytes are small: no scale is a NaN, nor a power that is subnormal
            weights[name] = generator.integers(least, least + 60, (count * tiles, size), dtype=np.uint8)
            theirs[name] = generator.integers(0, 256, (count, n, k * bits // 8), dtype=np.uint8)
            theirs[f"{name}_scale"] = np.full((count, n, k // 32), 0.01, np.float32)
        steps = {tokens: steps_of(tokens, given, depth) for tokens in map(int, given.tokens.split(","))}
        ours, other = next(iter(steps.values()))[0]
        made = [
            session(
                ours, weights, given, "BlockExperts", "specexport",
                ["x", "ids", "shares", "first", "", "last"], E=count, H=depth, I=width, interleaved=1,
                alpha=1.0, beta=0.0, limit=0.0, gate_up_format=kind, down_format=kind,
            ),
            session(
                other, theirs, given, "QMoE", "com.microsoft",
                ["x", "scores", "first", "first_scale", "", "last", "last_scale"], k=given.per_token,
                normalize_routing_weights=1, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0,
                activation_beta=0.0, expert_weight_bits=bits, block_size=32, accuracy_level=4,
            ),
        ]  # fmt: skip
        best = {(way, tokens): np.inf for way in range(2) for tokens in steps}
        for repeat in range(given.repeats + 1):
            for tokens, fed in steps.items():
                for way in range(2):
                    each = seconds(made[way], [feeds[way] for feeds in fed])
                    if repeat:
                        best[way, tokens] = min(best[way, tokens], each)
        print(f"{kind}, QMoE with {bits} bits; {count} experts of {depth} x {width}, {given.per_token} a token")
        for tokens in steps:
            mine, yours = best[0, tokens], best[1, tokens]
            print(f"  {tokens:3} tokens: {mine * 1e6:7.0f} against {yours * 1e6:7.0f}, {mine / yours:.2f}")


if __name__ == "__main__":
    main()

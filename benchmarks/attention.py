"""Our attention beside ONNX Runtime's GroupQueryAttention: one row, one layer, microseconds of a step.

python benchmarks/attention.py
python benchmarks/attention.py --threads 1 --heads 8 --kv-heads 2 --head-size 64 --lengths 500

The two are timed in turns, and the least of each counts; only ratios mean something on a machine that does other work.
Needs the export stack.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from common import report
from onnx import TensorProto, helper

from specexport_runtime.executors.operators import register

FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32


def bound_step(op: str, domain: str, attributes: dict[str, Any], given: dict[str, np.ndarray], threads: int) -> Any:
    """A session of one node and its binding, with caches in place."""
    results = ("output", "k_cache_out", "v_cache_out")
    node = helper.make_node(op, list(given), list(results), domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, INT32 if array.dtype == np.int32 else FLOAT, array.shape)
        for name, array in given.items()
    ]
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in results]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(helper.make_graph([node], op, inputs, outputs), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    for name, array in given.items():
        value = ort.OrtValue.ortvalue_from_numpy(array)
        bound.bind_ortvalue_input(name, value)
        if f"{name}_out" in results:
            bound.bind_ortvalue_output(f"{name}_out", value)
    bound.bind_output("output")
    return session, bound


def compare(args: argparse.Namespace, past: int, new: int) -> tuple[float, float]:
    """Microseconds of a step of ``new`` tokens behind ``past``: ours, and theirs."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size = args.heads, args.kv_heads, args.head_size
    q, k, v = (rng.standard_normal((new, count * size), np.float32) for count in (heads, kv_heads, kv_heads))
    caches = [rng.standard_normal((1, 1, kv_heads, past + new + 3, size), np.float32) for _ in "kv"]
    lens, starts = np.array([[past]], np.int32), np.array([0, new], np.int32)
    same = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": size**-0.5}
    ours = {"q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "lens": lens, "starts": starts}
    more = {"window": -1, "softcap": 0.0, "causal": 1, "packed": 0, "rotary": ""}
    theirs = {"q": q[None], "k": k[None], "v": v[None], "k_cache": caches[0][0].copy(), "v_cache": caches[1][0].copy()}
    theirs |= {"last": np.array([past + new - 1], np.int32), "total": np.array(past + new, np.int32)}
    steps = [
        bound_step("UnpaddedAttention", "specexport", same | more, ours, args.threads),
        bound_step("GroupQueryAttention", "com.microsoft", same, theirs, args.threads),
    ]
    least, end = [float("inf")] * 2, time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for at, (session, bound) in enumerate(steps):
            start = time.perf_counter()
            session.run_with_iobinding(bound)
            least[at] = min(least[at], time.perf_counter() - start)
    return least[0] * 1e6, least[1] * 1e6


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5, 100, 500])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each comparison")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, record = [], {}
    for past in args.lengths:
        for new in args.widths:
            ours, theirs = compare(args, past, new)
            rows.append((f"{new} new behind {past}", f"{ours:.0f} us, {theirs:.0f} us: {ours / theirs:.2f}"))
            record[f"{past}/{new}"] = [ours, theirs]
    report(f"Attention, {args.threads} threads: ours, GroupQueryAttention", rows, {"us": record}, args.json)


if __name__ == "__main__":
    main()

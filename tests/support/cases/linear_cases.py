"""Packed weights of every format, and ONNX Runtime sessions of one operator over them."""

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from specexport.passes.block_format import BOOKS, FLOATS, NAMED, PANEL, pack, pack_float, parse_layout, unpack
from specexport.passes.block_weight import BlockForm, Blocks, BlockWeight, ScaleLayout, StoredScales
from tests.support.references import block_arithmetic
from tests.support.references.block_arithmetic import reference

GROUPS = [
    "group4_64_f16",
    "group4_128_f32",
    "group4_16_f16",
    "group4_32_f16_zero",
    "group4_128_f16_zero",
    "group4_16_f32_zero",
    "group4_32_f32_zero",
    "group4_32_f32_offset",
    "group8_128_f16",
    "group8_32_f32",
    "group8_16_f16",
    "group8_128_f16_zero",
    "group8_16_f32_offset",
]
CODES = [*NAMED, *GROUPS]
ALL = [*FLOATS, *CODES]
TOLERANCE = 1e-5
SHAPES = [(16, 32), (33, 100), (7, 1), (40, 1100), (64, 2048)]


LEVELS = {"q2_k": (15,), "q3_k": (-32, 31), "q4_k": (63,), "q5_k": (63,), "q6_k": (-128, 127), "iq4_xs": (-32, 31)}
"""The least and largest levels that files have."""


def random_weight(name: str, n: int, k: int, generator: np.random.Generator, level: int | None = None) -> BlockWeight:
    """Any integers, scales and offsets that a format of codes can hold; K of any size.

    With ``level`` all levels are it, and codes the largest or, in every other row, 0.
    """
    form = parse_layout(name)
    groups, supers = -(-k // form.group), -(-k // 256)
    middle = 128 if form.bits > 4 or form.lookup else 8
    codes = generator.integers(0, 1 << form.bits, (n, k), dtype=np.uint8)
    codes[0 :: n if level is None else 2] = (1 << form.bits) - 1  # what sums of pairs must have room for
    codes[-1 :: -n if level is None else -2] = 0
    if form.lookup:
        codes = (BOOKS[form.lookup] + 128).astype(np.uint8)[codes]
    scales = generator.uniform(0.001, 0.01, (n, groups)).astype(np.float16 if form.scale == "half" else np.float32)
    bases = generator.uniform(-0.001, 0.001, (n, supers)).astype(np.float16)
    share = 256 // form.group if form.scale == "level" else 1
    levels = generator.integers(-32, 64, (n, groups)).astype(np.int8) if form.scale == "level" else None
    if level is not None:
        levels = np.full((n, groups), level, np.int8)
    stored: StoredScales | None = None
    offsets: np.ndarray | None = None
    if form.scale == "power":
        scales = np.ldexp(np.float32(1), generator.integers(115, 124, (n, groups)) - 128).astype(np.float32)
        scales[0], scales[-1] = np.ldexp(np.float32(1), -128), np.ldexp(np.float32(1), -127)  # subnormal
        stored = StoredScales(scales)
    if levels is not None:
        scales = np.repeat(bases, share, 1)[:, :groups].astype(np.float32) * levels
        stored = StoredScales(bases, levels)
    if form.shift == "minima":
        least = generator.uniform(-0.02, 0.001, (n, supers)).astype(np.float16)
        minima = generator.integers(0 if level is None else 63, 64, (n, groups)).astype(np.int8)
        stored = StoredScales(bases, levels, least, minima)
        offsets = np.repeat(least, share, 1)[:, :groups].astype(np.float32) * minima
    elif form.shift == "zero":
        zeros = generator.integers(0, 1 << form.bits, (n, groups))
        offsets = scales.astype(np.float32) * (middle - zeros).astype(np.float32)
    elif form.shift == "offset":
        least = generator.uniform(-0.05, 0.05, (n, groups)).astype(scales.dtype)
        offsets, stored = least.astype(np.float32), StoredScales(scales, least=least)  # type: ignore[arg-type]
    blocks = Blocks(codes + np.uint8(form.bias), scales.astype(np.float32), offsets, stored)
    spread = None if stored is None else ScaleLayout(256, levels is not None, form.shift == "minima")
    if spread is not None and form.scale == "power":
        spread = ScaleLayout(form.group, powers=True)

    def read(rows: np.ndarray) -> Blocks:
        parts: list[Any] = [None if part is None else part[rows] for part in (blocks.stored or ())]
        return Blocks(
            blocks.codes[rows],
            blocks.scales[rows],
            None if blocks.offsets is None else blocks.offsets[rows],
            StoredScales(*parts) if parts else None,
        )

    return BlockWeight(name, BlockForm(4 if middle == 8 else 8, form.group, bool(form.shift)), (n, k), 0, read, spread)


def packed(name: str, n: int, k: int, generator: np.random.Generator) -> np.ndarray:
    if name in FLOATS:
        return pack_float(name, generator.standard_normal((n, k)).astype(np.float32) * np.float32(0.05), n, k)
    return pack(name, random_weight(name, n, k, generator))


def session(
    library: str, nodes: Sequence[onnx.NodeProto], given: dict[str, tuple[int, int]], weights: dict[str, np.ndarray],
    outputs: Sequence[str], threads: int = 1,
) -> ort.InferenceSession:  # fmt: skip
    return opened(library, model_of(nodes, given, weights, outputs).SerializeToString(), threads)


def opened(library: str, model: bytes | str, threads: int = 1) -> ort.InferenceSession:
    """A session of a model, or of the file of one."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def model_of(
    nodes: Sequence[onnx.NodeProto],
    given: dict[str, tuple[int, int]],
    weights: dict[str, np.ndarray],
    outputs: Sequence[str] | dict[str, int],
) -> onnx.ModelProto:
    """A model of some nodes; ``given`` has types and ranks of inputs; ``outputs`` are floats unless it has types."""
    kinds = outputs if isinstance(outputs, dict) else dict.fromkeys(outputs, TensorProto.FLOAT)
    graph = helper.make_graph(
        list(nodes),
        "operators",
        [helper.make_tensor_value_info(name, kind, [None] * rank) for name, (kind, rank) in given.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid(*each) for each in (("", 20), ("specexport", 1), ("com.microsoft", 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def linear(name: str, n: int, k: int, inputs: Sequence[str] = ("x", "w"), out: str = "y") -> onnx.NodeProto:
    return helper.make_node("BlockLinear", list(inputs), [out], domain="specexport", format=name, N=n, K=k)


def embedding(name: str, n: int, k: int) -> onnx.NodeProto:
    return helper.make_node("BlockEmbedding", ["ids", "w"], ["rows"], domain="specexport", format=name, N=n, K=k)


def assert_right(library: str, name: str, n: int, k: int, generator: np.random.Generator) -> None:
    """Products against float64 and the arithmetic in numpy, their bits at widths, batches and threads, and lookups."""
    weight, bias = packed(name, n, k, generator), generator.standard_normal(n).astype(np.float32)
    nodes = [linear(name, n, k, ("x", "w", "b")), embedding(name, n, k)]
    given = {"x": (TensorProto.FLOAT, 3), "ids": (TensorProto.INT64, 1)}
    runs = [session(library, nodes, given, {"w": weight, "b": bias}, ["y", "rows"], threads).run for threads in (1, 2)]
    x = generator.standard_normal((17, k)).astype(np.float32) * np.exp(generator.normal(size=(17, 1))).astype(
        np.float32
    )
    x[3], x[8, 32:64] = 0, 0
    x[4], x[7] = 1, np.where(np.arange(k) % 3, -1, 1)
    ids = generator.integers(0, n, 9)
    wanted = reference(name, weight, n, k, x) + bias
    got, rows = runs[0](None, {"x": x[None], "ids": ids})
    scale = max(float(np.abs(wanted).max()), 1e-30)
    error = float(np.abs(got[0] - wanted).max()) / scale
    assert error <= TOLERANCE, f"{name} [{n}, {k}]: error {error}"
    if name not in FLOATS:
        exact = block_arithmetic.product(name, weight, n, k, x) + bias
        assert got[0].tobytes() == exact.tobytes(), f"{name} [{n}, {k}]: bits of the arithmetic"
    values = unpack(name, weight, n, k)
    assert rows.tobytes() == values[ids].tobytes(), f"{name} [{n}, {k}]: rows"
    for run in runs:
        for width in range(1, 17):
            part = run(["y"], {"x": x[None, :width], "ids": ids})[0]
            assert part.tobytes() == got[:, :width].tobytes(), f"{name} [{n}, {k}]: bits at width {width}"
        batch = run(["y"], {"x": x[:16].reshape(4, 4, k), "ids": ids})[0]
        assert batch.tobytes() == got[:, :16].tobytes(), f"{name} [{n}, {k}]: bits in a batch"
    broken = x.copy()
    broken[5, k // 2], broken[6, 0] = np.nan, np.inf
    odd = runs[0](["y"], {"x": broken[None], "ids": ids})[0][0]
    assert not np.isfinite(odd[5:7]).any(), f"{name}: NaN"
    rest = [row for row in range(17) if row not in (5, 6)]
    assert odd[rest].tobytes() == got[0][rest].tobytes(), f"{name}: rows beside a NaN"


def assert_largest_fit(library: str) -> None:
    """The largest codes, levels and activations of 256 inputs stay within int32, and within 16 bits on the way."""
    for name, levels in LEVELS.items():
        for level in levels:
            weight = pack(name, random_weight(name, 16, 512, np.random.default_rng(0), level))
            x = np.full((5, 512), 3, np.float32) * np.array([1, -1, 1, 1, 1], np.float32)[:, None]
            x[2, ::2], x[3, ::4], x[4, :256] = -3, -3, -3
            made = session(library, [linear(name, 16, 512)], {"x": (TensorProto.FLOAT, 2)}, {"w": weight}, ["y"])
            exact = block_arithmetic.product(name, weight, 16, 512, x)
            assert made.run(None, {"x": x})[0].tobytes() == exact.tobytes(), f"{name}: level {level}"


NOT_HERE = 77
"""Exit status of a process whose processor does not run the kernels that were asked for."""


def require_kernels(library: str) -> None:
    """End the process unless the library runs the kernels that the environment names."""
    loaded = ctypes.CDLL(library)
    loaded.specexport_kernels.restype = ctypes.c_char_p
    if loaded.specexport_kernels().decode() != os.environ["SPECEXPORT_CPU_KERNELS"]:
        sys.exit(NOT_HERE)


def main() -> None:
    library, generator = sys.argv[1], np.random.default_rng(int(sys.argv[2]))
    require_kernels(library)
    for _ in range(int(sys.argv[3])):
        name, n, k = str(generator.choice(ALL)), generator.integers(1, 100), generator.integers(1, 2 * PANEL)
        assert_right(library, name, int(n), int(k), generator)
    assert_largest_fit(library)
    for index, name in enumerate(ALL):
        for n, k in SHAPES:
            assert_right(library, name, n, k, np.random.default_rng([index, n, k]))


if __name__ == "__main__":
    main()

"""Drawn steps of ``UnpaddedAttention``, run by the library of operators inside ONNX Runtime, or by the reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper

from specexport.ops.reference import unpadded_attention
from tests.support.cases import linear_cases, unpadded_cases

Array = npt.NDArray[Any]
INPUTS = (
    *("q", "k", "v", "k_cache", "v_cache", "kv_lens", "cu_new_tokens", "sinks", "slopes", "cos_table", "sin_table"),
    *("k_scale", "v_scale", "positions", "kv_positions", "parents"),
)


@dataclass(frozen=True)
class Case(unpadded_cases.Case):
    """A step of rows (past, new tokens), and what kind of attention it is. ``rotary``: kind and rotated channels."""

    rows: tuple[tuple[int, int], ...] = ((3, 5), (17, 1), (0, 3), (70, 12))
    packed: bool = False
    rotary: tuple[str, int] = ("", 0)
    int8: bool = False
    padded: bool = False
    capacity: int = 0


def draw(case: Case, seed: int = 0) -> dict[str, Array]:
    """Inputs of the operator; what no token may see is NaN (in int8 caches: large)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    tokens = sum(new for _, new in case.rows)
    capacity = case.capacity or max([past + new for past, new in case.rows], default=0) + 3
    sizes = [case.heads * case.k_dim, case.kv_heads * case.k_dim, case.kv_heads * case.v_dim]
    given: dict[str, Array] = dict(zip("qkv", (normal(tokens, size) for size in sizes), strict=True))
    for name, dim in (("k", case.k_dim), ("v", case.v_dim)):
        shape = (len(case.rows), 1, case.kv_heads, capacity, dim)
        cache = rng.integers(-127, 128, shape).astype(np.int8) if case.int8 else normal(*shape)
        for row, (past, _) in enumerate(case.rows):
            cache[row, ..., past:, :] = -128 if case.int8 else np.nan
        given[f"{name}_cache"] = cache
        if case.int8:
            given[f"{name}_scale"] = rng.uniform(0.01, 0.03, case.kv_heads * dim).astype(np.float32)
    given["kv_lens"] = np.array([past for past, _ in case.rows], np.int32)[:, None]
    given["cu_new_tokens"] = np.cumsum([0, *(new for _, new in case.rows)]).astype(np.int32)
    if case.sinks:
        given["sinks"] = normal(case.heads)
    if case.slopes:
        given["slopes"] = rng.uniform(0.05, 0.5, case.heads).astype(np.float32)
    if case.rotary[0]:
        angles = np.arange(capacity)[:, None] * 0.5 ** np.arange(case.rotary[1] // 2)
        given["cos_table"], given["sin_table"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if case.padded:
        held = np.full((len(case.rows), 1, capacity + 2), -1, np.int64)
        positions = []
        for row, (past, new) in enumerate(case.rows):
            kept = np.flatnonzero(rng.random(past) < 0.7)
            held[row, 0, kept] = np.arange(len(kept))
            held[row, 0, past : past + new] = np.arange(len(kept), len(kept) + new)
            positions += range(len(kept), len(kept) + new)
            for name in "kv":
                given[f"{name}_cache"][row, 0, :, np.setdiff1d(np.arange(past), kept)] = np.nan
        given |= {"kv_positions": held, "positions": np.array(positions, np.int64)}
    if not case.appends:
        del given["k"], given["v"]
    if case.packed:
        given["q"] = np.concatenate([given["q"], given.pop("k"), given.pop("v")], axis=1)
    return given


class Operator:
    def __init__(self, case: Case, given: dict[str, Array], library: Path, threads: int = 1) -> None:
        names = [name if name in given else "" for name in INPUTS]
        while not names[-1]:
            names.pop()
        outputs = ["output", *(["k_cache_out", "v_cache_out"] if case.appends else [])]
        more = {"packed": int(case.packed), "rotary": case.rotary[0]}
        node = helper.make_node(
            "UnpaddedAttention", names, outputs, domain="specexport", **unpadded_cases.attributes(case), **more
        )
        values = {name: (helper.np_dtype_to_tensor_dtype(a.dtype), a.ndim) for name, a in given.items()}
        kinds = dict.fromkeys(outputs, values["k_cache"][0]) | {"output": TensorProto.FLOAT}
        model = linear_cases.model_of([node], values, {}, kinds)
        self.session = linear_cases.opened(str(library), model.SerializeToString(), threads)
        self.outputs = outputs

    def copied(self, given: dict[str, Array]) -> list[Array]:
        found: list[Array] = self.session.run(None, given)
        return found

    def in_place(self, given: dict[str, Array]) -> Array:
        io = self.session.io_binding()
        io.bind_output("output")
        for name, array in given.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            io.bind_ortvalue_input(name, value)
            if f"{name}_out" in self.outputs:
                io.bind_ortvalue_output(f"{name}_out", value)
        self.session.run_with_iobinding(io)
        found: Array = io.get_outputs()[0].numpy()
        return found


def rotated(vectors: Array, at: Array, given: dict[str, Array], kind: str) -> Array:
    """[T, heads, D] in float64, turned by the tables' rows ``at`` [T]."""
    cos, sin = (given[name].astype(np.float64)[at][:, None] for name in ("cos_table", "sin_table"))
    half = cos.shape[-1]
    out = vectors.astype(np.float64)
    first, second = (slice(0, half), slice(half, 2 * half))
    if kind == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = vectors[..., first].astype(np.float64), vectors[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def expected(case: Case, given: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Output and caches by the reference, in float64; int8 caches as codes."""
    args = dict(given)
    if case.packed:
        widths = np.cumsum([case.heads * case.k_dim, case.kv_heads * case.k_dim])
        args["q"], args["k"], args["v"] = np.split(args["q"], widths, axis=1)
    if case.rotary[0]:
        past = given["kv_lens"][:, 0]
        counts = np.diff(given["cu_new_tokens"])
        at = np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)])
        for name, heads in (("q", case.heads), ("k", case.kv_heads)):
            split = args[name].reshape(len(at), heads, case.k_dim)
            args[name] = rotated(split, at, given, case.rotary[0]).reshape(len(at), -1)
    scales = {}
    for name in "kv" if case.int8 else "":
        cache = args[f"{name}_cache"]
        scales[name] = given[f"{name}_scale"].astype(np.float64).reshape(1, 1, case.kv_heads, 1, -1)
        args[f"{name}_cache"] = cache * scales[name]
        if case.appends:
            flat = given[f"{name}_scale"].astype(np.float64)
            args[name] = np.clip(np.round(args[name] / flat), -128, 127) * flat
    for name in ("cos_table", "sin_table", "k_scale", "v_scale"):
        args.pop(name, None)
    with np.errstate(invalid="ignore"):
        output, keys, values = unpadded_attention(**({"k": None, "v": None} | args), **unpadded_cases.attributes(case))
    if case.int8:
        keys, values = np.round(keys / scales["k"]), np.round(values / scales["v"])
    return output, keys, values

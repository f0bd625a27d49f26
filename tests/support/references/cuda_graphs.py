"""Graphs for ONNX Runtime on CUDA, run on a GPU or by reference."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from specexport.ops.reference import unpadded_attention
from specexport_runtime.executors.paged import BLOCK_ENTRIES, paged_head_size, spread_tokens
from tests.support.fakes.fake_onnxruntime import FakeBinding, view

ROWS_BLOCKS = 2


class PagedAttention(OpRun):
    """The operator, from its schema; what it would refuse fails here."""

    op_domain = "com.microsoft"

    def _run(self, query, key, value, key_cache, value_cache, cu, past, table, *rest, **attributes):
        cos, sin, slots, sinks, q_norm, k_norm, k_scale, v_scale, metadata = rest
        assert all(x is None for x in (slots, k_scale, v_scale))
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        assert (key is None) == (value is None)
        if key is None:
            size = query.shape[1] // (heads + 2 * kv_heads)
            assert query.shape[1] == size * (heads + 2 * kv_heads)
            query, key, value = np.split(query, [size * heads, size * (heads + kv_heads)], axis=1)
        size = query.shape[1] // heads
        block = key_cache.shape[1]
        assert size % 8 == 0
        assert size <= 256
        assert block >= 16
        assert block & (block - 1) == 0
        assert key_cache.shape == value_cache.shape == (len(key_cache), block, kv_heads, size)
        assert key.shape == value.shape == (len(query), kv_heads * size)
        assert past.shape == (len(cu) - 1,)
        assert {x.dtype for x in (cu, past, table, metadata)} == {np.dtype(np.int32)}
        assert table.shape[0] == len(past)
        counts = np.diff(cu)
        assert cu[0] == 0
        assert cu[-1] == len(query)
        assert (counts >= 0).all()
        assert metadata[0] >= counts.max()
        assert metadata[2] <= (past + counts).max() <= metadata[1] <= table.shape[1] * block
        assert attributes["scale"] != 0, "0 means 1/sqrt(size of the padded head)"
        assert bool(attributes.get("do_rotary")) == (cos is not None) == (sin is not None)
        assert (q_norm is None) == (k_norm is None)
        at = np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)])
        query, key = (
            _prepared(x.reshape(len(x), -1, size), norm, cos, sin, at, attributes).reshape(len(x), -1)
            for x, norm in ((query, q_norm), (key, k_norm))
        )
        keys, values = key_cache.copy(), value_cache.copy()
        entries = table[np.repeat(np.arange(len(past)), counts), at // block], at % block
        for cache, new in ((keys, key), (values, value)):
            cache[entries] = new.reshape(-1, kv_heads, size)
        held = (cache[table].reshape(len(past), 1, -1, kv_heads, size).swapaxes(2, 3) for cache in (keys, values))
        output, _, _ = unpadded_attention(
            query, None, None, *held, (past + counts)[:, None], cu, sinks, num_heads=heads, kv_num_heads=kv_heads,
            scale=attributes["scale"], window=attributes["local_window_size"], softcap=attributes["softcap"],
        )  # fmt: skip
        return output.astype(query.dtype), keys, values


def _prepared(x: Any, norm: Any, cos: Any, sin: Any, at: np.ndarray, attributes: dict[str, Any]) -> Any:
    """Heads [T, H, D] as attention gets them: normalized in float32, then rotated in their own type."""
    if norm is not None:
        assert norm.shape == x.shape[2:]
        assert norm.dtype == x.dtype
        whole = x.astype(np.float32)
        root = np.sqrt(np.mean(whole**2, axis=-1, keepdims=True) + attributes["qk_norm_epsilon"])
        x = (whole / root * norm.astype(np.float32)).astype(x.dtype)
    if cos is None:
        return x
    width, size = cos.shape[1], x.shape[2]
    assert size % 16 == 0
    assert width % 8 == 0
    assert 2 * width <= size
    assert cos.shape == sin.shape
    assert cos.dtype == sin.dtype == x.dtype
    assert len(at) == 0 or at.max() < len(cos), "the kernel reads what lies after its tables"
    turned, (cos, sin) = x.copy(), (table[at][:, None] for table in (cos, sin))
    pairs = (slice(0, width), slice(width, 2 * width))
    if attributes["rotary_interleaved"]:
        pairs = (slice(0, 2 * width, 2), slice(1, 2 * width, 2))
    first, second = (x[..., place] for place in pairs)
    turned[..., pairs[0]], turned[..., pairs[1]] = first * cos - second * sin, second * cos + first * sin
    return turned


NONE = np.zeros(0, np.float32)


class SkipLayerNormalization(OpRun):
    """The operator, from its schema, with sums in float32."""

    op_domain = "com.microsoft"

    def _run(self, x, skip, gamma, beta=None, **attributes):
        assert x.shape == skip.shape
        assert x.dtype == skip.dtype == gamma.dtype
        total = x.astype(np.float32) + skip.astype(np.float32)
        centered = total if beta is None else total - total.mean(axis=-1, keepdims=True)
        root = np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + attributes["epsilon"])
        normed = (centered / root * gamma.astype(np.float32) + (0 if beta is None else beta)).astype(x.dtype)
        return normed, NONE, NONE, total.astype(x.dtype)


class SkipSimplifiedLayerNormalization(SkipLayerNormalization):
    """The same without means and bias."""


class MatMulNBits(OpRun):
    """The operator with weights of 4 bits and no zero points, from its schema."""

    op_domain = "com.microsoft"

    def _run(self, a, b, scales, **attributes):
        width, block = attributes["N"], attributes["block_size"]
        blocks = -(-attributes["K"] // block)
        assert attributes["bits"] == 4
        assert b.dtype == np.uint8
        assert b.shape == (width, blocks, block // 2)
        assert scales.dtype == a.dtype
        assert scales.shape == (width * blocks,)
        codes = np.stack([b & 15, b >> 4], axis=-1).reshape(width, blocks, block).astype(np.float32)
        values = ((codes - 8) * scales.astype(np.float32).reshape(width, blocks, 1)).reshape(width, -1)
        product = a.astype(np.float32) @ values[:, : attributes["K"]].T
        return (product.astype(a.dtype),)


def evaluator_of(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Of a paged graph. Outputs get names: the evaluator takes those without one for what absent inputs are."""
    for node in model.graph.node:
        for at, name in enumerate(node.output):
            node.output[at] = name or f"{node.name}.{at}"
    own = [PagedAttention, MatMulNBits, SkipSimplifiedLayerNormalization, SkipLayerNormalization]
    return ReferenceEvaluator(model, new_ops=own)


class PagedEngine:
    """A lowered graph with an arena of scattered blocks, poisoned where nothing was written."""

    def __init__(self, model: onnx.ModelProto, layers: Any, num_rows: int) -> None:
        self.evaluator = evaluator_of(model)
        self.table = np.random.default_rng(5).permutation(num_rows * ROWS_BLOCKS).astype(np.int32).reshape(num_rows, -1)
        self.caches = {
            f"{kind}_cache.{i}": np.full(
                (self.table.size, BLOCK_ENTRIES, layer.kv_heads, paged_head_size(layer)), np.nan, np.float32
            )
            for i, layer in enumerate(layers)
            for kind in "kv"
        }

    def run(
        self, step: dict[str, np.ndarray], first_row: int = 0, *, row_for_each: bool = False
    ) -> dict[str, np.ndarray]:
        rows = np.arange(len(step["kv_lens"]))
        if row_for_each:
            rows, kv_lens, cu_new_tokens = spread_tokens(SimpleNamespace(**step))  # type: ignore[arg-type]
            step = step | {"kv_lens": kv_lens, "cu_new_tokens": cu_new_tokens}
        counts = np.diff(step["cu_new_tokens"])
        longest = int((step["kv_lens"][:, 0] + counts).max())
        given = step | self.caches
        given["block_table"] = self.table[first_row + rows]
        given["attention_metadata"] = np.array([counts.max(), longest, longest], np.int32)
        names = [name for name in self.evaluator.input_names if name in given]
        results = self.evaluator.run(None, {name: given[name] for name in names})
        outputs = dict(zip(self.evaluator.output_names, results, strict=True))
        self.caches = {name: outputs[name.replace("_cache.", "_cache_out.")] for name in self.caches}
        return outputs


class ReferenceSession:
    """Runs an engine file by the reference evaluator, on the memory that a binding names."""

    def __init__(self, path: str) -> None:
        model = onnx.load(path)
        self.evaluator = evaluator_of(model)
        values = (*model.graph.input, *model.graph.output)
        types = {value.name: value.type.tensor_type.elem_type for value in values}
        sizes = {value.name: value.type.tensor_type.shape.dim for value in values}
        self.shapes = {name: [dim.dim_param or dim.dim_value for dim in dims] for name, dims in sizes.items()}
        self.dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items()}

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name, shape=self.shapes[name]) for name in self.evaluator.input_names]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name, shape=self.shapes[name]) for name in self.evaluator.output_names]

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider"]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        given = {name: view(bound, self.dtypes[name]) for name, bound in binding.inputs.items()}
        results = self.evaluator.run(None, given)
        for name, result in zip(self.evaluator.output_names, results, strict=True):
            assert result.dtype == self.dtypes[name]
            view(binding.outputs[name], self.dtypes[name])[...] = result


def gpu_or_skip() -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.uint8, "cuda", 0)
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")

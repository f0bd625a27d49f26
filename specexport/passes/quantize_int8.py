"""Linear layers in int8: weights per output channel, activations per token."""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, Together, constant, lazy_weight
from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import CountingPass, sizes_of
from specexport.passes.quantize_graph import put_in_place
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites, head_sites
from specexport_runtime.abi import INPUT_IDS, LOGIT_ROWS

ZERO_POINT = 128
LARGEST = 127
_FLOAT = ir.DataType.FLOAT


class Int8QuantizePass(CountingPass):
    """Multiply int8 weights by int8 activations, exactly, in int32.

    1. Weights are symmetric, one scale an output channel: ``largest |w| / 127``. They are computed lazily, one weight
       at a time, when the engine is written.
    2. Activations are symmetric, **one scale a token**: ``largest |x| / 127``. A scale over the step, as of ONNX
       Runtime's own dynamic quantization, would make a token's logits depend on the other tokens of the step, and
       speculative text differ from plain text. They are stored as uint8 with zero point 128, because ONNX Runtime's
       kernels for signed activations are some thirty times slower. Layers that read one tensor share its quantization.
    3. The product is ``MatMulInteger``; its int32 sums times the token's scale, times the channel's scale, plus the
       bias in float32. The fused ``MatMulIntegerToFloat`` has no scale a token and is slower for one token.

    A row of zeros has scale 0 and gives zeros (whatever integers stand for 0/0 there are multiplied by 0). Norms,
    attention and whatever is no product with a constant matrix stay float32. Counts the layers.

    Args:
        lm_head: quantize the LM head too.
        others: quantize the other linear layers; False leaves them to another pass, and only the LM head is taken.
    """

    name = "int8-quantize"
    reason = "decoding reads every weight for every token: a quarter of the bytes, and integer sums are exact"

    def __init__(self, *, lm_head: bool, others: bool = True) -> None:
        self._lm_head, self._others = lm_head, others

    def rewrite(self, model: ir.Model) -> int:
        """Quantize the linear layers.

        Raises:
            UnsupportedModelError: a layer's weights cannot be int8.
        """
        sites = find_sites(model, "int8", lm_head=self._lm_head) if self._others else head_sites(model)
        rows = _RowQuantizer(model.graph)
        for site in sites:
            _replace(model.graph, site, *rows.quantize(site))
        return len(sites)


class _RowQuantizer:
    """Quantizes activations row by row, each tensor once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._done: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._zeros: dict[tuple[Any, ...], ir.Value] = {}

    def quantize(self, site: LinearSite) -> tuple[ir.Value, ir.Value]:
        """uint8 [..., K] and float32 scales [..., 1] of what the layer reads."""
        source = site.source
        if source not in self._done:
            self._done[source] = self._emit(site)
        return self._done[source]

    def _emit(self, site: LinearSite) -> tuple[ir.Value, ir.Value]:
        graph, source = self._graph, site.source
        emit = Emitter(graph)
        dims = None if source.shape is None else list(source.shape)
        rows = None if dims is None else [*dims[:-1], 1]
        last = constant(graph, "int8.last_axis", np.array([-1], np.int64))
        step = constant(graph, "int8.step", np.array(1 / LARGEST, np.float32))
        magnitude = emit.op("Abs", source, dtype=_FLOAT, shape=dims)
        largest = emit.op("ReduceMax", magnitude, last, shape=rows, keepdims=1)
        zero = self._zero_point(rows)
        if zero is None:  # there may be no rows at all, and ONNX Runtime's ReduceMax of none keeps every column
            one = constant(graph, "int8.size_1", np.array([1], np.int64))
            shape = emit.op("Concat", emit.op("Shape", source, end=-1), one, axis=0)
            largest = emit.op("Reshape", largest, shape, shape=rows)
            zero = self._expanded(emit, shape, rows)
        scale = emit.op("Mul", largest, step, shape=rows)
        emit.place(before=site.node)
        # One block a row: the blocked form takes the scales as they are, where one axis would want them flattened.
        axis = -1 if dims is None else len(dims) - 1
        uint8 = ir.DataType.UINT8
        quantized = emit.op(
            "QuantizeLinear", source, scale, zero, dtype=uint8, shape=dims, axis=axis, block_size=site.depth
        )
        emit.place(before=site.node)
        return quantized, scale

    def _zero_point(self, rows: list[Any] | None) -> ir.Value | None:
        """Zero points of shape ``rows``, made once a step from the graph's inputs; None if they do not tell it."""
        if rows is None:
            return None
        key = tuple(size if isinstance(size, int) else str(size.value) for size in rows)
        if key not in self._zeros:
            emit = Emitter(self._graph)
            parts = [self._size(emit, size) for size in key]
            if not all(part is not None for part in parts):
                return None
            shape = emit.op("Concat", *parts, shape=[len(parts)], axis=0)
            self._zeros[key] = self._expanded(emit, shape, rows)
            emit.place(before=self._graph[0])
        return self._zeros[key]

    def _size(self, emit: Emitter, size: int | str) -> ir.Value | None:
        if isinstance(size, int):
            return constant(self._graph, f"int8.size_{size}", np.array([size], np.int64))
        name = {DIM_NAMES["T"]: INPUT_IDS.name, DIM_NAMES["R"]: LOGIT_ROWS.name}.get(size)
        source = next((value for value in self._graph.inputs if value.name == name), None)
        return None if source is None else emit.op("Shape", source, shape=[1])

    def _expanded(self, emit: Emitter, shape: ir.Value, rows: list[Any] | None) -> ir.Value:
        return emit.op("Expand", _zero(self._graph), shape, shape=rows)


def _zero(graph: ir.Graph) -> ir.Value:
    return constant(graph, "int8.zero_point", np.array(ZERO_POINT, np.uint8))


def _replace(graph: ir.Graph, site: LinearSite, source: ir.Value, row_scale: ir.Value) -> None:
    name = int8_name(str(site.weight.name))
    made = Together(partial(_quantized, site.tensor, site.turned))
    weight = lazy_weight(graph, name, ir.DataType.INT8, [site.depth, site.width], partial(made.part, 0))
    scales = lazy_weight(graph, f"{name}_scale", _FLOAT, [site.width], partial(made.part, 1))
    emit, shape = Emitter(graph), site.node.outputs[0].shape
    total = emit.op("MatMulInteger", source, weight, _zero(graph), dtype=ir.DataType.INT32, shape=shape)
    result = emit.op("Cast", total, dtype=_FLOAT, shape=shape, to=_FLOAT)
    result = emit.op("Mul", result, row_scale, shape=shape)
    result = emit.op("Mul", result, scales, shape=shape)
    put_in_place(emit, site, result)


def int8_name(name: str) -> str:
    """The name of a weight's int8 form, [K, N]; that of its scales ends with ``_scale``."""
    return f"{name}.int8"


def quantized_rows(tensor: ir.TensorProtocol) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes [N, K] of a weight [N, K], and their scales, float32 [N]."""
    codes = np.empty(sizes_of(tensor), np.int8)
    return codes, _code_into(codes, tensor, turned=True)


def _quantized(tensor: ir.TensorProtocol, turned: bool) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes [K, N] of a weight, which is [N, K] if it is ``turned``, and their scales, float32 [N]."""
    sizes = sizes_of(tensor)
    codes = np.empty(sizes[::-1] if turned else sizes, np.int8)
    return codes, _code_into(codes.T, tensor, turned)


def _code_into(codes: np.ndarray, tensor: ir.TensorProtocol, turned: bool) -> np.ndarray:
    """Write codes [N, K]; returns the scales: the largest magnitude of each output over 127, 1 for one of zeros."""
    scales, start = np.empty(len(codes), np.float32), 0
    for channels in channel_parts(tensor, turned):
        some = slice(start, start + len(channels))
        largest = np.maximum(channels.max(axis=1), -channels.min(axis=1)).astype(np.float32)
        scales[some] = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
        codes[some] = np.clip(np.rint(channels / scales[some, None]), -LARGEST, LARGEST)
        start += len(channels)
    return scales

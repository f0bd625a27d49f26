"""Two graphs and a step on disk, as polygraphy's command line takes them over: without our own operators.

Other programs do not have the library of these, so standard ones take their place. What depends on the step alone
(positions, lengths, what a token sees) is a constant then: a saved graph is for the saved step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.atomic import new_folder
from specexport.debug.capture import CapturedStep, Feeds
from specexport.debug.graph import EngineGraph, values_by_name
from specexport.lowering.fuse import remove_dead_nodes
from specexport.lowering.ort_cpu import INPUTS
from specexport.onnx_emit import Emitter, lazy_weight
from specexport.ops.spec import EACH
from specexport.passes.base import find_constant
from specexport.passes.block_format import unpack
from specexport.passes.experts_graph import BLOCK_EXPERTS
from specexport_runtime.abi import CU_NEW_TOKENS, KV_LENS, KV_POSITIONS, OP_DOMAIN, OP_NAME, POSITIONS

MODEL, WEIGHTS, STEP = "model.onnx", "model.onnx.data", "inputs.json"

_HIDDEN = -1e30


def save_graphs(folder: Path, graphs: Mapping[str, tuple[EngineGraph, Sequence[str]]], step: CapturedStep) -> None:
    """Write a subfolder for each graph: the model in standard operators, its weights, and the inputs of the step."""
    import onnx_ir.passes.common as common_passes
    from polygraphy.json import save_json

    with new_folder(folder) as made:
        for name, (graph, outputs) in graphs.items():
            plain = graph._replace(model=with_plain_operators(graph.model, step.feeds))
            values = values_by_name(plain.model)
            plain.model.graph.outputs[:] = [values[output] for output in outputs]
            remove_dead_nodes(plain.model)
            common_passes.RemoveUnusedNodesPass()(plain.model)
            common_passes.InlinePass()(plain.model)  # polygraphy's graph surgery does not keep functions apart
            place = made / name
            place.mkdir()
            ir.save(plain.model, place / MODEL, external_data=WEIGHTS)
            save_json([step.feeds_of(plain.inputs())], str(place / STEP))


def with_plain_operators(model: ir.Model, feeds: Feeds) -> ir.Model:
    """A copy of an ONNX Runtime CPU graph in standard operators, for one step's feeds, that gives no caches."""
    copy = model.clone()
    for node in [node for node in copy.graph if node.domain == OP_DOMAIN and node.op_type in _OF_BLOCKS]:
        emit = Emitter(copy.graph)
        emit.replace(node, [_OF_BLOCKS[node.op_type](node, emit)])
    for node in [node for node in copy.graph if (node.domain, node.op_type) == (OP_DOMAIN, OP_NAME)]:
        emit = Emitter(copy.graph)
        plain = _Attention(node, feeds, emit).output()
        for cache in node.outputs[1:]:
            if cache.is_graph_output():
                copy.graph.outputs.remove(cache)
        old = node.outputs[0]
        plain.type, plain.shape = old.type, old.shape
        emit.place(before=node)
        ir.convenience.replace_all_uses_with(old, plain, replace_graph_outputs=True)
        copy.graph.remove(node, safe=True)
        plain.name, old.name = old.name, None
    return copy


def _linear(node: ir.Node, emit: Emitter) -> ir.Value:
    source, packed, *bias = node.inputs
    product = emit.op("MatMul", source, _emit_weight(packed, node, emit, turned=False))
    return emit.op("Add", product, bias[0]) if bias and bias[0] is not None else product


def _embedding(node: ir.Node, emit: Emitter) -> ir.Value:
    ids, packed = node.inputs
    table = _emit_weight(packed, node, emit, turned=True)
    return emit.op("Gather", table, ids, axis=0, dtype=ir.DataType.FLOAT)


def _experts(node: ir.Node, emit: Emitter) -> ir.Value:
    """All experts of all tokens, weighted by 0 where a token has not chosen one."""
    x, ids, shares, *_ = node.inputs
    attrs: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
    both = _of_each(node, emit, "gate_up", x)
    if attrs["interleaved"] == EACH:
        gate, up = both, both
    elif attrs["interleaved"]:
        last, two = emit.const([-1]), emit.const([2])
        ends = emit.const([2 * attrs["I"]])
        gate, up = (emit.op("Slice", both, emit.const([at]), ends, last, two) for at in (0, 1))
    else:
        gate, up = emit.node("Split", [both], {"axis": -1, "num_outputs": 2}, outputs=2).outputs
    if attrs["limit"] > 0:
        low, high = (emit.const(sign * attrs["limit"], "float32") for sign in (-1, 1))
        gate, up = emit.op("Min", gate, high), emit.op("Clip", up, low, high)
    sigmoid = emit.op("Sigmoid", emit.op("Mul", gate, emit.const(attrs["alpha"], "float32")))
    gated = emit.op("Mul", emit.op("Mul", gate, sigmoid), emit.op("Add", up, emit.const(attrs["beta"], "float32")))
    given = _of_each(node, emit, "down", gated)  # [E, T, H]
    chosen = emit.op("OneHot", ids, emit.const(attrs["E"]), emit.const([0.0, 1.0], "float32"), dtype=ir.DataType.FLOAT)
    weighted = emit.op("Mul", chosen, emit.op("Unsqueeze", shares, emit.const([2])))
    of_tokens = emit.op("Transpose", emit.op("ReduceSum", weighted, emit.const([1]), keepdims=0), perm=[1, 0])
    parts = emit.op("Mul", given, emit.op("Unsqueeze", of_tokens, emit.const([2])))
    return emit.op("ReduceSum", parts, emit.const([0]), keepdims=0)


def _of_each(node: ir.Node, emit: Emitter, name: str, source: "ir.Value | None") -> ir.Value:
    """The products of each expert's matrix, [E, T, N]."""
    at = {"gate_up": 3, "down": 5}[name]
    bias = node.inputs[at + 1] if len(node.inputs) > at + 1 else None
    attrs = {key: node.attributes[key].as_int() for key in ("E", "H", "I", "interleaved")}
    outputs = attrs["I"] if attrs["interleaved"] == EACH else 2 * attrs["I"]
    shape = (outputs, attrs["H"]) if name == "gate_up" else (attrs["H"], attrs["I"])
    kind = node.attributes[f"{name}_format"].as_string()
    product = emit.op("MatMul", source, _floats(node.inputs[at], kind, shape, emit, turned=False, times=attrs["E"]))
    return product if bias is None else emit.op("Add", product, emit.op("Unsqueeze", bias, emit.const([1])))


_OF_BLOCKS = {"BlockLinear": _linear, "BlockEmbedding": _embedding, BLOCK_EXPERTS: _experts}


def _emit_weight(packed: "ir.Value | None", node: ir.Node, emit: Emitter, *, turned: bool) -> ir.Value:
    shape = node.attributes["N"].as_int(), node.attributes["K"].as_int()
    return _floats(packed, node.attributes["format"].as_string(), shape, emit, turned=turned)


def _floats(
    packed: "ir.Value | None", kind: str, shape: tuple[int, int], emit: Emitter, *, turned: bool, times: int = 0
) -> ir.Value:
    """A packed weight as float32, [N, K] if it is ``turned``, else [K, N]; of so many experts [E, K, N]."""
    tensor, (n, k) = find_constant(packed), shape
    assert tensor is not None  # noqa: S101 - engines have constant weights

    def make() -> npt.NDArray[np.float32]:
        each = [unpack(kind, part, n, k) for part in np.split(tensor.numpy(), max(1, times))]
        values = np.stack(each) if times else each[0]
        return values if turned else np.ascontiguousarray(values.swapaxes(-1, -2))

    name = f"{tensor.name}.{'rows' if turned else 'columns'}"
    sizes = [*([times] if times else []), *([n, k] if turned else [k, n])]
    return lazy_weight(emit.graph, name, ir.DataType.FLOAT, sizes, make)


class _Attention:
    """One node of our attention operator, in a step of one sequence."""

    def __init__(self, node: ir.Node, feeds: Feeds, emit: Emitter) -> None:
        self.given = dict(zip(INPUTS, node.inputs, strict=False))
        self.attrs: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
        self.feeds, self.emit = feeds, emit
        self.heads, self.kv_heads = self.attrs["num_heads"], self.attrs["kv_num_heads"]
        self.dims = [feeds[str(self._value(f"{part}_cache").name)].shape[-1] for part in "kv"]
        self.appends = bool(self.attrs["packed"]) or self.given["k"] is not None
        self.count, held = int(feeds[CU_NEW_TOKENS.name][-1]), int(feeds[KV_LENS.name][0, 0])
        self.past = held if self.appends else max(held - self.count, 0)  # the step's tokens are entries [past, end)
        self.end = self.past + self.count

    def output(self) -> ir.Value:
        """[T, Hq*Dv] of all tokens."""
        emit, count = self.emit, self.count
        parts = [self.given[name] for name in "qkv"]
        if self.attrs["packed"]:
            sizes = [self.heads * self.dims[0], self.kv_heads * self.dims[0], self.kv_heads * self.dims[1]]
            flat = emit.reshape(self._value("q"), [-1, sum(sizes)])
            parts = list(emit.node("Split", [flat, emit.const(sizes)], {"axis": 1}, outputs=3).outputs)
        q = self._tokens(parts[0], self.heads, self.dims[0], rotated=True)
        keys, values = (self._entries(name, part) for name, part in zip("kv", parts[1:], strict=True))
        stacked = emit.reshape(q, [self.kv_heads, -1, self.dims[0]])
        scores = emit.op("MatMul", stacked, emit.op("Transpose", keys, perm=[0, 2, 1]))
        scores = emit.op("Mul", emit.reshape(scores, [self.heads, count, self.end]), self._float(self.attrs["scale"]))
        if cap := self.attrs["softcap"]:
            scores = emit.op("Mul", emit.op("Tanh", emit.op("Div", scores, self._float(cap))), self._float(cap))
        distance = self._distances()
        if self.given.get("slopes") is not None:
            slopes = emit.reshape(self._value("slopes"), [-1, 1, 1])
            scores = emit.op("Add", scores, emit.op("Mul", slopes, emit.const(distance, "float32")))
        scores = emit.op("Add", scores, emit.const(np.where(self._make_mask(distance), 0, _HIDDEN), "float32"))
        if self.given.get("sinks") is not None:
            sinks = emit.reshape(self._value("sinks"), [-1, 1, 1])
            column = emit.op("Expand", sinks, emit.const([self.heads, count, 1]))
            scores = emit.op("Concat", scores, column, axis=2)
        weights = self._slice(emit.op("Softmax", scores, axis=-1), [0], [self.end], [2])
        mixed = emit.op("MatMul", emit.reshape(weights, [self.kv_heads, -1, self.end]), values)
        by_head = emit.reshape(mixed, [self.heads, count, self.dims[1]])
        return emit.reshape(emit.op("Transpose", by_head, perm=[1, 0, 2]), [count, self.heads * self.dims[1]])

    def _value(self, name: str) -> ir.Value:
        value = self.given.get(name)
        assert value is not None  # noqa: S101 - the lowering put it there
        return value

    def _tokens(self, part: "ir.Value | None", heads: int, dim: int, *, rotated: bool) -> ir.Value:
        """[heads, n, dim] of the step's tokens."""
        emit = self.emit
        assert part is not None  # noqa: S101 - the lowering put it there
        turned = emit.op("Transpose", emit.reshape(part, [self.count, heads, dim]), perm=[1, 0, 2])
        if not rotated or not self.attrs["rotary"]:
            return turned
        cos, sin = self._value("cos_table"), self._value("sin_table")
        size = 2 * int(cos.shape[1])  # type: ignore[index,arg-type]
        at = emit.const(np.arange(self.past, self.end)[None])
        kind: dict[str, Any] = {"interleaved": int(self.attrs["rotary"] == "interleaved"), "rotary_embedding_dim": size}
        whole = emit.reshape(turned, [1, heads, -1, dim])
        return emit.reshape(emit.op("RotaryEmbedding", whole, cos, sin, at, **kind), [heads, -1, dim])

    def _entries(self, name: str, part: "ir.Value | None") -> ir.Value:
        """[H, end, dim] of the keys or values, this step's among them."""
        emit, dim = self.emit, self.dims["kv".index(name)]
        held = self.past if self.appends else self.end
        cache = self._slice(self._value(f"{name}_cache"), [0, 0], [1, held], [0, 3])
        entries = emit.cast(emit.reshape(cache, [self.kv_heads, -1, dim]), ir.DataType.FLOAT)
        new = self._tokens(part, self.kv_heads, dim, rotated=name == "k") if self.appends else None
        scale = self.given.get(f"{name}_scale")
        if scale is not None:
            scale = emit.reshape(scale, [self.kv_heads, 1, dim])
        if new is not None and scale is not None:
            codes = emit.op("Round", emit.op("Div", new, scale))
            new = emit.op("Clip", codes, self._float(-128), self._float(127))
        whole = entries if new is None else emit.op("Concat", entries, new, axis=1)
        return whole if scale is None else emit.op("Mul", whole, scale)

    def _distances(self) -> npt.NDArray[np.int64]:
        """[n, end]: how far after a token an entry is."""
        own, entries = np.arange(self.past, self.end), np.arange(self.end)
        if self.given.get("kv_positions") is not None:
            own = self.feeds[POSITIONS.name][: self.count]
            entries = self.feeds[KV_POSITIONS.name][0, 0, : self.end]
        return entries[None] - own[:, None]

    def _make_mask(self, distance: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        seen = np.ones(distance.shape, bool)
        if self.attrs["causal"]:
            seen &= distance <= 0
        if self.attrs["window"] > 0:
            seen &= distance > -self.attrs["window"]
        if self.given.get("kv_positions") is not None:
            seen &= self.feeds[KV_POSITIONS.name][0, 0, : self.end] >= 0
        return seen

    def _slice(self, value: ir.Value, starts: list[int], stops: list[int], axes: list[int]) -> ir.Value:
        return self.emit.op("Slice", value, *(self.emit.const(each) for each in (starts, stops, axes)))

    def _float(self, value: Any) -> ir.Value:
        return self.emit.const(value, "float32")

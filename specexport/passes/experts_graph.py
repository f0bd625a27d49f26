"""A layer's experts in ONNX Runtime's kernels for them: what float and quantized experts share.

The kernels choose experts themselves and sum up what they give in an order that depends on the step. So they are given
each pair of a token and an expert as a row of its own, whose one expert has all of the weight. Weights are multiplied
and sums are made outside, as the router of the model says, in an order that is always the same.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter, lazy_weight, part_of
from specexport.ops.experts import EACH, EXPERTS
from specexport.passes.base import constant_of, sizes_of
from specexport_runtime.bundle.manifest import ExpertSizes
from specexport_runtime.errors import CheckFailedError

CONTRIB = "com.microsoft"
_SIZES = "specexport.experts"


class ExpertsSite(NamedTuple):
    """One ``specexport::Experts`` with constant weights.

    Attributes:
        node: it.
        given: its inputs by name.
        num_experts: E.
        per_token: K, the experts of a token.
        depth: H, the size of a token.
        width: I, what an expert is wide inside.
    """

    node: ir.Node
    given: dict[str, ir.Value]
    num_experts: int
    per_token: int
    depth: int
    width: int

    @property
    def sizes(self) -> ExpertSizes:
        """How much of a model they are."""
        return ExpertSizes(self.num_experts * 3 * self.depth * self.width, self.per_token, self.num_experts)


def experts_sites(model: ir.Model) -> list[ExpertsSite]:
    """All of them, in graph order.

    Raises:
        CheckFailedError: the weights are not constant, or a size is not static.
    """
    nodes = (node for node in model.graph if node.domain == EXPERTS.domain and node.op_type == EXPERTS.name)
    return [_site(node) for node in nodes]


def expert_sizes(model: ir.Model) -> ExpertSizes | None:
    """How much of a model its experts are, behind the passes; None without experts.

    Of layers that differ, the one counts whose tokens take the largest share.

    Raises:
        CheckFailedError: see :func:`experts_sites`.
    """
    sizes = [*(site.sizes for site in experts_sites(model)), *_in_kernels(model)]
    if not sizes:
        return None
    busiest = max(sizes, key=lambda each: each.per_token / each.per_layer)
    return busiest._replace(parameters=sum(each.parameters for each in sizes))


def _in_kernels(model: ir.Model) -> list[ExpertSizes]:
    """Of the layers whose experts were put in a kernel."""
    return [node.meta[_SIZES] for node in model.graph if _SIZES in node.meta]


def _site(node: ir.Node) -> ExpertsSite:
    names = [item.name for item in EXPERTS.inputs]
    given = {name: value for name, value in zip(names, node.inputs, strict=False) if value is not None}
    down, ids = constant_of(given["down"]), given["expert_ids"]
    per_token = None if ids.shape is None else ids.shape[1]
    if down is None or constant_of(given["gate_up"]) is None or not isinstance(per_token, int):
        raise CheckFailedError(f"{node.name}: the weights of experts, or how many a token has, are not constant.")
    num_experts, depth, width = sizes_of(down)
    return ExpertsSite(node, given, num_experts, per_token, depth, width)


def gates_in_turn(graph: ir.Graph, site: ExpertsSite, name: str) -> ir.Value | None:
    """The input ``gate_up`` or ``gate_up_bias`` with its outputs as gate, up, gate, up …, as the kernels want them."""
    value = site.given.get(name)
    tensor, order = constant_of(value), site.node.attributes["interleaved"].as_int()
    if value is None or tensor is None or order == 1:
        return value
    turn = _each_twice if order == EACH else _in_turn
    make, part = partial(turn, tensor, 0, site.num_experts), partial(_part_in_turn, turn, tensor)
    experts, outputs, *depth = sizes_of(tensor)
    sizes = [experts, 2 * outputs if order == EACH else outputs, *depth]
    return lazy_weight(graph, f"{value.name}.in_turn", tensor.dtype, sizes, make, part)


def _part_in_turn(
    turn: Callable[[ir.TensorProtocol, int, int], np.ndarray],
    tensor: ir.TensorProtocol,
    axis: int,
    start: int,
    stop: int,
) -> np.ndarray:
    if axis == 0:
        return turn(tensor, start, stop)
    where = tuple(slice(start, stop) if at == axis else slice(None) for at in range(len(tensor.shape)))
    return turn(tensor, 0, sizes_of(tensor)[0])[where]


def _each_twice(tensor: ir.TensorProtocol, start: int, stop: int) -> np.ndarray:
    return np.repeat(part_of(tensor, 0, start, stop), 2, axis=1)


def _in_turn(tensor: ir.TensorProtocol, start: int, stop: int) -> np.ndarray:
    return in_turn(part_of(tensor, 0, start, stop))


def in_turn(both: np.ndarray) -> np.ndarray:
    """Outputs [experts, 2*I, ...] as gate, up, gate, up, of those in which all gates come first."""
    halves = both.reshape(len(both), 2, both.shape[1] // 2, *both.shape[2:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(both.shape)


def put_experts(graph: ir.Graph, site: ExpertsSite, op_type: str, weights: Seq[ir.Value | None], **kind: Any) -> None:
    """Replace a layer's experts by one kernel.

    Args:
        graph: the layer's graph.
        site: the layer.
        op_type: ``"MoE"`` or ``"QMoE"``.
        weights: the kernel's inputs behind the first two.
        **kind: more attributes of it.
    """
    x, ids, shares = (site.given[name] for name in ("x", "expert_ids", "expert_weights"))
    emit = Emitter(graph)
    every, per_token = emit.op("Unsqueeze", x, emit.const([1])), site.per_token
    every = emit.op("Expand", every, emit.const([1, per_token, 1]))
    rows = emit.reshape(every, [-1, site.depth])
    span = emit.const([0, 1], "float32")
    chosen = emit.op("OneHot", emit.reshape(ids, [-1]), emit.const(site.num_experts), span, dtype=x.dtype, axis=-1)
    gating = {name: site.node.attributes[name].as_float() for name in ("alpha", "beta", "limit")}
    attributes = {
        "k": 1,
        "normalize_routing_weights": 1,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": gating["alpha"],
        "activation_beta": gating["beta"],
        **({"swiglu_limit": gating["limit"]} if gating["limit"] > 0 else {}),
        **kind,
    }
    given = emit.op(op_type, rows, chosen, *weights, domain=CONTRIB, **attributes)
    given.producer().meta[_SIZES] = site.sizes  # type: ignore[union-attr]
    given = emit.reshape(given, [-1, per_token, site.depth])
    given = emit.op("Mul", given, emit.op("Unsqueeze", shares, emit.const([2])))
    emit.replace(site.node, [_summed(emit, site, given)])


def _summed(emit: Emitter, site: ExpertsSite, given: ir.Value) -> ir.Value:
    """What a token's experts give [T, K, H] to [T, H]; a reduction of six and more depends on T in its last bits."""
    if site.per_token > 1:
        parts = emit.node("Split", [given], {"axis": 1, "num_outputs": site.per_token}, outputs=site.per_token).outputs
        given = emit.op("Sum", *parts, dtype=site.given["x"].dtype)
    return emit.reshape(given, [-1, site.depth])


def experts_read(model: ir.Model) -> int:
    """Weights of experts, of all layers whose experts were put in a kernel, that a token reads."""
    return sum(each.parameters * each.per_token // each.per_layer for each in _in_kernels(model))

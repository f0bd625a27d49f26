"""The linear layers of a graph: what quantization replaces, and what it must refuse."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.onnx_emit import Emitter, can_slice_lazily, part_of
from specexport.passes.base import find_constant, read_sizes
from specexport.passes.experts_graph import count_expert_weights_read
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import UnsupportedModelError
from specexport_runtime.executors.base import Float32Array

BLOCK_LINEAR = "BlockLinear"
"""The operator for linear layers with weights in blocks; see ``block_linear.py``."""
_CHUNK = 1 << 22  # weight elements worked on at a time
_PRODUCTS = {"MatMul", "Gemm", "Einsum", "Conv"}
# Between a stored weight and the product that it enters.
_WEIGHT_STEPS = {"Gather", "GatherND", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Cast", "Identity"}
HOW_TO_LEAVE = "build without --quantize (for a draft: --draft-quantize), or take a model without such layers."


class LinearSite(NamedTuple):
    """A product with a constant matrix: ``source [..., K] @ weight (+ bias)``."""

    node: ir.Node  # MatMul or Gemm
    weight: ir.Value
    turned: bool  # the matrix is stored [N, K], not [K, N]
    depth: int  # K, the inputs of each output
    width: int  # N, the outputs

    @property
    def source(self) -> ir.Value:
        """What the layer reads, [..., K]."""
        return self.node.inputs[0]  # type: ignore[return-value]

    @property
    def bias(self) -> ir.Value | None:
        """Constant or computed [N] that is added; None without."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The matrix itself."""
        return self.weight.const_value  # type: ignore[return-value]

    def channels(self) -> Iterator[np.ndarray]:
        """See :func:`channel_parts`."""
        return channel_parts(self.tensor, self.turned)


def channel_parts(tensor: ir.TensorProtocol, turned: bool) -> Iterator[np.ndarray]:
    """A matrix [N, K] if ``turned``, else [K, N], by output channels: [n, K] at a time, never a whole copy."""
    axis = 0 if turned else 1
    sizes = read_sizes(tensor)
    width, depth = sizes[axis], sizes[1 - axis]
    source = tensor if can_slice_lazily(tensor) else ir.tensor(tensor.numpy())
    step = max(1, _CHUNK // depth)
    for start in range(0, width, step):
        part = part_of(source, axis, start, min(start + step, width))
        yield part if turned else part.T


def find_sites(model: ir.Model, kind: str, *, lm_head: bool, multiples: tuple[int, int] = (1, 1)) -> list[LinearSite]:
    """Every linear layer of a model, after the other passes, that an operator takes, in graph order.

    Layers count whose inputs and outputs are multiples of the two numbers ``multiples``; ``kind`` is for messages.
    UnsupportedModelError if a layer multiplies weights that are no matrix (batched experts), or there is no layer.
    """
    for node in model.graph:
        _refuse_batched(node, kind)
    sites = [site for node in model.graph if (site := match_linear_site(node)) is not None]
    if not lm_head:
        heads = head_nodes(model, {site.node for site in sites})
        sites = [site for site in sites if site.node not in heads]
    if not sites and any(node.op_type == BLOCK_LINEAR for node in model.graph):
        return []  # routers have got their weights before, and there are no others
    if not sites:
        raise UnsupportedModelError(f"{kind} was asked for, and the model has no linear layer for it.", HOW_TO_LEAVE)
    inputs, outputs = multiples
    fitting = [site for site in sites if site.depth % inputs == site.width % outputs == 0]
    if not fitting:
        raise UnsupportedModelError(
            f"{kind} was asked for, and no linear layer has a multiple of {inputs} inputs and of {outputs} outputs.",
            HOW_TO_LEAVE,
        )
    return fitting


def match_linear_site(node: ir.Node) -> LinearSite | None:
    """What a node is as a linear layer; None if it is none."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    tensor = find_constant(weight)
    if weight is None or tensor is None or len(tensor.shape) != 2 or find_constant(node.inputs[0]) is not None:
        return None
    plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if node.attributes.get_int("transA", 0) or not plain:
        return None
    turned = bool(node.attributes.get_int("transB", 0))
    first, second = read_sizes(tensor)
    return LinearSite(node, weight, turned, *((second, first) if turned else (first, second)))


def _refuse_batched(node: ir.Node, kind: str) -> None:
    if node.op_type not in _PRODUCTS:
        return
    for value in node.inputs:
        for weight in _find_stored(value):
            shape = tuple(weight.const_value.shape)  # type: ignore[union-attr]
            if sum(size != 1 for size in shape) > 2:
                raise UnsupportedModelError(
                    f"{kind} was asked for, and {weight.name} {list(shape)} is no matrix: batched expert weights (and "
                    f"convolutions) have no {kind} kernel here.",
                    HOW_TO_LEAVE,
                )


def _find_stored(value: ir.Value | None) -> Iterator[ir.Value]:
    """The initializer that ``value`` is, or is taken from."""
    while value is not None:
        if find_constant(value) is not None:
            yield value
            return
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _WEIGHT_STEPS else None


def head_sites(model: ir.Model) -> list[LinearSite]:
    """The LM head, if it is a linear layer; of several draft heads, each of theirs."""
    sites = {site.node: site for node in model.graph if (site := match_linear_site(node)) is not None}
    return [sites[head] for head in head_nodes(model, set(sites))]


def linear_share(model: ir.Model, site: LinearSite) -> float:
    """How much of the weights that a token reads one layer has, whatever has been quantized before (0 to 1)."""
    others = (node for node in model.graph if node.op_type == BLOCK_LINEAR)
    done = sum(node.attributes["K"].as_int() * node.attributes["N"].as_int() for node in others)
    left = sum(found.depth * found.width for node in model.graph if (found := match_linear_site(node)) is not None)
    return site.depth * site.width / (done + left + count_expert_weights_read(model))


def head_node(model: ir.Model, linear: set[ir.Node]) -> ir.Node | None:
    """The linear layer whose result is the logits, with nothing but elementwise nodes (or a cut) in between."""
    return next(iter(head_nodes(model, linear)), None)


def head_nodes(model: ir.Model, linear: set[ir.Node]) -> list[ir.Node]:
    """The same; where logits of several LM heads are put together, all of these."""
    found, values = [], [next((value for value in model.graph.outputs if value.name == LOGITS.name), None)]
    while values:
        value = values.pop()
        node = None if value is None else value.producer()
        if node is None:
            continue
        if node in linear:
            found.append(node)
            continue
        inputs = [x for x in node.inputs if x is not None and find_constant(x) is None]
        values += inputs[::-1] if node.op_type == "Concat" else inputs[:1]
    return found


def round_scales(scales: np.ndarray, dtype: npt.DTypeLike, steps: int) -> Float32Array:
    """Scales rounded to a dtype, as float32; UnsupportedModelError if one, for ``steps`` codes, is beyond it."""
    with np.errstate(over="ignore"):
        found: Float32Array = scales.astype(dtype).astype(np.float32)
    if not np.isfinite(found).all():
        raise make_too_large_error(np.abs(scales).max() * steps)
    return found


def make_too_large_error(weight: float) -> UnsupportedModelError:
    """What is raised for weights of up to this size."""
    return UnsupportedModelError(
        f"weights of up to {weight:.3g} are larger than quantization can store.",
        "build without --quantize (for a draft: --draft-quantize).",
    )


def replace_site(emit: Emitter, site: LinearSite, result: ir.Value) -> None:
    """Put a layer's product ``result``, which ``emit`` has emitted, and its bias in the place of the layer."""
    old = site.node.outputs[0]
    if site.bias is not None:
        result = emit.op("Add", result, site.bias)
    emit.place(before=site.node)
    name, result.shape = old.name, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    emit.graph.remove(site.node, safe=True)
    old.name = None
    result.name = name

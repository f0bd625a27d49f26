"""Experts with weights of 8 or 4 bits, and their routers with 8."""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Together, lazy_weight, part_of
from specexport.passes.base import CountingPass, constant_of, sizes_of
from specexport.passes.block_linear import of_blocks, put_linear
from specexport.passes.block_make import int8_weight
from specexport.passes.block_search import extreme_blocks
from specexport.passes.experts_graph import CONTRIB, ExpertsSite, experts_sites, gates_in_turn, put_experts
from specexport.passes.linear_pack import sources_of
from specexport.passes.quantize_graph import pack_pairs
from specexport.passes.quantize_sites import HOW_TO_LEAVE, linear_site
from specexport_runtime.errors import UnsupportedModelError

_BLOCKS = (32, 16)
_ACCURACY_LEVEL = 4


class ExpertsQuantizePass(CountingPass):
    """Multiply by experts' weights in blocks of 32 inputs, or of 16 where 32 are no divisor.

    ``com.microsoft.QMoE`` at accuracy level 4: it quantizes activations to int8 by token and block, as
    ``MatMulNBits`` does, so that no token's result depends on the others of the step. 4 bits have a scale and a zero
    point a block, 8 bits a scale.

    A router's own product gets 8 bits in blocks, however many the others have: it is small, and an error of it chooses
    another expert. It cannot stay float, because the last bits of a float product depend on the width of a step, and
    two experts may be as good as each other. Counts the layers.

    Args:
        bits: 8 or 4.
    """

    name = "experts-quantize"
    reason = "experts are most of such a model's weights, and a step reads those that its tokens chose"

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def rewrite(self, model: ir.Model) -> int:
        """Quantize every layer's experts.

        Raises:
            UnsupportedModelError: no block divides the sizes of an expert.
        """
        sites = experts_sites(model)
        for site in sites:
            quantize_router(model.graph, site)
            _replace(model.graph, site, self._bits)
        if sites:
            model.opset_imports.setdefault(CONTRIB, 1)
        return len(sites)


def quantize_router(graph: ir.Graph, site: ExpertsSite, kept: Collection[str] = ()) -> None:
    """Give the product that chooses a layer's experts 8 bits in blocks.

    Args:
        graph: the layer's graph.
        site: the layer.
        kept: weights that stay as they are, by name.
    """
    for product in sources_of(site.given["expert_ids"]):
        router = linear_site(product)
        if router is None or router.weight.name in kept:
            continue
        put_linear(graph, router, of_blocks(int8_weight(router.tensor, turned=router.turned)))


def _replace(graph: ir.Graph, site: ExpertsSite, bits: int) -> None:
    sizes = (site.depth, site.width)
    block = next((block for block in _BLOCKS if not any(size % block for size in sizes)), None)
    if block is None:
        raise UnsupportedModelError(
            f"int{bits} was asked for, and {site.given['down'].name} {[site.num_experts, *sizes]} has sizes that are "
            f"no multiples of {_BLOCKS[-1]}: there is no kernel for such experts.",
            HOW_TO_LEAVE,
        )
    first = _weights(graph, gates_in_turn(graph, site, "gate_up"), bits, block)
    last = _weights(graph, site.given["down"], bits, block)
    put_quantized(graph, site, first, last, bits=bits, block=block)


def put_quantized(
    graph: ir.Graph, site: ExpertsSite, first: Seq[ir.Value], last: Seq[ir.Value], *, bits: int, block: int
) -> None:
    """Replace a layer's experts by the kernel for quantized ones.

    Args:
        graph: the layer's graph.
        site: the layer.
        first: of what gates, with outputs in turn: codes [E, 2*I, H * bits / 8], scales [E, 2*I, H / block] and, where
            they are not the middle of the codes, zero points [E, 2*I, H / block / 2], of 4 bits.
        last: the same of ``down``.
        bits: of a code.
        block: inputs that share a scale.
    """
    biases = (gates_in_turn(graph, site, "gate_up_bias"), site.given.get("down_bias"))
    zeros = [weights[2] if len(weights) > 2 else None for weights in (first, last)]
    inputs = [*first[:2], biases[0], *last[:2], biases[1], None, None, None, *zeros]
    while inputs[-1] is None:
        inputs.pop()
    kind = {"expert_weight_bits": bits, "block_size": block, "accuracy_level": _ACCURACY_LEVEL}
    put_experts(graph, site, "QMoE", inputs, **kind)


def _weights(graph: ir.Graph, weight: ir.Value | None, bits: int, block: int) -> list[ir.Value]:
    """Codes [E, N, K * bits / 8] and scales [E, N, K / block] of weights [E, N, K]; of 4 bits zero points too."""
    tensor = constant_of(weight)
    assert weight is not None  # noqa: S101 - a site's
    assert tensor is not None  # noqa: S101
    experts, width, depth = sizes_of(tensor)
    blocks, name = depth // block, f"{weight.name}.int{bits}"
    parts = [
        (name, ir.DataType.UINT8, [experts, width, depth * bits // 8]),
        (f"{name}_scale", ir.DataType.FLOAT, [experts, width, blocks]),
        *([(f"{name}_zero", ir.DataType.UINT8, [experts, width, -(-blocks // 2)])] if bits == 4 else []),
    ]
    made = Together(partial(_parts, tensor, bits, block))
    return [
        lazy_weight(graph, part, dtype, shape, partial(made.part, index))
        for index, (part, dtype, shape) in enumerate(parts)
    ]


def _parts(tensor: ir.TensorProtocol, bits: int, block: int) -> Iterator[np.ndarray]:
    """One expert after the other, so that no float copy of all is held where the tensor gives parts."""
    experts, _, depth = sizes_of(tensor)
    source = tensor if isinstance(tensor, ir.LazyTensor) else ir.tensor(tensor.numpy())
    found = [_one(part_of(source, 0, expert, expert + 1)[0], bits, block) for expert in range(experts)]
    codes, *others = (np.stack(part) for part in zip(*found, strict=True))
    return iter((codes.reshape(experts, -1, depth * bits // 8), *others))


def _one(channels: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, ...]:
    """Codes, scales and of 4 bits zero points of one expert's weight [N, K]."""
    values = channels.astype(np.float32, copy=False).reshape(len(channels), -1, block)
    if bits == 8:
        scales = np.abs(values).max(axis=2) / np.float32(127)
        codes = np.rint(values / np.where(scales > 0, scales, np.float32(1))[..., None]) + 128
        return codes.astype(np.uint8), scales
    codes, scales, zeros = extreme_blocks(values)  # inputs are not measured
    return pack_pairs(codes), scales, pack_pairs(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))

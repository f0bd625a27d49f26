"""Linear layers with int4 weights in blocks, for memory."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.channel_ranges import FloatVector
from specexport.onnx_emit import Together, lazy_weight
from specexport.passes.base import CountingPass
from specexport.passes.block_search import extreme_blocks, search_blocks
from specexport.passes.input_note import inputs_of
from specexport.passes.quantize_graph import CONTRIB, pack_pairs, put_nbits
from specexport.passes.quantize_sites import LinearSite, channel_parts, find_sites, head_sites, linear_share

BLOCK = 32
HEAD_SHARE = 0.3
"""Of the weights that a step reads: a larger LM head gets 4 bits too. 8 make a step read up to 1.17 times as much."""
ACCURACY_LEVEL = 4


class Int4QuantizePass(CountingPass):
    """Multiply by weights of 4 bits, in blocks of 32 inputs with a scale and a zero point each.

    ``com.microsoft.MatMulNBits`` at accuracy level 4: it quantizes activations to int8 itself, block by block of each
    token, so that no token's result depends on the others of the step; every other level expands the weights to
    float32 in steps of several tokens, which costs several times a step of one. Zero points lose less than a symmetric
    code; where inputs were measured, scales and zero points are searched for (``block_search.py``). An LM
    head that is a small part of the model is left for 8 bits: four cost most of all there. Counts the layers.

    Args:
        lm_head: quantize the LM head too, if it is a large part.
    """

    name = "int4-quantize"
    reason = "memory: an eighth of the bytes, and a scale and a zero point for every 32 of them"

    def __init__(self, *, lm_head: bool) -> None:
        self._lm_head = lm_head

    def rewrite(self, model: ir.Model) -> int:
        """Quantize the linear layers.

        Raises:
            UnsupportedModelError: a layer's weights cannot be int4.
        """
        sites = find_sites(model, "int4", lm_head=self._lm_head and _has_large_head(model))
        for site in sites:
            _replace(model.graph, site)
        model.opset_imports.setdefault(CONTRIB, 1)
        return len(sites)


def _has_large_head(model: ir.Model) -> bool:
    shares = [linear_share(model, site) for site in head_sites(model)]
    return sum(shares) > HEAD_SHARE


def _replace(graph: ir.Graph, site: LinearSite) -> None:
    blocks = -(-site.depth // BLOCK)
    name = f"{site.weight.name}.int4"
    made = Together(partial(_parts, site))
    parts = [
        (name, ir.DataType.UINT8, [site.width, blocks, BLOCK // 2]),
        (f"{name}_scale", ir.DataType.FLOAT, [site.width * blocks]),
        (f"{name}_zero", ir.DataType.UINT8, [site.width * -(-blocks // 2)]),
    ]
    weights = [
        lazy_weight(graph, part, dtype, shape, partial(made.part, index))
        for index, (part, dtype, shape) in enumerate(parts)
    ]
    put_nbits(graph, site, weights, block=BLOCK, accuracy_level=ACCURACY_LEVEL)


def _parts(site: LinearSite) -> Iterator[np.ndarray]:
    """The codes [N, blocks, 16] of a layer's weight, and flat its scales and its packed zero points."""
    inputs = inputs_of(site)
    importance = None if inputs is None else inputs.squares
    parts = (quantize_blocks(part, importance=importance) for part in channel_parts(site.tensor, site.turned))
    codes, scales, zeros = map(np.concatenate, zip(*parts, strict=True))
    return iter((codes, scales.reshape(-1), zeros.reshape(-1)))


def quantize_blocks(
    channels: np.ndarray, block: int = BLOCK, importance: FloatVector | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of a float matrix, block by block: ``value = (code - zero) * scale``.

    Args:
        channels: [N, K]; K is filled up to whole blocks with zeros.
        block: inputs that share a scale and a zero point.
        importance: of each input, float32 [K]: scales and zero points are searched for. None takes a block's extremes.

    Returns:
        codes, two to a byte, the first in the low half: uint8 [N, blocks, block / 2]; float32 scales [N, blocks]; zero
        points, two to a byte: uint8 [N, ceil(blocks / 2)].
    """
    width, depth = channels.shape
    blocks = -(-depth // block)
    values = np.zeros((width, blocks * block), np.float32)
    values[:, :depth] = channels
    values = values.reshape(width, blocks, block)
    if importance is None:
        codes, scales, zeros = extreme_blocks(values)
    else:
        weights = np.zeros(blocks * block, np.float32)
        weights[:depth] = importance
        codes, scales, zeros = search_blocks(values, weights.reshape(blocks, block))
    padded = np.zeros((width, -(-blocks // 2) * 2), np.uint8)
    padded[:, :blocks] = zeros
    return pack_pairs(codes), scales, pack_pairs(padded)

"""8 bits in blocks for the layers that lose most by what the others get."""

from functools import partial

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Together, lazy_weight
from specexport.passes.activation_smooth import NORMS
from specexport.passes.base import CountingPass
from specexport.passes.input_note import inputs_of
from specexport.passes.quantize_graph import CONTRIB, put_nbits
from specexport.passes.quantize_sites import LinearSite, channel_parts, head_node, linear_site

BLOCK = 32
_ACCURACY_LEVEL = 4
_LARGEST, _ZERO = 127, 128


class SensitiveBlocksPass(CountingPass):
    """Give some layers 8 bits and a scale for every 32 inputs, by what was measured of their inputs.

    1. Layers that read massive activations. In a few layers a channel of the first token is hundreds of times as large
       as any other (Sun et al. 2024, "Massive Activations in Large Language Models"), and all later tokens look at what
       becomes of it. One scale an output leaves the weights of that channel an error that is multiplied by as much;
       4 bits are worse still.
    2. Where activations would have one scale a token: layers whose tokens have a largest channel far beyond their mean,
       as the product of a gate and a value has (``down_proj``). With blocks, that costs its own block bits only.

    ``com.microsoft.MatMulNBits`` at accuracy level 4 quantizes activations to int8 by token and block, so that no
    token's result depends on the others of the step. In steps of many tokens it is slower than an int8 product, so only
    layers that need it get it. Where nothing was measured, none does. Counts the layers.

    Args:
        per_token: the other layers will have one activation scale a token.
    """

    name = "sensitive-blocks"
    reason = "quality: a few layers lose most of what quantization loses"

    def __init__(self, *, per_token: bool) -> None:
        self._per_token = per_token

    def rewrite(self, model: ir.Model) -> int:
        """Replace every such layer whose inputs are whole blocks."""
        sites = [site for node in model.graph if (site := linear_site(node)) is not None]
        head = head_node(model, {site.node for site in sites})  # read whole for every token, perhaps an embedding too
        found = [site for site in sites if site.node is not head and self._is_sensitive(site)]
        for site in found:
            put_blocks(model.graph, site)
        if found:
            model.opset_imports.setdefault(CONTRIB, 1)
        return len(found)

    def _is_sensitive(self, site: LinearSite) -> bool:
        inputs, producer = inputs_of(site), site.source.producer()
        if inputs is None or site.depth % BLOCK or len(site.weight.uses()) > 1:
            return False
        # Behind a norm the same channels lie far out for every token, and smoothing has taken care of them.
        normed = producer is not None and producer.op_type in NORMS
        return inputs.ranges.massive or (self._per_token and inputs.ranges.coarse and not normed)


def put_blocks(graph: ir.Graph, site: LinearSite) -> None:
    """Give a layer 8 bits in blocks; they must divide its inputs."""
    blocks, name = site.depth // BLOCK, f"{site.weight.name}.blocks"
    made = Together(partial(_parts, site.tensor, site.turned))
    codes = lazy_weight(graph, name, ir.DataType.UINT8, [site.width, blocks, BLOCK], partial(made.part, 0))
    scales = lazy_weight(graph, f"{name}_scale", ir.DataType.FLOAT, [site.width * blocks], partial(made.part, 1))
    put_nbits(graph, site, [codes, scales], block=BLOCK, accuracy_level=_ACCURACY_LEVEL, bits=8)


def _parts(tensor: ir.TensorProtocol, turned: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, blocks, 32], and flat their scales."""
    parts = (quantize_blocks(part) for part in channel_parts(tensor, turned))
    codes, scales = map(np.concatenate, zip(*parts, strict=True))
    return codes, scales.reshape(-1)


def quantize_blocks(channels: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a float matrix, block by block: ``value = (code - 128) * scale``.

    Args:
        channels: [N, K], whole blocks.
        block: inputs that share a scale.

    Returns:
        uint8 codes [N, K / block, block]; float32 scales [N, K / block].
    """
    values = channels.astype(np.float32, copy=False).reshape(channels.shape[0], -1, block)
    scales = np.abs(values).max(axis=2) / np.float32(_LARGEST)
    codes = np.rint(values / np.where(scales > 0, scales, np.float32(1))[..., None]) + _ZERO
    return codes.astype(np.uint8), scales  # 0 of a block of zeros: the kernel's sums of 128s are not exact

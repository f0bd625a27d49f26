"""Low-rank products beside linear layers (LoRA), which a lowering expands: one node a layer until then.

A mark is a node of our operator domain. The passes that quantize the layer see it as one more reader, so the products
stay float, and read what the layer reads before that is rounded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.onnx_emit import Emitter
from specexport.ops.spec import DIM_NAMES
from specexport.passes.base import CountingPass
from specexport.passes.linear_pack import PARTS, WIDTHS, match_linear
from specexport.passes.quantize_sites import LinearSite, match_linear_site
from specexport.passes.transpose_fold import FOLDED
from specexport_runtime.abi import OP_DOMAIN
from specexport_runtime.errors import UnsupportedModelError

MARK = "LowRank"
"""``LowRank(out, source)``, with the names and widths of the layers that were joined."""


class LowRank(NamedTuple):
    """The product that an adapter adds to one linear layer: ``x -> x @ down.T @ up.T``."""

    rank: int  # r
    shape: tuple[int, int]  # of the layer, [N, K]
    down: Callable[[], np.ndarray]  # gives float32 [r, K]
    up: Callable[[], np.ndarray]  # gives float32 [N, r], with the adapter's scale


Adapter = Mapping[str, LowRank]
"""By the name that a traced graph has for the layer's weight."""


class LowRankMarkPass(CountingPass):
    """Mark the linear layers that adapters change. Counts them."""

    name = "low-rank-mark"
    reason = "adapters that requests choose: their products stand beside the layers, whatever the layers become"

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._wanted = {name for adapter in adapters for name in adapter}

    def rewrite(self, model: ir.Model) -> int:
        """Mark every layer; UnsupportedModelError if one is not in the graph, or is not computed once a token."""
        marked: set[str] = set()
        count = 0
        for node in list(model.graph):
            site = match_linear_site(node)
            parts = [] if site is None else [_strip_folded(name) for name in _names(site)]
            if site is not None and self._wanted.intersection(parts):
                _mark(model.graph, site, parts)
                marked.update(parts)
                count += 1
        lacking = sorted(self._wanted - marked)
        if lacking:
            raise _make_unsupported_error(lacking[0])
        return count


def _names(site: LinearSite) -> list[str]:
    """Names of the weights that a layer was joined from, or its own."""
    return list(site.weight.meta.get(PARTS, [str(site.weight.name)]))


def _strip_folded(name: str) -> str:
    return name.removesuffix(FOLDED)


def _mark(graph: ir.Graph, site: LinearSite, parts: list[str]) -> None:
    layer = match_linear(site.node)
    out = site.node.outputs[0] if layer is None else layer.out
    shape = site.source.shape
    per_token = shape is not None and [str(size) for size in shape[:-1]] in ([DIM_NAMES["T"]], ["1", DIM_NAMES["T"]])
    if not per_token:
        raise _make_unsupported_error(parts[0])
    widths = site.weight.meta.get(WIDTHS, [site.width])
    producer = out.producer()
    uses = list(out.uses())
    emit = Emitter(graph)
    marked = emit.op(
        MARK, out, site.source, domain=OP_DOMAIN, shape=out.shape, name=f"{parts[0]}.lora", parts=parts,
        widths=widths,
    )  # fmt: skip
    marked.name = f"{out.name}.adapted"
    emit.place(after=producer)
    for reader, index in uses:
        reader.replace_input_with(index, marked)


def _make_unsupported_error(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name.removeprefix('model.').removesuffix('.weight')} is no layer that requests can choose an adapter for: "
        "it is computed otherwise than once a token.",
        "build a bundle with one adapter (it is merged into the weights), or train without that module.",
    )

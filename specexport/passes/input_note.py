"""What was measured of a layer's inputs, kept beside its weight while passes rename and rewrite that."""

from collections.abc import Mapping

import onnx_ir as ir

from specexport.channel_ranges import ChannelRanges
from specexport.passes.base import CountingPass
from specexport.passes.quantize_sites import LinearSite, match_linear_site
from specexport.passes.transpose_fold import FOLDED

_KEY = "specexport.inputs"


class InputNotePass(CountingPass):
    """Note what was measured of each layer's inputs beside its weight, for :func:`find_input_ranges`; counts the layers."""

    name = "input-note"
    reason = "measured by the checkpoint's names, and needed after passes have renamed and joined the weights"

    def __init__(self, ranges: Mapping[str, ChannelRanges]) -> None:
        self._ranges = ranges  # by name of the weight

    def rewrite(self, model: ir.Model) -> int:
        """Note every layer that was measured."""
        noted = 0
        for node in model.graph:
            site = match_linear_site(node)
            found = None if site is None else self._ranges.get(str(site.weight.name).removesuffix(FOLDED))
            if site is not None and found is not None and len(found.largest) == site.depth:
                site.weight.meta[_KEY] = found
                noted += 1
        return noted


def find_input_ranges(site: LinearSite) -> ChannelRanges | None:
    """What was noted; None if nothing was measured."""
    found: ChannelRanges | None = site.weight.meta.get(_KEY)
    return found


def copy_input_note(old: ir.Value, new: ir.Value) -> None:
    """Hand a note on from a weight to the one that takes its place."""
    if _KEY in old.meta:
        new.meta[_KEY] = old.meta[_KEY]

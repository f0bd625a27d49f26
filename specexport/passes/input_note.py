"""What was measured of a layer's inputs, kept beside its weight while passes rename and rewrite that."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specexport.channel_ranges import ChannelRanges, FloatVector
from specexport.passes.base import CountingPass
from specexport.passes.quantize_sites import LinearSite, linear_site
from specexport.passes.transpose_fold import FOLDED

_KEY = "specexport.inputs"
_OUTPUTS = "specexport.outputs"


class Inputs(NamedTuple):
    """What a layer reads.

    Attributes:
        ranges: as measured in the checkpoint's model.
        factors: what each channel has been divided by since, float32 [K]; None for nothing.
    """

    ranges: ChannelRanges
    factors: FloatVector | None = None

    @property
    def squares(self) -> FloatVector:
        """Mean square of each channel as the layer reads it now, float32 [K]."""
        found = self.ranges.squares if self.factors is None else self.ranges.squares / np.square(self.factors)
        return found.astype(np.float32, copy=False)


class InputNotePass(CountingPass):
    """Note what was measured of each layer's inputs beside its weight.

    Nothing of the graph changes. Later passes find the notes with :func:`inputs_of`; those that put a new weight in the
    place of an old one hand them on with :func:`carry_inputs`. Counts the layers.

    Args:
        ranges: by name of the weight.
    """

    name = "input-note"
    reason = "measured by the checkpoint's names, and needed after passes have renamed, scaled and joined the weights"

    def __init__(self, ranges: Mapping[str, ChannelRanges]) -> None:
        self._ranges = ranges

    def rewrite(self, model: ir.Model) -> int:
        """Note every layer that was measured."""
        noted = 0
        for node in model.graph:
            site = linear_site(node)
            found = None if site is None else self._ranges.get(str(site.weight.name).removesuffix(FOLDED))
            if site is not None and found is not None and len(found.largest) == site.depth:
                site.weight.meta[_KEY] = Inputs(found)
                noted += 1
        return noted


def inputs_of(site: LinearSite) -> Inputs | None:
    """What was noted; None if nothing was measured."""
    found: Inputs | None = site.weight.meta.get(_KEY)
    return found


def carry_inputs(old: ir.Value, new: ir.Value, factors: FloatVector | None = None) -> None:
    """Hand a note on from a weight to the one that takes its place.

    Args:
        old: the weight before.
        new: the weight now.
        factors: what each input channel is divided by from now on; None for nothing.
    """
    found: Inputs | None = old.meta.get(_KEY)
    if found is not None:
        if factors is not None:
            found = found._replace(factors=factors if found.factors is None else found.factors * factors)
        new.meta[_KEY] = found


def outputs_of(weight: ir.Value) -> FloatVector | None:
    """What each output of a layer has been multiplied by, float32 [N]; None for nothing."""
    found: FloatVector | None = weight.meta.get(_OUTPUTS)
    return found


def carry_outputs(old: ir.Value, new: ir.Value, factors: FloatVector | None = None) -> None:
    """Hand on what outputs have been multiplied by, as :func:`carry_inputs` does; ``factors`` come on top."""
    found = outputs_of(old)
    if factors is not None:
        found = factors if found is None else found * factors
    if found is not None:
        new.meta[_OUTPUTS] = found


def join_outputs(parts: "list[tuple[ir.Value, int]]", joined: ir.Value) -> None:
    """The same for a weight whose outputs are those of several, one behind the other: each with its width."""
    found = [(outputs_of(part), width) for part, width in parts]
    if any(factors is not None for factors, _ in found):
        ones = [np.ones(width, np.float32) if factors is None else factors for factors, width in found]
        joined.meta[_OUTPUTS] = np.concatenate(ones)

"""Whether packed weights lie around zero, as those of trained models do: a check apart from the importer's reading.

A zero that is read one step off moves every weight of a layer by one step, and a comparison with floats of the same
reading does not show it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specexport.frontend.source import Source
from specexport.passes.block_weight import BlockWeight
from specexport_runtime.errors import CheckpointError

_ROWS = 256  # of a layer, from all over it
_OFF = (0.75, 1.5)
"""Steps from zero where another reading, one step away, is the better one. Uniform codes lie half a step off."""
_SURE = 4.0  # standard errors


def check_centre(source: Source, weights: Mapping[str, BlockWeight], settings: Mapping[str, Any]) -> None:
    """Refuse weights (by layer) about one step off zero: the median over the layers of their mean, in steps."""
    found = [_centre(weight) for weight in weights.values()]
    if not found:
        return
    means, errors = (np.array(values) for values in zip(*found, strict=True))
    centre = float(np.median(means))
    spread = 1.4826 * float(np.median(np.abs(means - centre)))
    error = 1.2533 * max(spread, float(np.median(errors))) / len(found) ** 0.5
    if not max(_OFF[0], _SURE * error) < abs(centre) < _OFF[1]:
        return
    hint = "give the checkpoint that it was quantized from."
    if settings["quant_method"] == "gptq":
        other = "gptq" if settings.get("checkpoint_format", "gptq") == "gptq_v2" else "gptq_v2"
        hint = f"set checkpoint_format in quantization_config to {other} if it was made so, or {hint}"
    raise CheckpointError(
        f"{source.name}: its packed weights lie {centre:+.2f} steps beside zero on average, as where zeros are read "
        "otherwise than they were stored.",
        hint,
    )


def _centre(weight: BlockWeight) -> tuple[float, float]:
    """Mean of a weight in steps of its blocks, and its standard error."""
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, min(_ROWS, weight.shape[0])).astype(np.int64))
    blocks = weight.read(rows)
    steps = blocks.codes.astype(np.float32).reshape(*blocks.scales.shape, -1) - (1 << (weight.form.bits - 1))
    if blocks.offsets is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            steps += np.nan_to_num(blocks.offsets / blocks.scales, posinf=0.0, neginf=0.0)[..., None]
    return float(steps.mean()), float(steps.std()) / steps.size**0.5

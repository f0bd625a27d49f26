"""Cost curves from the sizes of the models alone, for engines that nobody has measured on this machine.

A step reads all weights once and multiplies them with each of its tokens: ``bytes / bandwidth + T · flops / rate``. The
rates below are those of common machines. Their level does not matter, since lengths are chosen by ratios; what is wrong
with the ratios is found out while requests run (:mod:`specexport_runtime.costs.learned`). Imports the standard library.
"""

from collections.abc import Mapping
from typing import NamedTuple

from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.step_cost import RowCurve, StepCost

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5625}
"""Of a weight, with its share of the scales."""


class _Rates(NamedTuple):
    """What a machine does in a second, and what a layer costs besides."""

    bytes: float
    layer_seconds: float
    flops: Mapping[str | None, float]


_CPU = _Rates(2e10, 3e-5, {None: 1e11, "int8": 6e11, "int4": 2.5e11})
_GPU = _Rates(1.5e12, 2e-5, {None: 1e14})


def prior_costs(models: Mapping[str, ModelEntry], *, on_gpu: bool, max_rows: int, lookahead: int) -> CostCurves:
    """The curves that a bundle's sizes promise.

    Args:
        models: ``"target"`` and, if there is one, ``"draft"``.
        on_gpu: whether the engines run on a GPU.
        max_rows: most rows of a step.
        lookahead: largest K.
    """
    rates = _GPU if on_gpu else _CPU
    curves = {role: _curve(entry, rates, max_rows, lookahead + 1) for role, entry in models.items()}
    target, drafters = curves["target"], {}
    if "draft" in curves:
        drafters["draft-model"] = curves["draft"]
    entry = models["target"]
    if entry.skipped_layers:
        share = 1 - len(entry.skipped_layers) / max(len(entry.layers), 1)
        drafters["self"] = _scaled(target, share)
    return CostCurves(target, drafters)


def _curve(entry: ModelEntry, rates: _Rates, max_rows: int, max_tokens: int) -> StepCost:
    item = _ITEM_BYTES.get(entry.dtype, 4)
    weight_bytes = entry.num_parameters * _QUANTIZED_BYTES.get(entry.quantize or "", item)
    flops = rates.flops.get(entry.quantize, rates.flops[None])
    read = weight_bytes / rates.bytes + len(entry.layers) * rates.layer_seconds
    each = 2 * entry.num_parameters / flops
    widths = tuple(sorted({1, max(max_tokens, 1)}))
    rows = sorted({1, max_rows})
    curves = tuple(RowCurve(count, widths, tuple(read + count * width * each for width in widths)) for count in rows)
    entry_bytes = item * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in entry.layers)
    return StepCost(curves, entry_bytes / rates.bytes)


def _scaled(cost: StepCost, share: float) -> StepCost:
    curves = (
        RowCurve(each.num_rows, each.widths, tuple(share * value for value in each.seconds)) for each in cost.curves
    )
    return StepCost(tuple(curves), share * cost.kv_seconds)

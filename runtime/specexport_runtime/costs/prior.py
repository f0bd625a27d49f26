"""Cost curves from the sizes of the models alone, for engines that nobody has measured on this machine.

A step reads all weights once and multiplies them with each of its tokens: ``bytes / bandwidth + T · flops / rate``,
less what the machine multiplies while it waits for weights. Of E experts a layer, of which a token takes k, it reads
those that any of its tokens takes, ``1 - (1 - k/E)^T`` of them if tokens are unlike each other, and multiplies a token
with k. A row's states are read and written once a step. It reads the cache once a row, and multiplies it with each
token of the row. The rates below are those of common machines. Their level does not matter, since lengths are chosen by
ratios; what is wrong with the ratios is found out while requests run (:mod:`specexport_runtime.costs.learned`). Imports
the standard library.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from specexport_runtime.abi import CACHE_BYTES, ITEM_BYTES
from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.costs.curves import CostCurves
from specexport_runtime.costs.measure import row_counts_up_to, widths_up_to
from specexport_runtime.costs.step_cost import RowCurve, StepCost

DRAFTER_OF = {"draft": "draft-model", "head": "head"}
"""The drafter that each model of a bundle besides the target is for."""
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5625}
"""Of a weight, with its share of the scales."""


_STATE_FLOPS = 6
"""Of a number of a state and a token: it decays, takes in a product, and is multiplied with a query."""


class _Rates(NamedTuple):
    """What a machine does in a second, and what a layer costs besides.

    Attributes:
        bytes: read from memory.
        layer_seconds: of a layer, whatever it holds.
        flops: in products with weights, by how those are quantized.
        cache_flops: in products with the cache, which are narrow.
        hidden: of the time that weights take to arrive, the share in which products cost next to nothing.
    """

    bytes: float
    layer_seconds: float
    flops: Mapping[str | None, float]
    cache_flops: float
    hidden: float


# Two cores of an EPYC, a model of 1.5 billion: what counts is how much they multiply while they read a byte. With 256
# bits products are the limit from the first token on; with AVX-512 and VNNI they hide behind the weights up to five.
_NARROW = _Rates(2e10, 3e-5, {None: 1.2e11, "int8": 1.4e11, "int4": 1.7e11, "keep": 1.7e11}, 2.2e10, hidden=0)
_WIDE = _Rates(2e10, 3e-5, {None: 2e11, "int8": 7e11, "int4": 6e11, "keep": 6e11}, 2.2e10, hidden=0.5)
_CPU = {"avx512vnni": _WIDE, "amx": _WIDE}
_GPU = _Rates(1.5e12, 2e-5, {None: 1e14}, 1e13, hidden=0)


def prior_costs(models: Mapping[str, ModelEntry], *, kernels: str | None, max_rows: int, lookahead: int) -> CostCurves:
    """The curves that a bundle's sizes promise.

    Args:
        models: ``"target"`` and, if there is one, ``"draft"`` or ``"head"``.
        kernels: the instruction set of the CPU's operators; None for engines that run on a GPU.
        max_rows: most rows of a step.
        lookahead: largest K.
    """
    rates = _GPU if kernels is None else _CPU.get(kernels, _NARROW)
    curves = {role: _curve(entry, rates, max_rows, lookahead + 1) for role, entry in models.items()}
    target = curves["target"]
    drafters = {DRAFTER_OF[role]: curve for role, curve in curves.items() if role in DRAFTER_OF}
    entry = models["target"]
    if entry.skipped_layers:
        share = 1 - len(entry.skipped_layers) / max(len(entry.layers), 1)
        drafters["self"] = _scaled(target, share)
    return CostCurves(target, drafters)


def _curve(entry: ModelEntry, rates: _Rates, max_rows: int, max_tokens: int) -> StepCost:
    flops = rates.flops.get(entry.quantize, rates.flops[None])
    fixed = (len(entry.layers) + len(entry.states)) * rates.layer_seconds

    def seconds(rows: int, width: int) -> float:
        read, multiplied = _weights(entry, rows * width)
        reading, products = read * _bytes_of_weight(entry) / rates.bytes, 2 * rows * width * multiplied / flops
        weights = reading + max(products - rates.hidden * reading, 0.1 * products)
        return fixed + weights + rows * _state_seconds(entry, rates, width)

    widths = tuple(widths_up_to(max(max_tokens, 1)))
    curves = tuple(
        RowCurve(rows, widths, tuple(seconds(rows, width) for width in widths)) for rows in row_counts_up_to(max_rows)
    )
    entry_bytes = CACHE_BYTES.get(entry.cache_dtype, 4)
    read, products = 0, 0
    for layer in entry.layers:
        read += entry_bytes * layer.kv_heads * (layer.k_dim + layer.v_dim)
        products += max(entry.num_heads or layer.kv_heads, layer.kv_heads) * (layer.k_dim + layer.v_dim)
    return StepCost(curves, read / rates.bytes, 2 * products / rates.cache_flops)


def _weights(entry: ModelEntry, num_tokens: int) -> tuple[float, float]:
    """How many weights a step of so many tokens reads, and how many it multiplies each of them with."""
    parameters = entry.step_parameters or entry.num_parameters
    if entry.experts is None:
        return parameters, parameters
    experts, per_token, per_layer = entry.experts
    left = experts * (1 - per_token / per_layer)
    untouched = experts * (1 - per_token / per_layer) ** num_tokens
    return parameters - untouched, parameters - left


def _state_seconds(entry: ModelEntry, rates: _Rates, width: int) -> float:
    """Of a row's states: read and written once, and changed by a step's tokens and by half as many accepted drafts."""
    numbers = sum(math.prod(state.shape) for state in entry.states)
    tokens = width + width // 2
    return 2 * ITEM_BYTES["float32"] * numbers / rates.bytes + tokens * _STATE_FLOPS * numbers / rates.cache_flops


def _bytes_of_weight(entry: ModelEntry) -> float:
    item = ITEM_BYTES.get(entry.dtype, 4)
    if entry.quantized_bytes is not None:  # any mixture of formats
        stored, before = entry.quantized_bytes
        return item * stored / max(before, 1)
    return _QUANTIZED_BYTES.get(entry.quantize or "", item)


def _scaled(cost: StepCost, share: float) -> StepCost:
    curves = (
        RowCurve(each.num_rows, each.widths, tuple(share * value for value in each.seconds)) for each in cost.curves
    )
    return StepCost(tuple(curves), share * cost.kv_seconds, share * cost.kv_token_seconds)

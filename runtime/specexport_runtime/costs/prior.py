"""What steps cost by the sizes of the models alone, as a bundle's manifest has them.

The rates are those of common machines. Lengths are chosen by ratios, which rounds correct (``costs.learned``).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specexport_runtime.abi import CACHE_BYTES, ITEM_BYTES, MLP
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.quant_kinds import KINDS, Flops
from specexport_runtime.costs.curves import CostCurves, LayerShares, StepCost

DRAFTER_OF = {"draft": "draft-model", "head": "head"}
"""The drafter that each model of a bundle besides the target is for."""
_STATE_FLOPS = 6
"""Of a number of a state and a token: it decays, takes in a product, and is multiplied with a query."""


class _Rates(NamedTuple):
    """What a machine does in a second, and what a layer costs besides."""

    bytes: float  # read from memory
    layer_seconds: float  # of a layer, whatever it holds
    flops: float  # in products with float weights
    cache_flops: float  # in products with the cache, which are narrow
    hidden: float  # of the time that weights take to arrive, the share in which products cost next to nothing
    of_kind: Callable[[Flops], float] | None = None  # products with quantized weights; None: as with float ones


# Two cores, a model of 1.5 billion: what counts is how much they multiply while they read a byte. Ratios of steps are
# fitted: of 5 and 9 tokens to one, kept, 1.56 and 2.32 with 256 bits, 1.38 and 1.73 with AVX-512 (a Xeon).
_NARROW = _Rates(2e10, 3e-5, 1.2e11, 2.2e10, hidden=0.3, of_kind=lambda kind: kind.narrow)
_WIDE = _Rates(2e10, 3e-5, 2e11, 2.2e10, hidden=0.25, of_kind=lambda kind: kind.wide)
_CPU = {"avx512vnni": _WIDE, "amx": _WIDE}
_GPU = _Rates(1.5e12, 2e-5, 1e14, 1e13, hidden=0)


def prior_costs(models: Mapping[str, ModelEntry], *, kernels: str | None) -> CostCurves:
    """What the sizes of a bundle's models promise; ``kernels`` is the CPU's instruction set, None on a GPU."""
    rates = _GPU if kernels is None else _CPU.get(kernels, _NARROW)
    costs = {role: _cost(entry, rates) for role, entry in models.items()}
    target, entry = costs["target"], models["target"]
    drafters = {DRAFTER_OF[role]: cost for role, cost in costs.items() if role in DRAFTER_OF}
    shares = _shares(entry) if entry.engine.gates.kinds else None
    return CostCurves(target, drafters, shares, has_logits=kernels is not None)


def _cost(entry: ModelEntry, rates: _Rates) -> StepCost:
    parameters, attention = entry.parameters.step, entry.attention
    kind = KINDS.get(entry.quantize or "")
    flops = rates.flops if kind is None or rates.of_kind is None else rates.of_kind(kind.flops)
    experts, per_token, per_layer = entry.parameters.experts or (0, 0, 1)
    unchosen = 1 - per_token / per_layer
    weight_seconds = _bytes_of_weight(entry) / rates.bytes
    numbers = sum(math.prod(state.shape) for state in entry.states)
    entry_bytes = CACHE_BYTES.get(attention.cache_dtype, 4)
    read, products = 0, 0
    for layer in attention.layers:
        read += entry_bytes * layer.kv_heads * (layer.k_dim + layer.v_dim)
        products += max(attention.query_heads or layer.kv_heads, layer.kv_heads) * (layer.k_dim + layer.v_dim)
    return StepCost(
        reading=parameters * weight_seconds,
        token=2 * (parameters - experts * unchosen) / flops,
        fixed=(len(attention.layers) + len(entry.states)) * rates.layer_seconds,
        hidden=rates.hidden,
        unchosen=experts * weight_seconds,
        unchosen_share=unchosen,
        row=2 * ITEM_BYTES["float32"] * numbers / rates.bytes,
        row_token=1.5 * _STATE_FLOPS * numbers / rates.cache_flops,  # a draft that is accepted enters the state anew
        kv=read / rates.bytes,
        kv_token=2 * products / rates.cache_flops,
    )


def _bytes_of_weight(entry: ModelEntry) -> float:
    item = ITEM_BYTES.get(entry.dtype, 4)
    if entry.engine.packed_bytes is not None:  # any mixture of formats
        stored, before = entry.engine.packed_bytes
        return item * stored / max(before, 1)
    kind = KINDS.get(entry.quantize or "")
    return item if kind is None or kind.read_bytes is None else kind.read_bytes


def _shares(entry: ModelEntry) -> LayerShares:
    """What a mixer and an MLP take of a step, about: the manifest has no width, which heads mostly add up to."""
    count, whole = max(len(entry.attention.layers) + len(entry.states), 1), entry.parameters.step
    layer = entry.attention.layers[0] if entry.attention.layers else None
    heads = 0 if layer is None else entry.attention.query_heads or layer.kv_heads
    width = 0 if layer is None else heads * layer.k_dim
    each = max(whole - entry.vocab_size * width, whole // 2) / count
    mixer = each / 3 if layer is None else width * (heads + layer.kv_heads) * (layer.k_dim + layer.v_dim)
    mixer = min(mixer, each / 2)
    num_mlps = entry.engine.gates.kinds.count(MLP) or count
    return LayerShares(count, mixer / whole, (each - mixer) * count / num_mlps / whole)

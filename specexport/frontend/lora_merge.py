"""What becomes of a LoRA adapter in a build: a part of the weights, or separate products that requests choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.lora_fit import Factors, LoraAdapter
from specexport.frontend.stored import StoredWeight
from specexport.frontend.trace import WEIGHT_PREFIX
from specexport.passes.low_rank import LowRank
from specexport_runtime.errors import CheckpointError


def merge_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> None:
    """Add an adapter to the weights of a loaded checkpoint: W + s B A in float32, rounded to the model's dtype.

    Weights that are in their files stay there: what is read of them is changed. Raises ``CheckpointError`` if a weight
    is kept in the integers of a quantized checkpoint.
    """
    kept = next((each for each in adapter.factors if WEIGHT_PREFIX + each.parameter in checkpoint.kept), None)
    if kept is not None:
        raise CheckpointError(
            f"{adapter.source.where} cannot be merged into {kept.module}: its weights stay the integers of the "
            "quantized checkpoint.",
            "say how to quantize the sum (--quantize int8, int4 or none), or let requests choose the adapter "
            "(--lora-mode choose).",
        )
    parameters = dict(checkpoint.model.named_parameters())
    for each in adapter.factors:
        if each.parameter not in checkpoint.stored:
            with torch.no_grad():
                weight = parameters[each.parameter]
                weight.copy_(_sum(weight, each, 0, len(weight)))
    checkpoint.stored = _with(checkpoint, adapter)


@contextmanager
def with_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> Iterator[Checkpoint]:
    """Within the block, the float model that an adapter makes of a checkpoint, which is as it was afterwards."""
    parameters = dict(checkpoint.model.named_parameters())
    loaded = [each for each in adapter.factors if each.parameter not in checkpoint.stored]
    before = {each.parameter: parameters[each.parameter].detach().clone() for each in loaded}
    try:
        with torch.no_grad():
            for each in loaded:
                weight = parameters[each.parameter]
                weight.copy_(_sum(weight, each, 0, len(weight)))
        yield replace(checkpoint, stored=_with(checkpoint, adapter))
    finally:
        with torch.no_grad():
            for name, weight in before.items():
                parameters[name].copy_(weight)


def low_ranks(adapter: LoraAdapter) -> dict[str, LowRank]:
    """The products of an adapter, by the name of the weight beside which each is in a traced graph.

    Raises ``CheckpointError`` if it changes an embedding, which is no product.
    """
    table = next((each for each in adapter.factors if each.kind == "embedding"), None)
    if table is not None:
        raise CheckpointError(
            f"{adapter.source.where} changes the embedding {table.module}, and requests cannot choose that.",
            "build a bundle with this adapter alone, or train it without that module.",
        )
    return {
        WEIGHT_PREFIX + each.parameter: LowRank(each.rank, each.shape, each.down, each.up) for each in adapter.factors
    }


def _with(checkpoint: Checkpoint, adapter: LoraAdapter) -> dict[str, StoredWeight]:
    """The stored weights, those of the adapter's layers with what it adds."""
    changed = {
        each.parameter: _merged(checkpoint.stored[each.parameter], each)
        for each in adapter.factors
        if each.parameter in checkpoint.stored
    }
    return {**checkpoint.stored, **changed}


def _merged(stored: StoredWeight, factors: Factors) -> StoredWeight:
    def rows(start: int, stop: int) -> Tensor:
        return _sum(stored.rows(start, stop), factors, start, stop)

    return replace(stored, rows=rows)


def _sum(weight: Tensor, factors: Factors, start: int, stop: int) -> Tensor:
    return (weight.float() + torch.from_numpy(factors.delta(start, stop))).to(weight.dtype)

"""The safety net: the packed model, run eagerly, against the model's own attention."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.frontend.attention import LayerCall
from specexport.frontend.refuse import refuse
from specexport_runtime.abi import STEP_INPUTS

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

_SEQUENCES = (11, 7)
_FIRST_STEP = (6, 4)  # new tokens a row; the second, ragged step takes the rest: 5 and 3
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Relative to the largest logit. Float32 rounding stays below 1e-5; 16-bit products of packed tokens round more."""


def eager_logits(model: Any, sequences: "Seq[Seq[int]]", *, together: bool = False) -> list[npt.NDArray[np.float32]]:
    """Logits [len, V] of each sequence from the model's eager attention, without a cache.

    Args:
        model: the model.
        sequences: token ids.
        together: run it once, for where its weights are read in each run. Shorter sequences are filled up behind,
            where no token sees it.
    """
    before = model.config._attn_implementation
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            if together:
                longest = max(map(len, sequences))
                filled = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
                logits = model(input_ids=filled, use_cache=False).logits
                results = [row[: len(ids)] for row, ids in zip(logits, sequences, strict=True)]
            else:
                results = [model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in sequences]
    finally:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(before)
    return [result.float().numpy() for result in results]


def check_packed(model: Any, calls: tuple[LayerCall, ...]) -> None:
    """Run two ragged packed steps through the custom op and compare every logit with the eager model.

    Raises:
        UnsupportedModelError: they differ: something of the model does not go through the attention interface.
    """
    vocab = model.config.get_text_config().vocab_size
    sequences = [[(37 * row + 11 * i + 5) % vocab for i in range(length)] for row, length in enumerate(_SEQUENCES)]
    expected = eager_logits(model, sequences)
    caches: list[Tensor] = []
    for call in calls:
        heads, k_dim, v_dim = call.geometry
        caches += [torch.zeros(2, 1, heads, max(_SEQUENCES), dim, dtype=model.dtype) for dim in (k_dim, v_dim)]
    starts = (0, 0)
    for ends in (_FIRST_STEP, _SEQUENCES):
        logits, caches = _packed_step(model, calls, sequences, starts, ends, caches)
        wanted = np.concatenate([expected[row][starts[row] : ends[row]] for row in range(2)])
        error, scale = float(np.abs(logits - wanted).max()), max(1.0, float(np.abs(wanted).max()))
        if not error <= TOLERANCE[model.dtype] * scale:
            raise refuse(model, f"packed tokens change its logits by {error:.2g} (of {scale:.2g})")
        starts = ends


def _packed_step(
    model: Any,
    calls: tuple[LayerCall, ...],
    sequences: list[list[int]],
    starts: tuple[int, ...],
    ends: tuple[int, ...],
    caches: list[Tensor],
) -> tuple[npt.NDArray[np.float32], list[Tensor]]:
    from specexport.frontend.trace import PackedModel

    tokens = [t for row, ids in enumerate(sequences) for t in ids[starts[row] : ends[row]]]
    positions = [p for row in range(len(sequences)) for p in range(starts[row], ends[row])]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    zeros = torch.zeros(1, dtype=torch.int64)  # the torch op reads neither totals nor pad indices
    step = {
        "input_ids": torch.tensor(tokens),
        "positions": torch.tensor(positions),
        "logit_rows": torch.arange(len(tokens)),
        "kv_lens": torch.tensor(starts, dtype=torch.int32)[:, None],
        "cu_new_tokens": torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
    }
    inputs = [step.get(spec.name, zeros) for spec in STEP_INPUTS]
    with torch.no_grad():
        logits, *caches = PackedModel(model, calls).eval()(*inputs, *caches)
    return logits.float().numpy(), caches

"""Tracing with its safety net: the packed model, run eagerly, against the model's own attention."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.streaming import streamed, use_random_weights
from specexport.trace.attention import use_attention_implementation
from specexport.trace.experts import make_experts_traceable
from specexport.trace.export import PackedModel, TracedModel, trace_model
from specexport.trace.geometry import ModelCalls, probe_layers
from specexport.trace.layer_kinds import LayerKinds, LayerWatch
from specexport.trace.layers import FeatureRequest
from specexport.trace.refuse import check_config, refuse
from specexport.trace.unroll import select_calls, skip_other_layers
from specexport_runtime.abi import STATE_STEPS, STEP_INPUTS, state_shapes
from specexport_runtime.errors import SpecexportError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEQUENCES = (11, 7)
_FIRST_STEP = (6, 4)  # new tokens a row; the second, ragged step takes the rest: 5 and 3
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Relative to the largest logit. Float32 rounding stays below 1e-5; 16-bit products of packed tokens round more."""


def trace_checkpoint(
    checkpoint: Checkpoint, features: FeatureRequest | None = None, *, group_experts: bool = False
) -> TracedModel:
    """Trace a checkpoint to ONNX IR, once packed and own attention agree; else UnsupportedModelError."""
    model: Any = checkpoint.model
    check_config(model)
    with make_experts_traceable(model, grouped=group_experts):
        with use_random_weights(model, checkpoint.stored):
            calls = probe_layers(model)
            kinds = check_packed(model, calls)
        if isinstance(kinds, str):
            return trace_model(model, calls, checkpoint.stored, features)._replace(whole=kinds)
        return trace_model(model, calls, checkpoint.stored, features, kinds)


def compute_eager_logits(
    model: Any, sequences: "Sequence[Sequence[int]]", *, together: bool = False
) -> list[npt.NDArray[np.float32]]:
    """Logits float32 [len, V] of each sequence, eager, without a cache; ``together`` runs the model once."""
    with torch.no_grad(), use_attention_implementation(model, "eager"):
        if together:
            longest = max(map(len, sequences))
            filled = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
            logits = model(input_ids=filled, use_cache=False).logits
            results = [row[: len(ids)] for row, ids in zip(logits, sequences, strict=True)]
        else:
            results = [model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in sequences]
    return [result.float().numpy() for result in results]


def compute_reference_logits(checkpoint: Checkpoint, sequences: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Logits float32 [len, V] of each sequence by eager transformers alone; UnsupportedModelError if that fails."""
    with streamed(checkpoint.model, checkpoint.stored):
        try:
            return compute_eager_logits(checkpoint.model, sequences, together=bool(checkpoint.stored))
        except SpecexportError:
            raise
        except Exception as error:  # whatever a model's own code may raise
            reason = f"its own forward pass fails ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
            raise refuse(checkpoint.model, reason) from error


def check_packed(model: Any, calls: ModelCalls) -> LayerKinds | str:
    """Run two ragged packed steps and compare every logit with the eager model's; UnsupportedModelError if not.

    Where layers are of a kind, the others of it hand their input on meanwhile: what is wrong with one shows in two.

    Returns:
        the kinds of the layers, or why they cannot be told apart.
    """
    vocab = model.config.get_text_config().vocab_size
    sequences = [[(37 * row + 11 * i + 5) % vocab for i in range(length)] for row, length in enumerate(_SEQUENCES)]
    kept = _empty_caches(model, calls)
    watch = LayerWatch(model, kept, 2 * len(calls.attention))
    with watch.installed():
        next(_run_packed_steps(model, calls, sequences, kept))
    kinds = watch.result()
    if not isinstance(kinds, str):
        few = kinds.traced()
        try:
            with skip_other_layers(kinds, few):
                _compare(model, select_calls(calls, kinds, few), sequences, _describe_states(calls))
        except Exception:  # a model may look into layers that have nothing in them: the whole one decides
            kinds = "a few of its layers do not work alone"
        else:
            return kinds
    _compare(model, calls, sequences, _describe_states(calls))
    return kinds


def _compare(model: Any, calls: ModelCalls, sequences: list[list[int]], hint: str) -> None:
    expected = compute_eager_logits(model, sequences)
    for (starts, ends), logits in _run_packed_steps(model, calls, sequences, _empty_caches(model, calls)):
        wanted = np.concatenate([expected[row][starts[row] : ends[row]] for row in range(2)])
        error, scale = float(np.abs(logits - wanted).max()), max(1.0, float(np.abs(wanted).max()))
        if not error <= TOLERANCE[model.dtype] * scale:
            reason = (
                f"packed tokens change its logits by {error:.2g} (of {scale:.2g}): something of it mixes tokens beside "
                "attention and the recurrences that are known, or numbers them itself"
            )
            raise refuse(model, reason + hint)


def _run_packed_steps(
    model: Any, calls: ModelCalls, sequences: list[list[int]], kept: list[Tensor]
) -> Iterator[tuple[tuple[tuple[int, ...], tuple[int, ...]], npt.NDArray[np.float32]]]:
    """Where two ragged steps begin and end in each sequence, and their logits [T, V]."""
    starts = (0, 0)
    for ends in (_FIRST_STEP, _SEQUENCES):
        spans = list(zip(starts, ends, strict=True))
        tokens = [token for ids, (start, end) in zip(sequences, spans, strict=True) for token in ids[start:end]]
        logits, kept = packed_step(
            model,
            calls,
            tokens=tokens,
            positions=[position for start, end in spans for position in range(start, end)],
            kv_lens=starts,
            counts=[end - start for start, end in spans],
            kept=kept,
            logit_rows=range(len(tokens)),
        )
        yield (starts, ends), logits
        starts = ends


def _empty_caches(model: Any, calls: ModelCalls) -> list[Tensor]:
    """What two rows keep before their first token, for :func:`packed_step`."""
    kept: list[Tensor] = []
    for call in calls.attention:
        heads, k_dim, v_dim = call.geometry
        kept += [torch.zeros(2, 1, heads, max(_SEQUENCES), dim, dtype=model.dtype) for dim in (k_dim, v_dim)]
    return kept + empty_states(calls, 2)


def _describe_states(calls: ModelCalls) -> str:
    """What to think of where a model keeps states: that not all of them are seen."""
    if not calls.recurrences:
        return ""
    from transformers import __version__

    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(call.kind for call in calls.recurrences).items())
    return f"; of what keeps a state, {kinds} were seen, and transformers is {__version__}"


def empty_states(calls: ModelCalls, rows: int) -> list[Tensor]:
    """States and pending entries of recurrences before the first token, for :func:`packed_step`."""
    shapes = state_shapes([call.geometry for call in calls.recurrences], rows, 1)
    return [torch.zeros(shape) for shape in shapes.values()]


def packed_step(
    model: Any,
    calls: ModelCalls,
    *,
    tokens: "Sequence[int] | npt.NDArray[np.int64]",  # of all rows, one row after the other [T]
    positions: "Sequence[int] | npt.NDArray[np.int64]",  # of each token [T]
    kv_lens: "Sequence[int]",  # cache entries of each row before the step
    counts: "Sequence[int]",  # new tokens of each row
    kept: list[Tensor],  # keys and values of each layer, [B, 1, H, L, D] each, then states and pending entries
    logit_rows: "Sequence[int]",  # tokens whose logits are wanted [R]
) -> tuple[npt.NDArray[np.float32], list[Tensor]]:
    """One step of the packed model, run eagerly: logits float32 [R, V], and what is kept after the step."""
    zeros = torch.zeros(1, dtype=torch.int64)  # the torch op reads neither totals nor pad indices
    step = {
        "input_ids": torch.as_tensor(tokens),
        "positions": torch.as_tensor(positions),
        "logit_rows": torch.as_tensor(logit_rows),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32)[:, None],
        "cu_new_tokens": torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
    }
    step[STATE_STEPS.name] = torch.tensor([[0, 0, count, 0] for count in counts])
    names = [*(spec.name for spec in STEP_INPUTS), *([STATE_STEPS.name] if calls.recurrences else [])]
    with torch.no_grad():
        logits, *kept = PackedModel(model, calls).eval()(*(step.get(name, zeros) for name in names), *kept)
    return logits.float().numpy(), kept

"""Frontend: from a checkpoint to a traced model.

``load_checkpoint`` reads, ``drop_layers`` makes a model shallower, ``trace_checkpoint`` traces, ``reference_logits`` is
what all are measured against.
Importing this package imports neither torch nor transformers; its functions do.
"""

from collections.abc import Sequence as Seq
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.source import hash_checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from specexport.channel_ranges import CacheRange
    from specexport.frontend.calibrate import activation_ranges
    from specexport.frontend.layers import FeatureRequest
    from specexport.frontend.load import count_layers, load_checkpoint, round_weights
    from specexport.frontend.lora_fit import low_ranks, merge_adapter, read_adapter, with_adapter
    from specexport.frontend.prune import choose_layers, drop_layers
    from specexport.frontend.trace import TracedModel

__all__ = [
    "Checkpoint",
    "activation_ranges",
    "cache_ranges",
    "choose_layers",
    "count_layers",
    "drop_layers",
    "fix_rope",
    "hash_checkpoint",
    "load_checkpoint",
    "low_ranks",
    "merge_adapter",
    "read_adapter",
    "reference_logits",
    "round_weights",
    "trace_checkpoint",
    "with_adapter",
]


_MODULES = {
    "activation_ranges": "specexport.frontend.calibrate",
    "choose_layers": "specexport.frontend.prune",
    "count_layers": "specexport.frontend.load",
    "drop_layers": "specexport.frontend.prune",
    "load_checkpoint": "specexport.frontend.load",
    "low_ranks": "specexport.frontend.lora_fit",
    "merge_adapter": "specexport.frontend.lora_fit",
    "read_adapter": "specexport.frontend.lora_fit",
    "round_weights": "specexport.frontend.load",
    "with_adapter": "specexport.frontend.lora_fit",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A function of a module that imports torch, on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def cache_ranges(checkpoint: Checkpoint, pieces: "Seq[npt.NDArray[np.int64]]", *, max_len: int) -> "list[CacheRange]":
    """How large the keys and values of each layer get on token ids, int64, spread over ``max_len`` positions.

    Raises ``UnsupportedModelError`` if the model cannot be exported.
    """
    from specexport.frontend.calibrate import cache_ranges as measure
    from specexport.frontend.experts import traceable_experts
    from specexport.frontend.geometry import probe_layers
    from specexport.frontend.streaming import stand_ins

    model: Any = checkpoint.model
    with traceable_experts(model, grouped=False):
        with stand_ins(model, checkpoint.stored):
            calls = probe_layers(model)
        return measure(checkpoint, calls, pieces, max_len)


def fix_rope(checkpoint: Checkpoint, max_len: int) -> None:
    """Hold rotary tables that depend on the length at those of the longest sequence, in place; see ``Checkpoint.rope``.

    Attention that would leave entries of a longer sequence out is held to all of them; see ``frontend.short``. Raises
    ``UnsupportedModelError`` if tables depend on the length in a way that cannot be held.
    """
    from specexport.frontend.rope import fix_rope as hold
    from specexport.frontend.short import hold_short

    checkpoint.rope = hold(checkpoint.model, max_len)
    if hold_short(checkpoint.model, max_len):
        checkpoint.max_positions = max_len


def trace_checkpoint(
    checkpoint: Checkpoint, features: "FeatureRequest | None" = None, *, group_experts: bool = False
) -> "TracedModel":
    """Trace a checkpoint to ONNX IR with one ``specexport::UnpaddedAttention`` a layer.

    Before tracing, the packed model is run on a few tokens against the model's own attention, so that a model that
    behaves unlike its configuration says is refused too. ``UnsupportedModelError`` names the model's type and the
    reason. ``features`` is what the target gives to a draft head; for ``group_experts`` see ``Backend.groups_experts``.
    """
    from specexport.frontend.check import check_packed
    from specexport.frontend.experts import traceable_experts
    from specexport.frontend.geometry import probe_layers
    from specexport.frontend.refuse import check_config
    from specexport.frontend.streaming import stand_ins
    from specexport.frontend.trace import trace_model

    model: Any = checkpoint.model
    check_config(model)
    with traceable_experts(model, grouped=group_experts):
        with stand_ins(model, checkpoint.stored):
            calls = probe_layers(model)
            check_packed(model, calls)
        return trace_model(model, calls, checkpoint.stored, features)


def reference_logits(checkpoint: Checkpoint, sequences: "list[list[int]]") -> "list[npt.NDArray[np.float32]]":
    """Logits float32 [len, V] of each sequence by eager transformers: the model's own attention and masks, no cache.

    Nothing of the export is used. Raises ``UnsupportedModelError`` if the model's own forward pass fails.
    """
    from specexport.frontend.check import eager_logits
    from specexport.frontend.refuse import refuse
    from specexport.frontend.streaming import streamed
    from specexport_runtime.errors import SpecexportError

    with streamed(checkpoint.model, checkpoint.stored):
        try:
            return eager_logits(checkpoint.model, sequences, together=bool(checkpoint.stored))
        except SpecexportError:
            raise
        except Exception as error:  # whatever a model's own code may raise
            reason = f"its own forward pass fails ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
            raise refuse(checkpoint.model, reason) from error

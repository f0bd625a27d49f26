"""Frontend: from a checkpoint to a traced model.

``load_checkpoint`` reads, ``drop_layers`` makes a model shallower, ``trace_checkpoint`` traces, ``reference_logits`` is
what all are measured against.
Importing this package imports neither torch nor transformers; its functions do.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from specexport.frontend.checkpoint import Checkpoint
from specexport.frontend.source import hash_checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from specexport.channel_ranges import CacheRange, ChannelRanges
    from specexport.frontend.lora import LoraSource
    from specexport.frontend.lora_fit import LoraAdapter
    from specexport.frontend.taps import FeatureRequest
    from specexport.frontend.trace import TracedModel
    from specexport.passes.low_rank import LowRank

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


def load_checkpoint(
    source: str,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    keep: bool = False,
    stream: bool = False,
) -> Checkpoint:
    """Load a checkpoint: a Hugging Face folder, a hub id, or a ``.gguf`` file.

    Weights are read from safetensors (or GGUF) only, and from nothing that could run code.

    Args:
        source: folder, hub id or file.
        dtype: numpy name of the dtype wanted; smaller float types are widened without loss.
        revision: hub revision.
        trust_remote_code: let Python code from the checkpoint run.
        keep: tell the quantized weights of a checkpoint too, as they are stored.
        stream: leave matrices in their files where that can be; see ``Checkpoint.stored``. Only functions of this
            package run such a model.

    Raises:
        CheckpointError: it is missing, empty, damaged, pickled or quantized, or the hub cannot be reached; or
            weights are to be kept in a format that no engine multiplies.
        UnsupportedModelError: it is not a causal language model that transformers knows.
    """
    from specexport.frontend.load import load

    return load(source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, keep=keep, stream=stream)


def round_weights(checkpoint: Checkpoint, dtype: str) -> None:
    """Give each weight of a loaded model the value that it has in ``dtype``; what it computes in stays.

    Args:
        checkpoint: the loaded model; changed.
        dtype: ``"bfloat16"`` or ``"float16"``.

    Raises:
        CheckpointError: a weight is larger than ``dtype`` can hold.
    """
    from specexport.frontend.rounded import round_weights

    round_weights(checkpoint, dtype)


def count_layers(source: str) -> int:
    """How many decoder layers a checkpoint has, by its configuration alone.

    Args:
        source: folder, hub id or file.

    Raises:
        CheckpointError: it is missing, or its configuration cannot be read.
    """
    from specexport.frontend.load import count_layers

    return count_layers(source)


def activation_ranges(checkpoint: Checkpoint, pieces: "Seq[npt.NDArray[np.int64]]") -> "dict[str, ChannelRanges]":
    """How large each input channel of each linear layer gets; the first token of each piece is told apart.

    Args:
        checkpoint: the loaded model.
        pieces: token ids that the model reads, int64.

    Returns:
        by name of the layer's weight in a traced graph; a weight of several names is under each.
    """
    from specexport.frontend.calibrate import ranges

    return ranges(checkpoint, pieces)


def cache_ranges(checkpoint: Checkpoint, pieces: "Seq[npt.NDArray[np.int64]]", *, max_len: int) -> "list[CacheRange]":
    """How large the keys and values of each layer get.

    Args:
        checkpoint: the loaded model.
        pieces: token ids that the model reads, int64.
        max_len: positions that the pieces are spread over.

    Raises:
        UnsupportedModelError: the model cannot be exported.
    """
    from specexport.frontend.calibrate_kv import cache_ranges as measure
    from specexport.frontend.experts import traceable_experts
    from specexport.frontend.geometry import probe_layers
    from specexport.frontend.streaming import stand_ins

    model: Any = checkpoint.model
    with traceable_experts(model, grouped=False):
        with stand_ins(model, checkpoint.stored):
            calls = probe_layers(model)
        return measure(checkpoint, calls, pieces, max_len)


def choose_layers(
    checkpoint: Checkpoint, count: int, pieces: "Seq[npt.NDArray[np.int64]]"
) -> "list[tuple[int, float]]":
    """The decoder layers that change the hidden state least, chosen one after another; nothing is changed.

    The similarity of a layer is the cosine of its input and its output, mean over tokens (Men et al. 2024). It is
    measured anew after each choice, with the layers chosen before left out.

    Args:
        checkpoint: the loaded model.
        count: how many layers to choose, fewer than there are. The pieces are read that often.
        pieces: token ids that the model reads, int64.

    Returns:
        number and similarity (-1 to 1) of each, in the order of choice.

    Raises:
        UnsupportedModelError: the model cannot be exported, or its layers cannot be found or watched.
    """
    from specexport.frontend.prune import choose

    return choose(checkpoint, count, pieces)


def drop_layers(checkpoint: Checkpoint, dropped: "Collection[int]", hint: str | None = None) -> None:
    """Take decoder layers out of a loaded model, in place. The others keep weights, order and kind; numbers are new.

    The model is run before and after: with the layers handing their input on, and without them.

    Args:
        checkpoint: the loaded model.
        dropped: numbers of the layers, not all of them.
        hint: what to do where that cannot be; None for what a build says.

    Raises:
        UnsupportedModelError: the model cannot be exported, its layers cannot be found, or something of it counts on
            all of them (inputs for each layer, a scale by their number): the two runs differ.
    """
    from specexport.frontend.prune import drop

    drop(checkpoint, dropped) if hint is None else drop(checkpoint, dropped, hint)


def fix_rope(checkpoint: Checkpoint, max_len: int) -> None:
    """Hold rotary tables that depend on the length at those of the longest sequence, in place; see ``Checkpoint.rope``.

    Attention that would leave entries of a longer sequence out is held to all of them; see ``frontend.short``.

    Args:
        checkpoint: the loaded model.
        max_len: most tokens of a sequence.

    Raises:
        UnsupportedModelError: they depend on the length in a way that cannot be held.
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
    behaves unlike its configuration says is refused too.

    Args:
        checkpoint: the loaded model.
        features: what it gives to a draft head; None for nothing.
        group_experts: see ``Backend.groups_experts``.

    Raises:
        UnsupportedModelError: the model cannot be traced exactly; the message names its type and the reason.
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
    """Logits of eager transformers: the model's own attention and masks, no cache, one sequence at a time.

    Args:
        checkpoint: the loaded model; nothing of the export is used.
        sequences: token ids.

    Returns:
        per sequence, logits [len, V] float32.

    Raises:
        UnsupportedModelError: the model's own forward pass fails.
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


def read_adapter(source: "LoraSource", model: Any) -> "LoraAdapter":
    """Fit a LoRA adapter to a model; see ``specexport.frontend.lora.find_adapter``.

    Args:
        source: the adapter.
        model: only names and shapes are looked at.

    Raises:
        CheckpointError: it is damaged, or of another model; names the tensor.
    """
    from specexport.frontend.lora_fit import read_adapter as fit

    return fit(source, model)


def merge_adapter(checkpoint: Checkpoint, adapter: "LoraAdapter") -> None:
    """Add an adapter to the weights of a loaded checkpoint, in place: W + s B A in float32.

    Raises:
        CheckpointError: a weight is kept in the integers of a quantized checkpoint.
    """
    from specexport.frontend.lora_merge import merge_adapter as merge

    merge(checkpoint, adapter)


def with_adapter(checkpoint: Checkpoint, adapter: "LoraAdapter") -> AbstractContextManager[Checkpoint]:
    """Within the block, the float model that an adapter makes of a checkpoint, which is as it was afterwards."""
    from specexport.frontend.lora_merge import with_adapter as adapted

    return adapted(checkpoint, adapter)


def low_ranks(adapter: "LoraAdapter") -> "dict[str, LowRank]":
    """The products of an adapter, by the name of the weight beside which each is in a traced graph.

    Raises:
        CheckpointError: it changes an embedding, which is no product.
    """
    from specexport.frontend.lora_merge import low_ranks as products

    return products(adapter)

"""Frontend: from a checkpoint to a traced model.

``load_checkpoint`` reads, ``trace_checkpoint`` traces, ``reference_logits`` is what both are measured against.
Importing this package imports neither torch nor transformers; its functions do.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specexport.frontend.source import hash_checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from specexport.frontend.trace import TracedModel

__all__ = ["Checkpoint", "hash_checkpoint", "load_checkpoint", "reference_logits", "trace_checkpoint"]


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        source: hub id, or the name of the local folder or file.
        source_sha256: hash over the checkpoint's files.
        architecture: model class name.
        model: the model, in eval mode, weights in ``dtype``.
        dtype: numpy name of the weights' dtype.
        tokenizer_json: the tokenizer in the tokenizers library's own format.
        chat_template: Jinja template, or None.
        special_tokens: name to text, for chat templates (``bos_token``, ``eos_token``, …).
        bos_token_id: beginning-of-sequence token, or None.
        eos_token_ids: every token that ends a text.
        vocab_size: rows of the LM head (V).
        num_parameters: parameters, tied ones counted once.
        max_positions: positions the model supports, or None.
    """

    source: str
    source_sha256: str
    architecture: str
    model: "torch.nn.Module"
    dtype: str
    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    num_parameters: int
    max_positions: int | None


def load_checkpoint(
    source: str, *, dtype: str = "float32", revision: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Load a checkpoint: a Hugging Face folder, a hub id, or a ``.gguf`` file.

    Weights are read from safetensors (or GGUF) only, and from nothing that could run code.

    Args:
        source: folder, hub id or file.
        dtype: numpy name of the dtype wanted; smaller float types are widened without loss.
        revision: hub revision.
        trust_remote_code: let Python code from the checkpoint run.

    Raises:
        CheckpointError: it is missing, empty, damaged, pickled or quantized, or the hub cannot be reached.
        UnsupportedModelError: it is not a causal language model that transformers knows.
    """
    from specexport.frontend.load import load

    return load(source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)


def trace_checkpoint(checkpoint: Checkpoint) -> "TracedModel":
    """Trace a checkpoint to ONNX IR with one ``specexport::UnpaddedAttention`` a layer.

    Before tracing, the packed model is run on a few tokens against the model's own attention, so that a model that
    behaves unlike its configuration says is refused too.

    Raises:
        UnsupportedModelError: the model cannot be traced exactly; the message names its type and the reason.
    """
    from specexport.frontend.check import check_packed
    from specexport.frontend.experts import batched_experts
    from specexport.frontend.geometry import probe_layers
    from specexport.frontend.refuse import check_config
    from specexport.frontend.trace import trace_model

    model: Any = checkpoint.model
    check_config(model)
    with batched_experts(model):
        calls = probe_layers(model)
        check_packed(model, calls)
        return trace_model(model, calls)


def reference_logits(checkpoint: Checkpoint, sequences: "list[list[int]]") -> "list[npt.NDArray[np.float32]]":
    """Logits of eager transformers: the model's own attention and masks, no cache, one sequence at a time.

    Args:
        checkpoint: the loaded model; nothing of the export is used.
        sequences: token ids.

    Returns:
        per sequence, logits [len, V] float32.
    """
    from specexport.frontend.check import eager_logits

    return eager_logits(checkpoint.model, sequences)

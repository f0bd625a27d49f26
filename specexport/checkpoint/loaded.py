"""A checkpoint that was loaded: the model, its tokenizer, and what a bundle must know of both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from specexport.checkpoint.stored import StoredWeight
    from specexport.passes.block_weight import BlockWeight


class FixedRope(NamedTuple):
    """What rotary embeddings were held at."""

    max_len: int  # tokens of the sequence that the angles are for
    text: str  # rope type and table, for people


@dataclass
class Checkpoint:
    """A loaded checkpoint."""

    source: str  # hub id, or the name of the local folder or file
    source_sha256: str  # over the checkpoint's files
    architecture: str  # model class name
    model: "torch.nn.Module"  # in eval mode, weights in ``dtype``; some may be in files, see ``stored``
    dtype: str  # numpy name
    tokenizer_json: bytes  # in the tokenizers library's own format
    chat_template: str | None  # Jinja
    special_tokens: dict[str, str]  # name to text, for chat templates (``bos_token``, ``eos_token``, …)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # every token that ends a text
    vocab_size: int  # rows of the LM head (V)
    num_parameters: int  # tied ones counted once
    max_positions: int | None  # tokens of the longest sequence that the model supports; None for no limit
    # Longest sequence for which no rotary table depends on the length and no layer leaves entries out; None for any
    plain_positions: int | None = None
    # What rotary tables that depend on the length are held at, see ``freeze_length``; None where there are none
    rope: FixedRope | None = None
    # Parameters on the ``meta`` device and where they are read, by name; a tied one under each of its names
    stored: "Mapping[str, StoredWeight]" = field(default_factory=dict)
    # Quantized weights as stored, by name in a traced graph; only where that was asked for
    kept: "Mapping[str, BlockWeight]" = field(default_factory=dict)

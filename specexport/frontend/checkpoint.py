"""A checkpoint that was loaded: the model, its tokenizer, and what a bundle must know of both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from specexport.frontend.rope import FixedRope
    from specexport.frontend.stored import StoredWeight
    from specexport.passes.block_weight import BlockWeight


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        source: hub id, or the name of the local folder or file.
        source_sha256: hash over the checkpoint's files.
        architecture: model class name.
        model: the model, in eval mode, weights in ``dtype``; some may be in files, see ``stored``.
        dtype: numpy name of the weights' dtype.
        tokenizer_json: the tokenizer in the tokenizers library's own format.
        chat_template: Jinja template, or None.
        special_tokens: name to text, for chat templates (``bos_token``, ``eos_token``, …).
        bos_token_id: beginning-of-sequence token, or None.
        eos_token_ids: every token that ends a text.
        vocab_size: rows of the LM head (V).
        num_parameters: parameters, tied ones counted once.
        max_positions: positions the model supports, or None.
        plain_positions: longest sequence for which no rotary table depends on the length, or None.
        rope: what rotary tables that depend on the length are held at, see ``fix_rope``; None where there are none.
        stored: parameters that the model has no data of (they are on the ``meta`` device), and where they are read, by
            name; a tied one under each of its names.
        kept: quantized weights as the checkpoint stores them, by name in a traced graph; only where that was asked for.
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
    plain_positions: int | None = None
    rope: "FixedRope | None" = None
    stored: "Mapping[str, StoredWeight]" = field(default_factory=dict)
    kept: "Mapping[str, BlockWeight]" = field(default_factory=dict)

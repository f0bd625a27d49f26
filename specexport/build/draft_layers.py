"""How many decoder layers a draft keeps, and the tokens that they are measured on.

Which layers those are, :mod:`specexport.frontend.prune` says. Imports the tokenizers library when it cuts pieces.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from specexport.build.draft_vocabulary import hash_texts, tokenize
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import RecipeError
from specexport_runtime.executors.base import Int64Array

NUM_PIECES, PIECE_LEN = 4, 256
"""1,024 tokens: they are read once for each layer that goes, so a draft of some size takes seconds a layer."""


class LayerPrune(NamedTuple):
    """What a draft's layers are cut down by."""

    num_layers: int  # N, layers that stay
    texts: tuple[str, ...]  # what layers are measured on

    @property
    def texts_sha256(self) -> str:
        """Hash of the texts and of where one ends."""
        return hash_texts(self.texts)


def check_num_layers(kept: int, num_layers: int) -> None:
    """Raise a RecipeError if more layers are to be kept than the whole draft has."""
    if kept > num_layers:
        raise RecipeError(
            f"draft_layers is {kept}, and the draft has {num_layers}.", f"give 1 to {num_layers}, or leave it out."
        )


def cut_pieces(
    texts: Seq[str],
    tokenizer_json: bytes,
    vocab_size: int,
    *,
    max_positions: int | None = None,  # most tokens that the model can read; None for no limit
    num_pieces: int = NUM_PIECES,  # at most
    piece_len: int = PIECE_LEN,  # tokens of each piece at most
) -> list[Int64Array]:
    """Pieces of the texts, int64 token ids, spread evenly over all of them.

    A piece begins with the token that the tokenizer puts before a text. Tokens without a row are left out. Raises
    RecipeError if no token is left.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    first = tokenizer.encode("").ids[:1]
    ids = np.concatenate(list(tokenize(texts, tokenizer)))
    ids = ids[ids < vocab_size]
    if not ids.size:
        raise RecipeError("draft_vocab_texts has no token that the draft knows.", "give texts like those it will read.")
    length = min(piece_len, max_positions or piece_len, len(ids) + len(first)) - len(first)
    count = min(num_pieces, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [np.array([*first, *ids[start : start + length]], np.int64) for start in starts]


def describe_layers(entry: ModelEntry) -> str:
    """Which layers a draft was built without, in words; empty where it has all."""
    if not entry.dropped_layers:
        return ""
    dropped = ", ".join(f"{layer} (similarity {similarity:.3f})" for layer, similarity in entry.dropped_layers)
    kept = len(entry.attention.layers)
    return f"{kept} of {kept + len(entry.dropped_layers)} layers, without {dropped}"

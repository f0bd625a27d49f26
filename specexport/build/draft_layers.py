"""How many decoder layers a draft keeps, and the tokens that they are measured on.

Which layers those are, :mod:`specexport.frontend.prune` says. Imports the tokenizers library when it cuts pieces.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from specexport.build.draft_vocabulary import hash_texts, tokenize
from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.errors import RecipeError
from specexport_runtime.executors.base import Int64Array

NUM_PIECES, PIECE_LEN = 4, 256
"""1,024 tokens: they are read once for each layer that goes, so a draft of some size takes seconds a layer."""


class LayerPrune(NamedTuple):
    """What a draft's layers are cut down by.

    Attributes:
        num_layers: N, layers that stay.
        texts: what layers are measured on.
    """

    num_layers: int
    texts: tuple[str, ...]

    @property
    def texts_sha256(self) -> str:
        """Hash of the texts and of where one ends."""
        return hash_texts(self.texts)


def check_num_layers(kept: int, num_layers: int) -> None:
    """Refuse to keep more layers than there are.

    Args:
        kept: N.
        num_layers: layers of the whole draft.

    Raises:
        RecipeError: N is beyond them.
    """
    if kept > num_layers:
        raise RecipeError(
            f"draft_layers is {kept}, and the draft has {num_layers}.", f"give 1 to {num_layers}, or leave it out."
        )


def cut_pieces(
    texts: Seq[str],
    tokenizer_json: bytes,
    vocab_size: int,
    *,
    max_positions: int | None = None,
    num_pieces: int = NUM_PIECES,
    piece_len: int = PIECE_LEN,
) -> list[Int64Array]:
    """Pieces of the texts, spread evenly over all of them.

    Args:
        texts: the texts, one behind the other.
        tokenizer_json: the draft's ``tokenizer.json``. A piece begins with the token that it puts before a text.
        vocab_size: V; tokens without a row are left out.
        max_positions: most tokens that the draft can read; None for no limit.
        num_pieces: how many there are at most.
        piece_len: how many tokens each has at most.

    Returns:
        up to ``num_pieces`` arrays of up to ``piece_len`` token ids, int64.

    Raises:
        RecipeError: no token is left.
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
    return f"{len(entry.layers)} of {len(entry.layers) + len(entry.dropped_layers)} layers, without {dropped}"

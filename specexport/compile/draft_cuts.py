"""What a draft is cut to: how many decoder layers, and which tokens of its LM head.

Which layers those are, :mod:`specexport.trace.prune` says. The tokens are the likeliest ones, counted on texts. A
text is what the target is to write, or something like it. Tokens that were seen equally often, or never, come in the
order of their ids: in a BPE vocabulary that is the order of merges, and so roughly of frequency. Imports the tokenizers
library when it counts.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport.compile.tokenizer import load_tokenizer
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.cli.prompts import json_lines, read_text
from specexport_runtime.errors import InvalidRequestError, RecipeError, UnsupportedModelError
from specexport_runtime.executors.base import Int32Array, Int64Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_PIECES, PIECE_LEN = 4, 256
"""1,024 tokens: they are read once for each layer that goes, so a draft of some size takes seconds a layer."""

_FIELDS = ("text", "prompt", "reference")
_FORM = 'give UTF-8 text, or JSON lines like {"text": "…"} in a file that ends in .jsonl.'
_BATCH = 1000  # texts that are tokenized at a time


class LayerPrune(NamedTuple):
    """What a draft's layers are cut down by."""

    num_layers: int  # N, layers that stay
    texts: tuple[str, ...]  # what layers are measured on

    def key(self) -> list[Any]:
        """What of it decides an engine."""
        return [self.num_layers, hash_texts(self.texts)]


def check_num_layers(kept: int, num_layers: int) -> None:
    """Raise a RecipeError if more layers are to be kept than the whole draft has."""
    if kept > num_layers:
        raise RecipeError(
            f"draft_layers is {kept}, and the draft has {num_layers}.", f"give 1 to {num_layers}, or leave it out."
        )


def cut_pieces(
    texts: Sequence[str],
    tokenizer_json: bytes,
    vocab_size: int,
    *,
    max_positions: int | None = None,  # most tokens that the model can read; None for no limit
    num_pieces: int = NUM_PIECES,  # at most
    piece_len: int = PIECE_LEN,  # tokens of each piece at most
) -> list[Int64Array]:
    """Pieces of the texts, int64 token ids, spread evenly over all of them.

    A piece begins with the token that the tokenizer puts before a text. Tokens without a row are left out. Raises
    RecipeError if no token is left, and UnsupportedModelError if the model can read none.
    """
    tokenizer = load_tokenizer(tokenizer_json)
    first = tokenizer.encode("").ids[:1]
    ids = np.concatenate(list(tokenize(texts, tokenizer)))
    ids = ids[ids < vocab_size]
    if not ids.size:
        raise RecipeError(
            "the texts to measure a model on have no token that it knows.",
            "give a draft texts like those it will read (draft_vocab_texts), and any model the tokenizer it was "
            "trained with.",
        )
    length = min(piece_len, max_positions or piece_len, len(ids) + len(first)) - len(first)
    if length < 1:
        raise UnsupportedModelError(
            f"the model reads {max_positions} tokens at most, of which {len(first)} begin each text: none are left to "
            "measure it on.",
            "take a model that reads longer texts.",
        )
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


class HeadCut(NamedTuple):
    """What a draft's LM head is cut down by."""

    size: int  # N, tokens that stay
    texts: tuple[str, ...]  # what tokens are counted on
    ends: tuple[int, ...] = ()  # ids that end a text of the target; they stay

    def key(self) -> list[Any]:
        """What of it decides an engine."""
        return [self.size, hash_texts(self.texts)]


def hash_texts(texts: Sequence[str]) -> str:
    """Hash of texts and of where one ends."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def read_counting_texts(path: str | None) -> tuple[str, ...]:
    """Texts to count tokens and to measure layers on: a file's, or those of a folder's files in the order of names.

    Hidden files of a folder are left out. A file that ends in ``.jsonl`` holds an object a line with ``text`` (what
    ``specexport generate --json`` writes), or else ``prompt`` and perhaps ``reference``; any other file is a text. None
    takes the prompts and references that ``specexport bench`` has. Raises RecipeError if there is no such path, a file
    cannot be read or has another form, or there is no text.
    """
    place = Path(str(files("specexport") / "bench" / "builtin_prompts.jsonl")) if path is None else Path(path)
    place = place.expanduser()
    if not place.exists():
        raise RecipeError(f"draft_vocab_texts {place} does not exist.", "give a file or a folder with texts.")
    texts = tuple(text for file in _list_text_files(place) for text in _read_texts(file) if text.strip())
    if not texts:
        raise RecipeError(f"draft_vocab_texts {place} has no text.", _FORM)
    return texts


def _list_text_files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = sorted(file for file in place.rglob("*") if file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(place).parts)]


def _read_texts(file: Path) -> Iterator[str]:
    try:
        if file.suffix == ".jsonl":
            for number, record in json_lines(file):
                yield from _read_record_texts(record, f"{file}, line {number}")
        else:
            yield read_text(file)
    except InvalidRequestError as error:
        raise RecipeError(f"draft_vocab_texts: {error.message}", _FORM) from error


def _read_record_texts(record: dict[str, Any], where: str) -> Iterator[str]:
    given = [(field, record[field]) for field in _FIELDS if record.get(field) is not None]
    if not given or given[0][0] == "reference":
        raise RecipeError(f"draft_vocab_texts: {where}: there is no field `text` or `prompt`.", _FORM)
    # Beside a text, the prompt is what it was written for: the draft has to guess the text only.
    for field, value in given[:1] if given[0][0] == "text" else given:
        if not isinstance(value, str):
            raise RecipeError(f"draft_vocab_texts: {where}: `{field}` is {value!r}, which is no text.", _FORM)
        yield value


def tokenize(texts: Sequence[str], tokenizer: "Tokenizer") -> Iterator[Int64Array]:
    """Token ids of each text, int64, without special tokens."""
    for start in range(0, len(texts), _BATCH):
        for encoded in tokenizer.encode_batch(list(texts[start : start + _BATCH]), add_special_tokens=False):
            yield np.array(encoded.ids, np.int64)


def check_head_size(size: int, vocab_size: int) -> None:
    """Raise a RecipeError if an LM head is to keep more tokens than its ``vocab_size`` rows."""
    if size > vocab_size:
        raise RecipeError(
            f"draft_vocab_size is {size}, a vocabulary size beyond the draft's: its LM head has {vocab_size} rows.",
            f"give 1 to {vocab_size}, or leave it out.",
        )


def rank_head_ids(
    cut: HeadCut,
    tokenizer_json: bytes,
    vocab_size: int,
    *,
    keep: Sequence[int] = (),
    special_tokens: Sequence[str] = (),
) -> Int32Array:
    """All token ids, int32 [V], those first that a draft's LM head keeps first: the likeliest.

    Ahead of them are the ids that must stay: ``keep``, ``cut.ends``, and those of the ``special_tokens``, texts of
    named tokens. Raises RecipeError if N is beyond V, or too small for what must stay.
    """
    check_head_size(cut.size, vocab_size)
    tokenizer = load_tokenizer(tokenizer_json)
    named = [token for text in special_tokens if (token := tokenizer.token_to_id(text)) is not None]
    kept = np.array(sorted({token for token in (*keep, *cut.ends, *named) if 0 <= token < vocab_size}), np.int64)
    if len(kept) > cut.size:
        raise RecipeError(
            f"draft_vocab_size is {cut.size}, and {len(kept)} special tokens must stay (a draft has to be able to end "
            "a text).",
            f"give {len(kept)} or more; a few thousand are usual.",
        )
    counts = np.zeros(vocab_size, np.int64)
    for ids in tokenize(cut.texts, tokenizer):
        counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    counts[kept] = np.iinfo(np.int64).max
    return np.argsort(-counts, kind="stable").astype(np.int32)  # stable: the lower id first on a tie

"""The store of earlier texts as an engine is loaded with it: a bound, a corpus of files, and a file to keep it in."""

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specexport_runtime.drafters.suffix_segment import SEPARATOR, TokenArray, split_texts
from specexport_runtime.drafters.suffix_store import DEFAULT_MEMORY_MB, SuffixStore, tokens_for_megabytes
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.user_cache import cache_folder, is_private, replace_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = "specexport.suffixes/1"
CACHE = "cache"
"""In place of a path: a file in the user's cache, one for each tokenizer."""
_LARGEST_MB = 32_000  # 2^31 tokens: places are 32-bit numbers
_LARGEST_FILE = 4 << 20  # bytes of a corpus file; larger ones are data, not text to write like


class KeptSuffixes(NamedTuple):
    """A store, and where it is kept."""

    store: SuffixStore
    file: Path | None  # None if the store ends with the engine
    tokenizer_sha256: str  # of the tokenizer, which gives ids their meaning

    def save(self) -> None:
        """Write the store to its file in one step, readable by this user only; OSError if it cannot be written."""
        if self.file is not None:
            _write_store(self.file, self.store, self.tokenizer_sha256)


def open_suffixes(
    tokenizer: "Tokenizer",
    *,
    tokenizer_sha256: str,
    vocab_size: int,  # rows of the target's LM head (V): ids from here on are none
    memory_mb: int | None = None,  # most megabytes (10^6 bytes) of texts and their order; None: ``DEFAULT_MEMORY_MB``
    corpus: Path | str | None = None,  # folder of text files that every request may copy from
    # The store begins with it, and is written to it in the end; ``"cache"``: see ``CACHE``. None for neither.
    file: Path | str | None = None,
) -> KeptSuffixes:
    """Make the store of an engine; InvalidRequestError for a bound, a corpus or a file that does not fit."""
    memory = DEFAULT_MEMORY_MB if memory_mb is None else memory_mb
    _check_memory(memory)
    try:
        store = SuffixStore(
            tokens_for_megabytes(memory), () if corpus is None else _read_corpus(Path(corpus), tokenizer)
        )
    except ValueError as error:
        raise InvalidRequestError(
            f"corpus {corpus}: {error.args[0].rstrip('.')}, which is what {memory} MB hold.",
            "give a smaller corpus, or more memory (--suffix-memory).",
        ) from None
    place = _find_store_file(file, tokenizer_sha256)
    if place is not None and place.exists():
        for scope, tokens in _read_store(place, tokenizer_sha256, vocab_size, trusted=file != CACHE):
            store.restore(scope, split_texts(tokens))
    return KeptSuffixes(store, place, tokenizer_sha256)


def _check_memory(megabytes: int) -> None:
    if not 1 <= megabytes <= _LARGEST_MB:
        raise InvalidRequestError(f"suffix_memory_mb is {megabytes}.", f"give a number from 1 to {_LARGEST_MB}.")
    if hasattr(os, "sysconf"):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1_000_000
        if 0 < free < megabytes:
            raise InvalidRequestError(
                f"suffix_memory_mb is {megabytes}, and this machine has {free} MB of memory.", "give less."
            )


def _read_corpus(folder: Path, tokenizer: "Tokenizer") -> Iterator[list[int]]:
    """Token ids of a folder's text files, in the order of their names; hidden, large and binary files are left out."""
    if not folder.is_dir():
        raise InvalidRequestError(f"corpus {folder} is no folder.", "give a folder with text files.")
    found = False
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if "\0" not in text and text.strip():
            found = True
            yield tokenizer.encode(text, add_special_tokens=False).ids
    if not found:
        raise InvalidRequestError(
            f"corpus {folder} has no text.", f"give a folder with UTF-8 files of up to {_LARGEST_FILE >> 20} MiB."
        )


def _find_store_file(file: Path | str | None, tokenizer_sha256: str) -> Path | None:
    if file is None:
        return None
    if file == CACHE:
        folder = cache_folder("suffixes")
        return None if folder is None else folder / f"{tokenizer_sha256[:32]}.npz"
    return Path(file)


def _write_store(path: Path, store: SuffixStore, tokenizer_sha256: str) -> None:
    kept = dict(store.items())
    scopes = [{"scope": scope, "num_tokens": len(tokens)} for scope, tokens in kept.items()]
    head = json.dumps({"schema": SCHEMA, "tokenizer_sha256": tokenizer_sha256, "scopes": scopes}).encode()
    tokens = np.concatenate([np.zeros(0, np.int32), *kept.values()])
    replace_file(path, lambda file: np.savez_compressed(file, head=np.frombuffer(head, np.uint8), tokens=tokens))


def _read_store(
    path: Path, tokenizer_sha256: str, vocab_size: int, *, trusted: bool
) -> Iterator[tuple[str, TokenArray]]:
    """Scopes and their texts in a file; a file of the cache that others may have written counts as damaged."""
    fix = "name another file, or delete this one: it is made again."
    try:
        with path.open("rb") as stream:
            if not trusted and not is_private(os.fstat(stream.fileno())):
                raise ValueError("others may write to it")
            with np.load(stream, allow_pickle=False) as data:
                head: Any = json.loads(data["head"].tobytes())
                tokens = data["tokens"]
        if head["schema"] != SCHEMA or tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError("it has another form")
        sizes = [(str(each["scope"]), int(each["num_tokens"])) for each in head["scopes"]]
        if any(size < 0 for _, size in sizes) or sum(size for _, size in sizes) != len(tokens):
            raise ValueError("its sizes do not add up")
        if len(tokens) and not (tokens.min() >= SEPARATOR and tokens.max() < vocab_size):
            raise ValueError("it has token ids that this bundle does not know")
        owner = str(head["tokenizer_sha256"])
    except OSError as error:
        raise InvalidRequestError(f"suffix file {path} cannot be read ({error.strerror or error}).", fix) from error
    except (ValueError, KeyError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise InvalidRequestError(f"suffix file {path} is damaged: {error}.", fix) from error
    if owner != tokenizer_sha256:
        raise InvalidRequestError(f"suffix file {path} was written with another tokenizer.", fix)
    start = 0
    for scope, size in sizes:
        yield scope, tokens[start : start + size]
        start += size

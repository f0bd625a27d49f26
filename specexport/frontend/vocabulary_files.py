"""Vocabularies without a ``tokenizer.json``: what reading them takes, and whether what was made of them is right.

Where transformers finds no package or no file for a vocabulary, it says something else, or makes a tokenizer of three
tokens.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError

PATTERNS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
_RANKED = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")
_SAMPLES = ("Hello world", "one  two", "line\nline", "déjà vu, 日本 😀 42")
_ADD = "add its tokenizer.json to the checkpoint."
_ADD_OR_NAME = f"{_ADD[:-1]}, or name the class of the files it has as `tokenizer_class` in tokenizer_config.json."
_NO_WAY = "Couldn't instantiate the backend tokenizer"
"""How transformers begins a message that then asks for packages which would not help."""


def explain(source: Source, error: Exception) -> CheckpointError:
    """What to tell of the error of a class that was to make a tokenizer."""
    cannot = f"{source.name}: the tokenizer cannot be loaded"
    if source.gguf_file is not None:
        return CheckpointError(f"{cannot} ({type(error).__name__}: {error}).", _ADD)
    files = sorted(file for pattern in PATTERNS for file in source.folder.glob(pattern))
    names = ", ".join(file.name for file in files)
    if not files:
        return CheckpointError(f"{cannot}: no tokenizer.json and no vocabulary is there.", _ADD)
    for file in files:
        missing = [package for package in _packages(file) if not _is_installed(package)]
        if missing:
            return CheckpointError(
                f"{source.name}: reading {file.name} takes {' and '.join(missing)}, not installed here.",
                f"pip install {' '.join(missing)}, or {_ADD}",
            )
    if str(error).startswith(_NO_WAY):
        return CheckpointError(f"{source.name}: its tokenizer's class makes nothing of {names}.", _ADD_OR_NAME)
    return CheckpointError(f"{cannot} from {names} ({type(error).__name__}: {error}).", _ADD)


def check_vocabulary(source: Source, tokenizer: Any) -> None:
    """Refuse a tokenizer that was made without the checkpoint's vocabulary, or that splits text in other pieces."""
    given = getattr(tokenizer, "vocab_file", None)
    names = [*tokenizer.vocab_files_names.values(), *([Path(given).name] if given else [])]
    found = [name for name in names if (source.folder / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{source.name}: {type(tokenizer).__name__} finds no vocabulary, which would be in {' or '.join(names)}.",
            _ADD_OR_NAME,
        )
    for name in found:
        if "sentencepiece" in _packages(source.folder / name):
            _check_pieces(source, name, tokenizer)


def _check_pieces(source: Source, name: str, tokenizer: Any) -> None:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(source.folder / name))
    for text in _SAMPLES:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = [model.id_to_piece(token) for token in model.encode(text)]
        if tokenizer.convert_ids_to_tokens(ids) != wanted:
            raise CheckpointError(
                f"{source.name}: {type(tokenizer).__name__} splits {text!r} in other pieces than {name} does.", _ADD
            )


def _packages(file: Path) -> tuple[str, ...]:
    """What transformers needs to read a vocabulary."""
    if file.suffix not in (".model", ".tiktoken"):
        return ()
    with file.open("rb") as opened:
        return ("tiktoken",) if _RANKED.match(opened.read(4096)) else ("sentencepiece", "protobuf")


def _is_installed(package: str) -> bool:
    try:
        return find_spec("google.protobuf" if package == "protobuf" else package) is not None
    except ModuleNotFoundError:  # nothing of google's
        return False

"""What the runtime needs of a tokenizer: its JSON, chat template, special tokens and the ids that end a text."""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from specexport.checkpoint.source import Source, read_object
from specexport.checkpoint.vocabulary import read_token_texts, separate_duplicate_texts
from specexport_runtime.bundle.tokenizer_load import disable_truncation
from specexport_runtime.errors import CheckpointError

PATTERNS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
_RANKED = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")
_SAMPLES = ("Hello world", "one  two", "line\nline", "déjà vu, 日本 😀 42")
_ADD = "add its tokenizer.json to the checkpoint."
_ADD_OR_NAME = f"{_ADD[:-1]}, or name the class of the files it has as `tokenizer_class` in tokenizer_config.json."
_NO_WAY = "Couldn't instantiate the backend tokenizer"
"""How transformers begins a message that then asks for packages which would not help."""


class TokenizerParts(NamedTuple):
    """The parts of a tokenizer that go into a bundle."""

    json: bytes  # in the tokenizers library's own format
    chat_template: str | None  # Jinja
    special_tokens: dict[str, str]  # name to text
    bos_token_id: int | None
    eos_token_id: int | None
    more_eos_ids: tuple[int, ...] = ()  # further ids that end a text


_JSON = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_IDS = ("generation_config.json", "config.json")


def load_tokenizer(source: Source, *, trust_remote_code: bool = False) -> TokenizerParts:
    """Load a checkpoint's fast tokenizer; ``CheckpointError`` if there is none, or it cannot be read."""
    if source.gguf_file is None and (source.folder / _JSON).is_file():
        stated = {name: read_object(source, name, missing_ok=True) for name in (_JSON, *_SETTINGS)}
        if not (trust_remote_code and "auto_map" in stated[_SETTINGS[0]]):
            return _from_json(source, stated)
    return _from_class(source, trust_remote_code=trust_remote_code)


def _from_json(source: Source, stated: Mapping[str, Mapping[str, Any]]) -> TokenizerParts:
    """The tokenizer of a ``tokenizer.json``, whatever class the checkpoint names; ``stated`` holds files by name."""
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source.folder, local_files_only=True)
    except Exception as error:  # transformers raises nearly anything on a damaged tokenizer
        raise _load_error(source, _find_unreadable_file(source), error) from error
    parts = _collect_parts(source, tokenizer)
    parts = parts._replace(
        json=separate_duplicate_texts(source, parts.json, read_token_texts((source.folder / _JSON).read_bytes()))
    )
    if any(stated[name] for name in _SETTINGS):
        return parts
    texts = {}
    for name in ("bos_token", "eos_token", "pad_token"):  # no file says it in words, so one that says it in numbers
        text = tokenizer.backend_tokenizer.id_to_token(_read_token_id(source, f"{name}_id"))
        if text is not None:
            texts[name] = text
    return parts._replace(special_tokens=texts | parts.special_tokens)


def _find_unreadable_file(source: Source) -> str:
    """The file that a tokenizer cannot be made of."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(source.folder / _JSON))
    except Exception:  # the library has no class of its own
        return _JSON
    return next((name for name in _SETTINGS if (source.folder / name).is_file()), _JSON)


def _read_token_id(source: Source, key: str) -> int:
    """A token id of the model's configuration files; an impossible one if they say none."""
    for name in _IDS:
        found = read_object(source, name, missing_ok=True)
        for place in (found, found.get("text_config")):
            value = place.get(key) if isinstance(place, Mapping) else None
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < _NO_ID:
                return value
    return _NO_ID


_NO_ID = 2**31 - 1


def _load_error(source: Source, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{source.name}: the tokenizer cannot be loaded: {name} cannot be read ({type(error).__name__}: {error}).",
        f"fetch {name} again.",
    )


def _from_class(source: Source, *, trust_remote_code: bool) -> TokenizerParts:
    """The tokenizer that transformers' class makes of the checkpoint's other files."""
    from transformers import AutoTokenizer

    named = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=trust_remote_code, **named
        )
    except Exception as error:  # transformers raises nearly anything on a damaged tokenizer
        raise tokenizer_error(source, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{source.name}: {type(tokenizer).__name__} has no fast tokenizer.", "add its tokenizer.json."
        )
    if source.gguf_file is None and not trust_remote_code:
        check_vocabulary(source, tokenizer)
    return _collect_parts(source, tokenizer)


def _collect_parts(source: Source, tokenizer: Any) -> TokenizerParts:
    if getattr(tokenizer, "split_special_tokens", False):
        raise CheckpointError(
            f"{source.name}: {_SETTINGS[0]} sets split_special_tokens, which reads special tokens as plain text: a "
            "tokenizer.json cannot hold that.",
            "set it to false there, as chat templates need it.",
        )
    disable_truncation(tokenizer.backend_tokenizer)
    return TokenizerParts(
        json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=_chat_template(tokenizer),
        special_tokens={name: str(text) for name, text in tokenizer.special_tokens_map.items() if _is_text(text)},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _is_text(value: Any) -> bool:
    return value is not None and not isinstance(value, list | tuple | dict)


def _chat_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name: the default one speaks for the model
        template = template.get("default")
    return template if isinstance(template, str) else None


def collect_eos_ids(model: Any, tokenizer: TokenizerParts) -> tuple[int, ...]:
    """Every token id that ends a text: generation config (else model config), then the tokenizer's own."""
    generation = getattr(model, "generation_config", None)
    declared = getattr(generation, "eos_token_id", None)
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = list(declared) if isinstance(declared, Iterable) else [declared]
    return tuple(
        dict.fromkeys(int(i) for i in (*ids, tokenizer.eos_token_id, *tokenizer.more_eos_ids) if i is not None)
    )


def tokenizer_error(source: Source, error: Exception) -> CheckpointError:
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

"""What tokens add to a text: the steps of a tokenizer's decoder, and each token of a vocabulary in bytes."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.tokenizer_load import TWIN_MARK
from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How sentencepiece names a token that is one byte."""
_BEFORE = "a"  # decoders strip spaces of a first token

_BRIEF = 2000  # characters

_BY_TOKEN = {"BPEDecoder", "ByteFallback", "CTC", "Metaspace", "Replace", "WordPiece"}
_JOINING = {"ByteLevel", "Fuse"}


def token_bytes(tokenizer: "Tokenizer", vocab_size: int) -> list[bytes]:
    """The bytes of each token id, none without a token; InvalidRequestError if they depend on neighbours."""
    steps = decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps if step.get("pattern") != {"String": TWIN_MARK}]
    own = next((step["type"] for step in steps if _depends_on_neighbours(step)), None)
    if own is None and not decodes_in_windows(steps):
        own = kinds[-1]
    if own is None and "ByteLevel" in kinds and set(kinds) - {"ByteLevel", "Fuse", "Strip"}:
        own = "ByteLevel"
    if own is None and "ByteFallback" in kinds and {"Metaspace", "Replace"} & set(kinds[kinds.index("ByteFallback") :]):
        own = "ByteFallback"
    if own is not None:
        raise InvalidRequestError(
            f"structured_outputs: the text of this model's tokens depends on their neighbours (decoder step {own}).",
            "leave it out.",
        )
    names = {token: get_token_name(tokenizer, token) for token in range(vocab_size)}
    if "ByteLevel" in kinds:
        return [_decode_alphabet(name or "") for name in names.values()]
    decoder, found = tokenizer.decoder, [b""] * vocab_size
    for token, name in names.items():
        if name is None:
            continue
        if "ByteFallback" in kinds and (match := BYTE_TOKEN.fullmatch(name)):
            found[token] = bytes([int(match[1], 16)])
        else:
            text = f"{_BEFORE} {name}" if decoder is None else decoder.decode([_BEFORE, name])
            found[token] = text[len(_BEFORE) :].encode()
    return found


def get_token_name(tokenizer: "Tokenizer", token: int) -> str | None:
    """How a token is spelled, None for an id without one; tokens may be spelled alike."""
    name = tokenizer.id_to_token(token)
    return None if name is None else name.rstrip(TWIN_MARK)


def find_same_at_first(tokenizer: "Tokenizer", found: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Which tokens add the same bytes to an empty text: [V], of what :func:`token_bytes` found."""
    same = np.ones(len(found), np.bool_)
    decoder = tokenizer.decoder
    if "ByteLevel" in {step["type"] for step in decoder_steps(tokenizer)}:
        return same
    for token in range(len(found)):
        name = get_token_name(tokenizer, token)
        if name is not None and not BYTE_TOKEN.fullmatch(name):
            same[token] = (name if decoder is None else decoder.decode([name])).encode() == found[token]
    return same


def _depends_on_neighbours(step: dict[str, object]) -> bool:
    return step["type"] in {"BPEDecoder", "CTC"} or (step["type"] == "Strip" and bool(step["stop"]))


def _decode_alphabet(name: str) -> bytes:
    try:
        return bytes(build_byte_alphabet()[char] for char in name)
    except KeyError:
        return name.encode()


@cache
def build_byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decoder_steps(tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """The steps as ``tokenizer.json`` has them; none where tokens are joined by spaces."""
    return _read_steps(tokenizer.decoder, "decoders")


def _flatten_steps(step: dict[str, Any], parts: str = "decoders") -> list[dict[str, Any]]:
    return (
        [each for part in step[parts] for each in _flatten_steps(part, parts)] if step["type"] == "Sequence" else [step]
    )


def ids_of(tokenizer: "Tokenizer", text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; other threads of Python go on while a long one is encoded."""
    if len(text) <= _BRIEF:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:  # `encode` keeps Python's lock until it is done
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def decode_ids(tokenizer: "Tokenizer", ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids; other threads of Python go on meanwhile, unlike with ``Tokenizer.decode``."""
    texts: list[str] = tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return texts[0]


@lru_cache(maxsize=4)  # of engines that live
def compute_max_token_length(tokenizer: "Tokenizer") -> int | None:
    """Most characters of a text that a token can stand for; None where no bound is known.

    There is one where each byte of a text is in a token: nothing is stripped, and nothing unknown becomes one token.
    """
    names, model = tokenizer.get_vocab(with_added_tokens=True), tokenizer.model
    before, normal = (
        _read_steps(tokenizer.pre_tokenizer, "pretokenizers"),
        _read_steps(tokenizer.normalizer, "normalizers"),
    )
    kinds = {step["type"] for step in before}
    of_bytes = build_byte_alphabet() if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
    is_whole = type(model).__name__ == "BPE" and ("ByteLevel" in kinds or model.byte_fallback)
    if not is_whole or not all(name in names for name in of_bytes):
        return None
    if not kinds <= {"ByteLevel", "Digits", "Metaspace", "Split"} or "Removed" in [
        each.get("behavior") for each in before
    ]:
        return None
    kept = [
        each["type"] in ("NFC", "Prepend") or (_maps_single_characters(each) and each["content"]) for each in normal
    ]
    if not all(kept) or any(each.lstrip or each.rstrip for each in tokenizer.get_added_tokens_decoder().values()):
        return None
    # NFC makes one character of up to four.
    return max(map(len, names)) * (4 if any(each["type"] == "NFC" for each in normal) else 1)


def _read_steps(part: Any, parts: str) -> list[dict[str, Any]]:
    return [] if part is None else _flatten_steps(json.loads(part.__getstate__()), parts)


def decodes_in_windows(steps: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an end of the tokens decodes to an end of their text, but for what a first token loses."""
    is_joined = False
    for step in steps:
        kind = step["type"]
        known = {"Fuse", "Strip"} if is_joined else _BY_TOKEN | _JOINING | {"Strip"}
        if kind not in known and not _maps_single_characters(step):
            return False
        is_joined |= kind in _JOINING
    return True


def _maps_single_characters(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1


def build_unsettled_pattern(steps: Iterable[Mapping[str, Any]]) -> re.Pattern[str] | None:
    """The names of tokens whose own text tokens after them may change; None if there are none.

    Byte tokens (``<0x41>``), and tokens with a ``BPEDecoder``'s suffix before their end, where it is a space.
    """
    found = []
    for step in steps:
        if step["type"] == "ByteFallback":
            found.append(f"<0x..>{TWIN_MARK}*")
        if step["type"] == "BPEDecoder" and step["suffix"]:
            found.append(f".*{re.escape(step['suffix'])}.+")
    return re.compile("|".join(found), re.DOTALL) if found else None

"""What a tokenizer's decoder does with the texts of tokens, one step after another."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BY_TOKEN = {"BPEDecoder", "ByteFallback", "CTC", "Metaspace", "Replace", "WordPiece"}
_JOINING = {"ByteLevel", "Fuse"}


def decoder_steps(tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """The steps as ``tokenizer.json`` has them; none where tokens are joined by spaces."""
    decoder = tokenizer.decoder
    return [] if decoder is None else _flat(json.loads(decoder.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for part in step["decoders"] for each in _flat(part)] if step["type"] == "Sequence" else [step]


def decodes_in_windows(steps: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an end of the tokens decodes to an end of their text, but for what a first token loses.

    It does not where a step rewrites what another has joined: a replacement there may span any number of tokens.
    """
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


def unsettled_names(steps: Iterable[Mapping[str, Any]]) -> re.Pattern[str] | None:
    """The names of tokens whose own text tokens behind them may change; None if there are none.

    Byte tokens (``<0x41>``), and tokens that hold the suffix of a ``BPEDecoder`` before their end: it is a space there,
    and nothing in the last token.
    """
    found = []
    for step in steps:
        if step["type"] == "ByteFallback":
            found.append("<0x..>")
        if step["type"] == "BPEDecoder" and step["suffix"]:
            found.append(f".*{re.escape(step['suffix'])}.+")
    return re.compile("|".join(found), re.DOTALL) if found else None

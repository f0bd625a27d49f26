"""What a tokenizer's decoder does with the texts of tokens, one step after another."""

import json
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

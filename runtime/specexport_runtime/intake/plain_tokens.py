"""A vocabulary as a matcher sees it: plain tokens spell bytes, added ones and ends of a text are named by id alone."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specexport_runtime.requests.token_bytes import find_same_at_first, token_bytes
from specexport_runtime.sampling.grammar import BoolArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTES_OF_TEXTS = [*range(0xC0), *range(0xC2, 0xF5)]
"""Bytes that UTF-8 has."""


class PlainTokens:
    """What ``llguidance.TokenizerWrapper`` wraps; InvalidRequestError if a token's text depends on its neighbours."""

    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokens = token_bytes(tokenizer, vocab_size)  # bytes of each id, V of them
        added = {token for token in tokenizer.get_added_tokens_decoder() if token < vocab_size}
        self.special_token_ids = sorted(added.union(eos_token_ids))  # ids that spell nothing
        self.eos_token_id = eos_token_ids[0]
        named = set(self.special_token_ids)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data and token not in named}
        self._longest = max(map(len, self._ids), default=0)
        self.is_complete = all(bytes([byte]) in self._ids for byte in _BYTES_OF_TEXTS)  # every text can be spelled
        self._given, self._tokenizer = tokenizer, _without_added_tokens(tokenizer)

    @cached_property
    def first(self) -> BoolArray | None:
        """Tokens that add to an empty text what they add to others: [V]; None if all do."""
        same = find_same_at_first(self._given, self.tokens)
        return None if same.all() else same

    def __call__(self, data: bytes) -> list[int]:
        """Plain tokens that spell ``data``, the tokenizer's own if they do; as far as there are any."""
        try:
            ids: list[int] = self._tokenizer.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            ids = []
        spelled = [self.tokens[token] for token in ids if token < len(self.tokens)]
        if b"".join(spelled) == data and all(self._ids.get(each) is not None for each in spelled):
            return [self._ids[each] for each in spelled]
        return self.spell(data)

    def spell(self, data: bytes) -> list[int]:
        """The longest plain token, and so on; up to where there is none."""
        ids, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token = self._ids.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:
                break
        return ids

    def missing(self, text: str) -> str | None:
        """Where a text goes on with what no plain tokens spell; None if they spell it all."""
        data = text.encode()
        if self.is_complete:
            return None
        reached, furthest = {0}, 0
        for at in range(len(data)):
            if at in reached:
                furthest = at
                reached |= {
                    end for end in range(at + 1, min(len(data), at + self._longest) + 1) if data[at:end] in self._ids
                }
        return None if len(data) in reached else data[furthest:].decode(errors="replace")


def _without_added_tokens(tokenizer: "Tokenizer") -> "Tokenizer":
    """A tokenizer of what stands within a text: nothing is put before it, and no added token is found in it."""
    from tokenizers import Tokenizer

    parts = json.loads(tokenizer.to_str())
    parts |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    parts["normalizer"] = _without_prefix(parts["normalizer"])
    parts["pre_tokenizer"] = _without_prefix(parts["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(parts))


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        return step | {key: [each for part in step[key] if (each := _without_prefix(part)) is not None]}
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    return step | {"add_prefix_space": False} if "add_prefix_space" in step else step

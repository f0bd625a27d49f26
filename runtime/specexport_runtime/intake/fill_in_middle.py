"""Prompts whose answer goes between a prefix and a suffix, by the tokens that a tokenizer has for it.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle".
"""

from typing import TYPE_CHECKING

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_text
from specexport_runtime.intake.plain_tokens import reader_of_text
from specexport_runtime.requests.token_bytes import ids_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PREFIX, _SUFFIX = "prefix", "suffix"
_LAYOUTS = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", _PREFIX, "\u2581<SUF>", _SUFFIX, "\u2581<MID>"),  # CodeLlama
    ("<\uff5cfim\u2581begin\uff5c>", _PREFIX, "<\uff5cfim\u2581hole\uff5c>", _SUFFIX, "<\uff5cfim\u2581end\uff5c>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),  # Codestral; the one before it is DeepSeek's
)
"""Control tokens, and the texts between them. The first that a tokenizer has all tokens of is the model's."""
_ENDS = (
    *("<|fim_pad|>", "<|endoftext|>", "<|im_end|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    *("<fim_pad>", "<fim-pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|reponame|>"),
    *("<|filename|>", "\u2581<EOT>", "<|EOT|>", "[MIDDLE]"),
)
"""Control tokens that end a middle: a new file begins, or nothing does."""


class MiddlePrompt(list[int]):
    """Token ids of a prompt whose answer goes on from ``prefix`` and ends before ``suffix``, ids as well."""

    def __init__(self, ids: list[int], prefix: list[int], suffix: list[int], ends: frozenset[int]) -> None:
        super().__init__(ids)
        self.prefix, self.suffix = prefix, suffix
        self.ends = ends  # they end the answer, besides the model's own


class MiddleEncoder:
    """Makes such prompts; InvalidRequestError if the tokenizer has no tokens for it, below ``vocab_size``."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        ids = {each.content: token for token, each in added if token < vocab_size}
        layout = next((each for each in _LAYOUTS if ids.keys() >= {*each} - {_PREFIX, _SUFFIX}), None)
        if layout is None:
            raise InvalidRequestError("this model's tokenizer has no tokens to fill in the middle.", "leave it out.")
        self._layout, self._marks = layout, {name: ids[name] for name in {*layout} - {_PREFIX, _SUFFIX}}
        self._ends = frozenset(ids[name] for name in (*self._marks, *_ENDS) if name in ids)
        kept = {token: each for token, each in added if not each.special and token not in self._ends}
        self._begin = ids_of(tokenizer, "", add_special_tokens=True)
        first, other = (reader_of_text(tokenizer, kept.values(), is_first=is_first) for is_first in (True, False))
        self._readers = {_PREFIX: first, _SUFFIX: other}
        self._ids = {first.token_to_id(each.content): token for token, each in kept.items()}  # fewer have other ids

    def encode(self, prefix: str, suffix: str) -> MiddlePrompt:
        """The prompt between two texts; what is spelled like a control token in them is read as text."""
        texts = {_PREFIX: self._read(_PREFIX, prefix), _SUFFIX: self._read(_SUFFIX, suffix)}
        ids = [*self._begin]
        for name in self._layout:
            ids += texts[name] if name in texts else [self._marks[name]]
        return MiddlePrompt(ids, texts[_PREFIX], texts[_SUFFIX], self._ends)

    def _read(self, name: str, text: str) -> list[int]:
        check_text(text, f"the {name}")
        found = ids_of(self._readers[name], text, add_special_tokens=False)
        ids = [self._ids.get(token, token) for token in found]
        if not self._ends.isdisjoint(ids):
            raise InvalidRequestError(f"the {name} spells a control token of this model.", "change the text.")
        return ids

"""Text and exact bytes of single tokens, for log-probabilities."""

from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.bundle.tokenizer_load import TWIN_MARK
from specexport_runtime.requests.text import TextStream
from specexport_runtime.requests.token_bytes import BYTE_TOKEN, build_byte_alphabet, decoder_steps, get_token_name
from specexport_runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenText(NamedTuple):
    """One token."""

    text: str  # of a token that is no whole characters, ``bytes:\xe2\x82`` as OpenAI writes it
    data: bytes


class TokenTexts:
    """What the tokens of a vocabulary, of any kind, stand for, each by itself in the middle of a text."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        kinds = {step["type"] for step in decoder_steps(tokenizer)}
        self._is_byte_level, self._has_byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: str(each.content).rstrip(TWIN_MARK) for token, each in added.items()}
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        """The text of one token id."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = _token_text(self._bytes(token))
        return known

    def stream(self, params: SamplingParams) -> TextStream:
        """For the text of tokens in a row; stop strings do not end it."""
        return TextStream(self._tokenizer, SamplingParams(skip_special_tokens=params.skip_special_tokens))

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = get_token_name(self._tokenizer, token)
        if name is None:
            return b""  # a row of the LM head without a token
        if self._is_byte_level and all(char in build_byte_alphabet() for char in name):
            return bytes(build_byte_alphabet()[char] for char in name)
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        return self._decode_after_itself(token).encode()

    def _decode_after_itself(self, token: int) -> str:
        """What a second token adds to the first: decoders strip the space of the first one."""
        one, two = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        added: str = two[len(one) :] if two.startswith(one) else one
        return added


def _token_text(data: bytes) -> TokenText:
    try:
        return TokenText(data.decode("utf-8"), data)
    except UnicodeDecodeError:
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)

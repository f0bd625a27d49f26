"""A checkpoint's tokenizer, as often as a build needs it. Imports the tokenizers library when it is used."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@lru_cache(maxsize=1)
def load_tokenizer(tokenizer_json: bytes) -> "Tokenizer":
    """The tokenizer, which nobody may change: a large one takes a second to read, and a pair's are the same."""
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(tokenizer_json)

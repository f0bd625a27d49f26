"""Prompts for the checks: a small built-in set of code and prose, and how prompts become tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexport_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_PROMPTS = (
    'def read_config(path):\n    """Read a file of key = value lines into a dictionary."""\n',
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef walk_files(root):\n    for folder, _, names in os.walk(root):\n",
    "# Sort the words by length, the longest first.\nwords = sorted(words, key=",
    "The old lighthouse stood at the end of the pier, and every evening the keeper",
    "To make bread you need flour, water, salt and",
    "In 1969 the first people walked on the Moon. They",
    "Question: what is the sum of 12 and 30?\nAnswer:",
)


def encode_prompts(
    texts: Sequence[str], tokenizer: "Tokenizer", *, vocab_size: int, max_model_len: int, shorten: bool
) -> list[list[int]]:
    """Token ids of each prompt, with room for one more; ``shorten`` cuts to half of ``max_model_len`` at most."""
    encoded = []
    for number, text in enumerate(texts, start=1):
        ids = tokenizer.encode(text).ids
        if shorten:
            ids = ids[: max_model_len // 2]
        if not 0 < len(ids) < max_model_len:
            raise InvalidRequestError(
                f"prompt {number} has {len(ids)} tokens; this bundle takes 1 to {max_model_len - 1}.",
                "change it, or build with a larger --max-model-len.",
            )
        if max(ids) >= vocab_size:
            raise InvalidRequestError(
                f"prompt {number} has token id {max(ids)}; the models know ids below {vocab_size}.", "change it."
            )
        encoded.append(ids)
    return encoded

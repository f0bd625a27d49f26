"""An engine of fakes that fills in the middle, letter by letter, of the prompts that it knows."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.chat_fakes import END, MAX_MODEL_LEN, letters
from tests.support.fakes.engine_of import engine_of

INDENT = "        "  # a token of its own in a text
LAYOUTS = {
    "qwen": ("<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>", "<|fim_pad|>"),
    "starcoder": ("<fim_prefix>{}<fim_suffix>{}<fim_middle>", "<file_sep>"),
    "deepseek": ("<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>", "<|EOT|>"),
    "codestral": ("[SUFFIX]{1}[PREFIX]{0}", END),
}
"""The prompt, and the token that ends an answer."""


class Filler(FakeExecutor):
    """Answers ``prompts`` with their texts, as token ids; every ``wrong``-th token is another."""

    def __init__(self, vocab_size: int, prompts: list[tuple[list[int], list[int]]], *, wrong: int = 0) -> None:
        super().__init__(vocab_size, 4, MAX_MODEL_LEN + 16, context=3)
        self._prompts, self._wrong = prompts, wrong

    def logits_after(self, tokens: npt.ArrayLike, mask: Any = None, adapter: int = 0) -> npt.NDArray[np.float32]:
        values, ids = super().logits_after(tokens, mask, adapter), np.asarray(tokens).tolist()
        for prompt, answer in self._prompts:
            place = len(ids) - len(prompt)
            if ids[: len(prompt)] == prompt and 0 <= place < len(answer):
                values = values.copy()
                is_wrong = self._wrong and place % self._wrong == self._wrong - 1
                values[place * 7 % 256 if is_wrong else answer[place]] += 60
        return values


def filling_engine(name: str, *filled: tuple[str, str, str], special: bool = False, **options: Any) -> SpecEngine:
    """An engine that knows the middles of ``filled``: prefixes, middles and suffixes."""
    layout, end = LAYOUTS[name]
    marks = re.split(r"\{\d?\}", layout)
    tokenizer = letters(*filter(None, marks), *({end} - {END}), special=special)
    tokenizer.add_tokens([INDENT])
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str

    def ids_of(text: str) -> list[int]:
        """Control tokens are no tokens of a text."""
        if INDENT in text:
            before, _, after = text.partition(INDENT)
            return [*ids_of(before), tokenizer.token_to_id(INDENT), *ids_of(after)]
        return [tokenizer.token_to_id(letter) for letter in spell(text)[0][0]] if text else []

    def mark_ids(mark: str) -> list[int]:
        return [tokenizer.token_to_id(mark)] if mark else []

    prompts = []
    for prefix, middle, suffix in filled:
        order = (suffix, prefix) if "{1}" in layout else (prefix, suffix)
        ids = mark_ids(marks[0])
        for text, mark in zip(order, marks[1:], strict=True):
            ids += [*ids_of(text), *mark_ids(mark)]
        prompts.append((ids, [*ids_of(middle), tokenizer.token_to_id(end)]))
    size = tokenizer.get_vocab_size()
    return engine_of(
        Filler(size, prompts), tokenizer, draft=Filler(size, prompts, wrong=5), max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[tokenizer.token_to_id(END)], **options,
    )  # fmt: skip

"""An engine of fakes that repeats what the user said, letter by letter, where a grammar lets it."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specexport_runtime import SpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.engine_of import engine_of

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
_HEADERS = (USER, ASSISTANT, END)
MAX_MODEL_LEN = 2000

HEAD = "{%- for m in messages %}{%- if m.role in ['system', 'user'] %}{{ '<|user|>' + m.content + '<|end|>' }}"
TAIL = "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
PLAIN = HEAD + "{%- else %}{{ '<|assistant|>' + m.content + '<|end|>' }}" + TAIL
"""A template that knows no tools."""

HERMES = (
    "{%- if tools %}<tools>{%- for t in tools %}{{ t.function.name }} {% endfor %}</tools>{%- endif %}"
    + HEAD
    + "{%- elif m.role == 'tool' %}{{ '<|user|>' + '<tool_response>' + m.content + '</tool_response><|end|>' }}"
    "{%- elif m.tool_calls %}{{ '<|assistant|>' + m.content }}{%- for c in m.tool_calls %}"
    """{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    "{{ '}\n</tool_call>' }}{%- endfor %}<|end|>"
    "{%- else %}{{ '<|assistant|>' + m.content + '<|end|>' }}" + TAIL
)
LLAMA = (
    """{%- if tools %}{{ 'Answer {"name": function, "parameters": {…}}.' }}{%- endif %}"""
    + HEAD
    + "{%- elif m.role == 'tool' %}{{ '<|user|>' + m.content + '<|end|>' }}"
    "{%- elif m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
    """{{ '<|assistant|>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|end|>' }}"
    "{%- else %}{{ '<|assistant|>' + m.content + '<|end|>' }}" + TAIL
)
_MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    + HEAD
    + "{%- elif m.role == 'tool' %}{{ '<|user|>' + m.content + '<|end|>' }}"
    "{%- elif m.tool_calls %}{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{%- endif %}{%- endfor %}CALLS<|end|>"
    "{%- else %}{{ '<|assistant|>' + m.content + '<|end|>' }}" + TAIL
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "<|assistant|>[TOOL_CALLS][{%- for c in m.tool_calls %}{{ ', ' if not loop.first else '' }}"
    """{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}"""
    "{%- endfor %}]",
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    "<|assistant|>{%- for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}{%- endfor %}",
)
THINKS = (
    HERMES.replace(
        "{{ '<|assistant|>' + m.content }}",
        "{{ '<|assistant|>' + ('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '') "
        "+ m.content }}",
    ).removesuffix("{%- endif %}")
    + "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{%- elif force_thinking %}{{ '<think>\n' }}{%- endif %}{%- endif %}"
)
QWEN3 = PLAIN.replace(
    "m.content + '<|end|>' }}{%- endif",
    "('<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if loop.last else '') "
    "+ m.content.split('</think>')[-1].lstrip('\n') + '<|end|>' }}{%- endif",
).removesuffix("{%- endif %}") + (
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""A template that adds thoughts, empty ones too, to the last message alone."""
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "mistral named": MISTRAL_NAMED}
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


def letters(*markers: str, special: bool = True) -> Tokenizer:
    """A tokenizer of bytes, with tokens of their own for headers and markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_HEADERS))
    for marker in markers:  # one after the other: their ids are in this order
        token = AddedToken(marker, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


class Echo(FakeExecutor):
    """Repeats the last message of the user, and ends; every ``wrong``-th letter is wrong."""

    def __init__(self, tokenizer: Tokenizer, num_rows: int, *, wrong: int = 0) -> None:
        super().__init__(tokenizer.get_vocab_size(), num_rows, MAX_MODEL_LEN + 16, context=3)
        self._user, self._assistant, self._end = (tokenizer.token_to_id(text) for text in _HEADERS)
        self._wrong = wrong

    def logits_after(self, tokens: npt.ArrayLike, mask: Any = None) -> npt.NDArray[np.float32]:
        values = super().logits_after(tokens, mask)
        wanted = self._wanted(np.asarray(tokens).tolist())
        if wanted is not None:
            values = values.copy()
            values[wanted] += 60
        return values

    def _wanted(self, tokens: list[int]) -> int | None:
        if self._assistant not in tokens:
            return None
        begin = len(tokens) - tokens[::-1].index(self._assistant)
        before = tokens[: begin - 1]
        if self._user not in before:
            return None
        script = before[len(before) - before[::-1].index(self._user) :]
        script = list(itertools.takewhile(lambda token: token != self._end, script))
        place = len(tokens) - begin
        if self._wrong and place % self._wrong == self._wrong - 1:
            return (place * 7) % 256
        return script[place] if place < len(script) else self._end


def echo_engine(template: str, *markers: str, special: bool = True, rows: int = 4, **options: Any) -> SpecEngine:
    tokenizer = letters(*markers, special=special)
    target, draft = Echo(tokenizer, rows), Echo(tokenizer, rows, wrong=5)
    return engine_of(
        target, tokenizer, draft=draft, max_model_len=MAX_MODEL_LEN, eos_token_ids=[tokenizer.token_to_id(END)],
        chat_template=template, **options,
    )  # fmt: skip

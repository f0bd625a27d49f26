"""How often a draft guesses what its target writes.

The target writes greedily behind some prompts, all of them in one batch. The draft then reads each of these texts in
one step, and what it would have guessed at each place is compared with what stands there: the share of right guesses is
the chance that a draft token is accepted. A smaller LM head needs no further step: its guess is the likeliest of the
tokens that it has.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specexport.compile.built import BuiltModel
from specexport.compile.check import open_new_engine
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.token_map import TokenMap
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Int32Array, Int64Array
from specexport_runtime.intake.chat import render_chat
from specexport_runtime.packing.batch import ModelRunner, RowWork

PROMPTS = (
    "Write a Python function that returns the longest word of a sentence.",
    "A shop sells pens at 3 for 2 dollars. How much do 21 pens cost? Explain each step.",
    "What should I look at before I buy a used bicycle?",
    "Welche Sehenswürdigkeiten in Hamburg kann man an einem Tag zu Fuß besuchen?",
    "Begin a story about a clock maker who finds a letter in an old clock.",
    "Explain what this does, then make it shorter:\n\nresult = []\nfor n in numbers:\n    if n % 2 == 0:\n"
    "        result.append(n * n)",
    "Tom is twice as old as Ann. In six years their ages add up to 48. How old are they now?",
    "Write a short, friendly mail that moves a meeting from Tuesday to Thursday.",
    "请用几句话介绍一下长城的历史。",
    "Write a JavaScript function that debounces another function, with a comment for each step.",
    "Solve 3x + 7 = 2x + 15 and check the result.",
    "Describe the view from a mountain hut on the first morning of winter.",
)
"""Code, sums, questions, prose and other languages; nothing of it is in the texts of ``bench``, which heads count."""
NUM_TOKENS = 32
"""Tokens that the target writes behind each prompt."""
PROMPT_LEN = 96
_CAPACITY = PROMPT_LEN + NUM_TOKENS
_MOST_WORK, LEAST_PROMPTS = 6e12, 6
"""Operations of the target, a minute on two old cores: a larger target gets fewer prompts, or writes nothing."""
_CHUNK, _HELD_OUT, _BEGINNING = 1000, 4, 200  # characters; every fourth chunk of a person's texts; what is a prompt


class Text(NamedTuple):
    """Token ids of a prompt, and what the target wrote behind it."""

    prompt: list[int]
    written: list[int]


def held_out(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts to count tokens on, and prompts that are not among them; no prompts where texts are too few."""
    chunks = [text[at : at + _CHUNK] for text in texts for at in range(0, len(text), _CHUNK)]
    held = chunks[::_HELD_OUT]
    if len(held) < LEAST_PROMPTS:
        return tuple(texts), ()
    prompts = [chunk[:_BEGINNING] for chunk in held[:: -(-len(held) // len(PROMPTS))]]
    return tuple(chunk for at, chunk in enumerate(chunks) if at % _HELD_OUT), tuple(prompts)


def write_texts(folder: Path, target: BuiltModel, prompts: Sequence[str], *, num_ids: int) -> list[Text]:
    """What the target writes behind each prompt, up to the first token that ends a text.

    ``folder`` is of the target's engine. Without ``prompts`` there are built-in ones, in the chat template if there is
    one. A text with an id from ``num_ids`` up, which the draft does not have, is left out. Raises SpecexportError if
    the target is too large to write enough, or no text is left.
    """
    from tokenizers import Tokenizer

    tokenizer, template = Tokenizer.from_buffer(target.tokenizer_json), None if prompts else target.chat_template
    rows: list[list[int]] = []
    for prompt in prompts or PROMPTS:
        text = prompt
        if template is not None:
            text = render_chat(template, [{"role": "user", "content": prompt}], target.special_tokens)
        rows.append(tokenizer.encode(text, add_special_tokens=template is None).ids[-PROMPT_LEN:])
    most = _MOST_WORK / (2 * target.entry.parameters.step)
    fitting = np.cumsum([len(ids) + NUM_TOKENS for ids in rows]) <= most
    rows = [ids for ids, fits in zip(rows, fitting, strict=True) if fits and ids]
    if len(rows) < LEAST_PROMPTS:
        raise SpecexportError("the target is too large to write texts for it.")
    with closing(open_new_engine(folder, target.entry, num_rows=len(rows), kv_capacity=_CAPACITY)) as executor:
        written = _write(ModelRunner(executor), rows)
    texts = []
    for ids, own in zip(rows, written, strict=True):
        ends = [at for at, token in enumerate(own, 1) if token in target.eos_token_ids]
        texts.append(Text(ids, own[: min(ends, default=len(own))]))
    known = [text for text in texts if max(*text.prompt, *text.written) < num_ids]
    if not known:
        raise SpecexportError("the target writes tokens that the draft has not, in every text.")
    return known


def _write(runner: ModelRunner, prompts: Sequence[list[int]]) -> list[list[int]]:
    for row, prompt in enumerate(prompts):
        runner.prefill(row, prompt[:-1])
    written = [[prompt[-1]] for prompt in prompts]
    for _ in range(NUM_TOKENS):
        found = runner.step(0, [RowWork(own[-1:], 1) for own in written], "token_ids").tolist()
        for row, token in enumerate(found):
            written[row].append(token)
            runner.kv.commit(row, runner.kv.kv_len(row) + 1)
    return [own[1:] for own in written]


def count_right(
    folder: Path,
    entry: ModelEntry,
    texts: Sequence[Text],
    own: Int32Array | None,
    heads: Sequence[Int32Array | None],
    tokens: TokenMap | None = None,
) -> list[int]:
    """How many tokens of the texts a draft would have guessed, with each LM head.

    ``own`` are the ids of the engine's LM head, ascending; None for all. ``heads`` are ids that it is narrowed to; None
    for the LM head as it is. ``tokens`` are of a draft with another vocabulary than the texts'.
    """
    ids = np.arange(entry.vocab_size, dtype=np.int32) if own is None else own
    kept = [np.arange(len(ids)) if head is None else np.flatnonzero(np.isin(ids, head)) for head in heads]
    said = ids if tokens is None else tokens.target_ids[ids]
    right = [0] * len(heads)
    capacity = _CAPACITY * (1 if tokens is None else tokens.most) + 1
    with closing(open_new_engine(folder, entry, num_rows=1, kv_capacity=capacity)) as executor:
        runner = ModelRunner(executor)
        for text in texts:
            read, places = _spelled(text, tokens)
            logits = runner.step(0, [RowWork(read, len(read) - places[0])])[places - places[0]]
            for at, rows in enumerate(kept):
                guesses = said[rows[logits[:, rows].argmax(axis=1)]]
                right[at] += int((guesses == text.written).sum())
            runner.reset()
    return right


def _spelled(text: Text, tokens: TokenMap | None) -> tuple[list[int], Int64Array]:
    """What a draft reads of a text, and the place before each token that was written."""
    read = [*text.prompt, *text.written[:-1]]
    if tokens is None:
        return read, np.arange(len(text.prompt) - 1, len(read))
    lead = tokens.lead_of(read)
    ids, counts = tokens.spell(read)
    return lead + ids, len(lead) + np.cumsum(counts)[len(text.prompt) - 1 :] - 1

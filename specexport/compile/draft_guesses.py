"""How often a draft guesses what its target writes.

The target writes greedily after some prompts, all of them in one batch. The draft then reads each of these texts in
one step, and what it would have guessed at each place is compared with what stands there: the share of right guesses is
the chance that a draft token is accepted. A smaller LM head needs no further step: its guess is the likeliest of the
tokens that it has. What all texts begin with, a chat template's first turn, is read once.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specexport.compile.built import BuiltModel
from specexport.compile.check import open_new_engine
from specexport.compile.tokenizer import load_tokenizer
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.token_map import TokenMap
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import BoolArray, Int32Array, Int64Array
from specexport_runtime.intake.chat import render_chat
from specexport_runtime.packing.batch import ModelRunner, RowWork

PROMPTS = (
    "Write quicksort in Python.",
    "What is 15% of 80? Explain.",
    "How do I choose a used bicycle?",
    "Was kann man in Hamburg besichtigen?",
    "Begin a story about a clock maker.",
    "Explain: [n * n for n in x if n % 2]",
    "Tom is 12, twice as old as Ann. And in 6 years?",
    "Write a mail that moves a meeting.",
    "介绍一下长城。",
    "Write a debounce function in JavaScript.",
    "Solve 3x + 7 = 2x + 15.",
    "Describe a winter morning.",
)
"""Code, sums, questions, prose and other languages, in few tokens: the first six, which may be all, have most of these.
Nothing of it is in the texts of ``bench``, which heads count."""
FEW_TOKENS, NUM_TOKENS = 12, 32
"""Tokens that the target writes after each of the first prompts, and after each where these leave a doubt."""
PROMPT_LEN = 96
_CAPACITY = PROMPT_LEN + NUM_TOKENS
_MAX_WORK, MIN_PROMPTS = 6e12, 6
"""Operations of the target, a minute on two old cores: a larger target gets fewer prompts, or writes nothing. The first
ones are so many."""
_CHUNK, _HELD_OUT, _BEGINNING = 1000, 4, 200  # characters; every fourth chunk of a person's texts; what is a prompt


class Text(NamedTuple):
    """Token ids of a prompt, and what the target wrote after it."""

    prompt: list[int]
    written: list[int]


def split_held_out(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts to count tokens on, and prompts that are not among them; no prompts where texts are too few."""
    chunks = [text[at : at + _CHUNK] for text in texts for at in range(0, len(text), _CHUNK)]
    held = chunks[::_HELD_OUT]
    if len(held) < MIN_PROMPTS:
        return tuple(texts), ()
    prompts = [chunk[:_BEGINNING] for chunk in held[:: -(-len(held) // len(PROMPTS))]]
    first_ones = prompts[::2] + prompts[1::2]  # from all over the texts
    return tuple(chunk for at, chunk in enumerate(chunks) if at % _HELD_OUT), tuple(first_ones)


def write_texts(
    folder: Path, target: BuiltModel, prompts: Sequence[str], *, num_ids: int, few: bool = False
) -> list[Text]:
    """What the target writes after each prompt, up to the first token that ends a text; ``few`` is for a first look.

    ``folder`` is of the target's engine. Without ``prompts`` there are built-in ones, in the chat template if there is
    one. A text with an id from ``num_ids`` up, which the draft does not have, is left out. Raises SpecexportError if
    the target is too large to write enough, or no text is left.
    """
    tokenizer, template = load_tokenizer(target.tokenizer_json), None if prompts else target.chat_template
    rows: list[list[int]] = []
    for prompt in prompts or PROMPTS:
        text = prompt
        if template is not None:
            text = render_chat(template, [{"role": "user", "content": prompt}], target.special_tokens)
        rows.append(tokenizer.encode(text, add_special_tokens=template is None).ids[-PROMPT_LEN:])
    most = _MAX_WORK / (2 * target.entry.parameters.step)
    fitting = np.cumsum([len(ids) + NUM_TOKENS for ids in rows]) <= most
    rows = [ids for ids, fits in zip(rows, fitting, strict=True) if fits and ids]
    if len(rows) < MIN_PROMPTS:
        raise SpecexportError("the target is too large to write texts for it.")
    rows, count = (rows[:MIN_PROMPTS], FEW_TOKENS) if few else (rows, NUM_TOKENS)
    with closing(open_new_engine(folder, target.entry, num_rows=len(rows), kv_capacity=_CAPACITY)) as executor:
        written = _generate_rows(ModelRunner(executor), rows, count)
    texts = []
    for ids, own in zip(rows, written, strict=True):
        ends = [at for at, token in enumerate(own, 1) if token in target.eos_token_ids]
        texts.append(Text(ids, own[: min(ends, default=len(own))]))
    known = [text for text in texts if max(*text.prompt, *text.written) < num_ids]
    if not known:
        raise SpecexportError("the target writes tokens that the draft has not, in every text.")
    return known


def _generate_rows(runner: ModelRunner, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    found, shared = [], _prefill_shared_prefix(runner, [prompt[:-1] for prompt in prompts])
    for row, prompt in enumerate(prompts):
        found.append(int(runner.step(row, [RowWork(prompt[shared:], 1)], "token_ids")[0]))
        runner.kv.commit(row, len(prompt))
    written = [[token] for token in found]
    for _ in range(count - 1):
        found = runner.step(0, [RowWork(own[-1:], 1) for own in written], "token_ids").tolist()
        for row, token in enumerate(found):
            written[row].append(token)
            runner.kv.commit(row, runner.kv.kv_len(row) + 1)
    return written


def _prefill_shared_prefix(runner: ModelRunner, rows: Sequence[list[int]]) -> int:
    """Put what all rows begin with into each; how many tokens that are."""
    alike = [len(set(column)) == 1 for column in zip(*rows, strict=False)]
    shared = [*alike, False].index(False)
    runner.prefill(0, rows[0][:shared])
    for row in range(1, len(rows)):
        runner.copy_row(0, row, shared)
        runner.resume_row(row, shared)
    return shared


def measure_guesses(
    folder: Path,
    entry: ModelEntry,
    texts: Sequence[Text],
    own: Int32Array | None,
    heads: Sequence[Int32Array | None],
    tokens: TokenMap | None = None,
) -> BoolArray:
    """Which tokens of the texts a draft would have guessed with each LM head, bool [heads, tokens].

    ``own`` are the ids of the engine's LM head, ascending; None for all. ``heads`` are ids that it is narrowed to; None
    for the LM head as it is. ``tokens`` are of a draft with another vocabulary than the texts'.
    """
    ids = np.arange(entry.vocab_size, dtype=np.int32) if own is None else own
    kept = [slice(None) if head is None else np.flatnonzero(np.isin(ids, head)) for head in heads]
    said = ids if tokens is None else tokens.target_ids[ids]
    read, places = zip(*[_spell_for_draft(text, tokens) for text in texts], strict=True)
    right = []
    capacity = _CAPACITY * (1 if tokens is None else tokens.most) + 1
    with closing(open_new_engine(folder, entry, num_rows=len(texts), kv_capacity=capacity)) as executor:
        runner = ModelRunner(executor)
        shared = _prefill_shared_prefix(runner, [each[: at[0]] for each, at in zip(read, places, strict=True)])
        for row, (text, each, at) in enumerate(zip(texts, read, places, strict=True)):
            logits = runner.step(row, [RowWork(each[shared:], len(each) - at[0])])[at - at[0]]
            right.append([said[rows][logits[:, rows].argmax(axis=1)] == text.written for rows in kept])
    return np.concatenate(right, axis=1)


def _spell_for_draft(text: Text, tokens: TokenMap | None) -> tuple[list[int], Int64Array]:
    """What a draft reads of a text, and the place before each token that was written."""
    read = [*text.prompt, *text.written[:-1]]
    if tokens is None:
        return read, np.arange(len(text.prompt) - 1, len(read))
    lead = tokens.get_lead(read)
    ids, counts = tokens.spell(read)
    return lead + ids, len(lead) + np.cumsum(counts)[len(text.prompt) - 1 :] - 1

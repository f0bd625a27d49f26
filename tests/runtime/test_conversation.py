"""Prompts of a conversation: the text is the template's, and the ids go on from what was read and written."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat import render_chat
from specexport_runtime.intake.conversation import Conversation
from specexport_runtime.requests.text import TextStream, decode_continuation
from tests.support.cases import chance
from tests.support.fakes.engine import make_engine

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
    "unthinking": CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip()"),
    "thinking": CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
    "counting": "{{ messages | length }} messages\n" + CHATML,
}


@pytest.fixture(scope="module")
def tokenizer(demo_pair):
    found = Tokenizer.from_file(str(demo_pair / "target" / "tokenizer.json"))
    found.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return found


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer as Llama 2's: a space in front of every text, and bytes for characters that it does not know."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz:\n", "▁a", "us", "er"]
    found = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("u", "s"), ("e", "r")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return found


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def start(tokenizer, template="chatml", messages=()):
    return Conversation(
        partial(render_chat, TEMPLATES[template], special_tokens={}), tokenizer, messages=list(messages)
    )


def letters(tokenizer, text):
    """The same text in as many tokens as it has bytes, which is not how the tokenizer splits it."""
    ids = [token for letter in text for token in ids_of(tokenizer, letter)]
    assert text_of(tokenizer, ids) == text
    return ids


def test_a_prompt_goes_on_from_what_was_written_however_it_was_split(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    said = "def read_lines(path): return open(path)"
    output = letters(tokenizer, said)
    assert output != ids_of(tokenizer, said)
    for ending in ([end], [], [tokenizer.token_to_id("<|im_start|>")]):
        chat = start(tokenizer)
        first = chat.ask("write")
        chat.answer(said, [*output, *ending])
        second = chat.ask("again")
        known = [*first, *output, *([end] if ending == [end] else [])]
        assert second[: len(known)] == known
        assert text_of(tokenizer, second) == render_chat(CHATML, chat.messages, {})
        chat.answer("x", letters(tokenizer, "x"))
        assert chat.ask("more")[: len(second)] == second


@pytest.mark.parametrize("template", ["chatml", "plain"])
@pytest.mark.parametrize("first_word", ["▁a", "▁", "us"])
def test_a_first_word_is_kept_with_its_space_or_without(spaced, template, first_word):
    chat = start(spaced, template)
    first = chat.ask("so")
    output = [spaced.token_to_id(piece) for piece in (first_word, "us", "er", "▁", "▁a", "us")]
    said = decode_continuation(spaced, first, output)
    assert text_of(spaced, [*first, *output]) == text_of(spaced, first) + said
    assert said.startswith(first_word.replace("▁", " "))
    chat.answer(said, output)
    second = chat.ask("more")
    assert text_of(spaced, second) == text_of(
        spaced, ids_of(spaced, render_chat(TEMPLATES[template], chat.messages, {}))
    )
    if template == "chatml":  # after its mark the rest of a text is the same, wherever it begins
        assert second[: len(first) + len(output)] == [*first, *output]


def test_an_answer_that_was_cut_at_a_stop_text_is_kept_as_far_as_it_was_said(tokenizer):
    output = letters(tokenizer, "one two STOP three")
    chat = start(tokenizer)
    first = chat.ask("count")
    chat.answer("one two ", output)
    assert chat.ask("go on")[: len(first) + 8] == [*first, *output[:8]]


def test_half_a_character_is_never_kept(tokenizer):
    half = letters(tokenizer, "né")[:-1]
    chat = start(tokenizer)
    first = chat.ask("write")
    chat.answer(text_of(tokenizer, half), half)
    again = chat.ask("go on")
    assert text_of(tokenizer, half).endswith("\ufffd")
    assert again[: len(first) + 2] == [*first, half[0], ids_of(tokenizer, "\ufffd")[0]]


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        ("chatml", True), ("plain", True), ("trimmed", True), ("unthinking", False), ("thinking", False),
        ("counting", False),
    ],
)  # fmt: skip
def test_what_a_template_changes_is_encoded_anew(tokenizer, template, kept):
    chat = start(tokenizer, template)
    output = letters(tokenizer, "<think>hm</think>\n\nyes it is" if template == "unthinking" else "yes it is\n")
    first = chat.ask("so?")
    chat.answer(text_of(tokenizer, output), output)
    again = chat.ask("sure?")
    rendered = render_chat(TEMPLATES[template], chat.messages, {})
    assert text_of(tokenizer, again) == rendered
    size = len(first) + len(output) - 1
    assert (again[:size] == [*first, *output][:size]) is kept
    if template in ("thinking", "counting"):  # nothing begins alike: no id is of another turn
        assert again == ids_of(tokenizer, rendered)


@chance.examples(60)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_the_text_is_always_the_templates(tokenizer, spaced, kind, data):
    """Whatever the model writes, and whatever is said, taken back or forgotten."""
    tokenizer = tokenizer if kind == "bytes" else spaced
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    template = data.draw(st.sampled_from(sorted(TEMPLATES)))
    chat = start(tokenizer, template)
    for _ in range(data.draw(st.integers(1, 5))):
        ids = chat.ask(data.draw(st.text(st.characters(codec="utf-8"), max_size=12)))
        rendered = render_chat(TEMPLATES[template], chat.messages, {})
        assert text_of(tokenizer, ids) == text_of(tokenizer, ids_of(tokenizer, rendered))
        what = data.draw(st.sampled_from(["answer", "answer", "answer", "undo", "drop", "system"]))
        if what == "undo":
            chat.undo()
            continue
        output = random.integers(0, tokenizer.get_vocab_size(), data.draw(st.integers(1, 20))).tolist()
        stream = TextStream(tokenizer, SamplingParams(), prompt=ids)
        for token in output:
            stream.append(token)
        chat.answer(stream.finish(), output, "length")
        if what == "drop":
            chat.drop_oldest()
        elif what == "system":
            chat.system = data.draw(st.sampled_from([None, "Be brief."]))


def test_what_is_taken_back_was_never_said(tokenizer):
    chat = start(tokenizer)
    assert chat.undo() is None
    first = chat.ask("one")
    assert chat.undo() == "one"
    assert chat.ask("one") == first
    chat.answer("1", ids_of(tokenizer, "1"))
    before, second = chat.messages, chat.ask("two")
    chat.answer("2", ids_of(tokenizer, "2"), "cancelled")
    assert chat.messages[-1] == {"role": "assistant", "content": "2", "finish_reason": "cancelled"}
    assert chat.undo() == "two"
    assert chat.messages == before
    assert chat.ask("two") == second


def test_turns_and_the_system_prompt(tokenizer):
    chat = start(tokenizer)
    for number in range(3):
        chat.ask(f"question {number}")
        chat.answer(f"answer {number}", ids_of(tokenizer, f"answer {number}"))
    chat.system = "Be brief."
    assert (chat.num_turns, chat.system) == (3, "Be brief.")
    other = chat.copy()
    assert other.drop_oldest(2) == 2
    assert [message["content"] for message in other.messages] == ["Be brief.", "question 2", "answer 2"]
    assert chat.num_turns == 3
    other.system = None
    other.system = "Be long."
    other.clear()
    assert other.messages == [{"role": "system", "content": "Be long."}]
    assert other.drop_oldest() == 0


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "content": "x"}], r"messages\[0\] is of 'assistant'"),
        ([{"role": "user", "content": "x"}], "has no answer"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "x"}], r"messages\[1\]"),
        ([{"role": "user", "content": ["x"]}], "no content that is a text"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_what_is_no_conversation_is_refused(tokenizer, messages, words):
    with pytest.raises(InvalidRequestError, match=words):
        start(tokenizer, messages=messages)
    chat = start(tokenizer)
    with pytest.raises(InvalidRequestError, match="no question"):
        chat.answer("x", [1])
    with pytest.raises(InvalidRequestError, match="surrogate"):
        chat.ask("\ud800")
    assert chat.messages == []
    chat.ask("x")
    with pytest.raises(InvalidRequestError, match="no answer"):
        chat.ask("y")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_reads_only_what_is_new(temperature):
    engine = make_engine(chat_template="{% for m in messages %}w{{ m.role | length }} {{ m.content }} {% endfor %}w9 ")
    chat, known = engine.conversation([]), 0
    words = [f"w{number}" for number in range(3, 17)]
    for turn in range(3):
        ids = chat.ask(" ".join(words[: 14 if not turn else 4]))
        params = SamplingParams(max_tokens=4, temperature=temperature, seed=chance.seed(turn))
        result = engine.generate([ids], params)[0]
        assert result.stats.cached_tokens == max(known - 1, 0)
        chat.answer(result.text, result.token_ids)
        known = len(ids) + len(result.token_ids)
    engine.check()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        make_engine().conversation()
    assert len(make_engine().conversation(chat_template="{{ messages[0].content }}").ask("w1 w2")) == 2

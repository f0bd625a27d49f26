"""Grammars that begin where the thinking ends: place by place, in and out of drafts."""

import json
import re

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.functions import ToolChoice, read_functions
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import Thinking
from tests.support.cases import chance
from tests.support.fakes.chat_fakes import MARKERS, PLAIN, letters
from tests.support.fakes.rounds import opened

pytest.importorskip("llguidance")

TOKENIZER = letters(*MARKERS)
BEGIN, END, EOS, LINE = (TOKENIZER.token_to_id(text) for text in ("<think>", "</think>", "<|eot|>", "Ċ"))
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.get_vocab_size(), [EOS])
A, B = (TOKENIZER.token_to_id(letter) for letter in "ab")


def grammar(thinking, **form):
    return COMPILER.compile(StructuredOutputs(**(form or {"regex": "ab+"}), thinking=thinking))


def allowed_by_hand(thinking, tokens):
    """What may follow ``tokens`` before ``ab+``; written down anew, letter by letter."""
    everything = set(range(TOKENIZER.get_vocab_size()))
    thinks, rest = thinking.begin is None, list(tokens)
    if not thinks and rest[:1] == [thinking.begin]:
        thinks, rest = True, rest[1:]
    if thinks:
        if thinking.end not in rest:
            return everything - {EOS}
        rest = rest[rest.index(thinking.end) + 1 :]
    lines = 0
    while thinks and lines < 2 and rest[:1] == [LINE]:
        rest, lines = rest[1:], lines + 1
    if not rest:
        more = {LINE} if thinks and lines < 2 else {thinking.begin} if not thinks and not tokens else set()
        return {A} | more
    return {B} if rest == [A] else {B, EOS}


@pytest.mark.parametrize("thinking", [Thinking(END, None, (LINE,)), Thinking(END, BEGIN, (LINE,))])
@pytest.mark.parametrize("width", [0, 1, 2, 5])
def test_masks_are_right_at_every_place_of_a_draft(thinking, width):
    """Texts in drafts of every width: each mask, what is cut, and what is committed."""
    whole = [77, 5, BEGIN, END, LINE, LINE, A, B, B, EOS]
    texts = [([] if thinking.begin is None else [BEGIN]) + whole]
    texts += [[*texts[0][:-6], A, B, EOS]] + ([[A, B, B, EOS]] if thinking.begin else [])
    for text in texts:
        rules, at = grammar(thinking), 0
        while at < len(text):
            draft = text[at : at + width]
            assert rules.cut(draft) == len(draft)
            for count in range(len(draft) + 1):
                known = text[: at + count]
                found = rules.allowed(draft[:count])
                if EOS in known:
                    assert found is None
                else:
                    assert set(np.flatnonzero(found)) == allowed_by_hand(thinking, known), known
            rules.consume(text[at : at + width + 1])
            at += width + 1
        assert rules.forced(5) == []


def test_drafts_are_cut_where_they_break_the_form():
    thinking = Thinking(END, None, (LINE,))
    assert grammar(thinking).cut([5, END, LINE, A, A, B]) == 4
    assert grammar(thinking).cut([5, END, B]) == 2
    assert grammar(thinking).cut([5, EOS, END]) == 1  # a text may not end while it thinks
    assert grammar(Thinking(END, BEGIN)).cut([B]) == 0
    rules = grammar(thinking)
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        rules.consume([5, END, B])


def test_a_form_that_may_be_empty_may_end_while_the_text_thinks():
    rules = grammar(Thinking(END, None), regex="(ab)?")
    assert rules.allowed([7])[EOS]
    assert rules.cut([7, EOS]) == 2
    rules.consume([7, EOS])
    assert rules.allowed([]) is None
    assert rules.cut([A]) == 0


def test_a_line_break_that_the_form_begins_with_is_the_form_s():
    rules = grammar(Thinking(END, None, (LINE,)), regex="\n+a")
    rules.consume([5, END, LINE, A])
    assert set(np.flatnonzero(rules.allowed([]))) == {EOS}


def test_what_is_forced_is_told_behind_the_thinking_only():
    rules = grammar(Thinking(END, None, (LINE,)), choice=("abab", "abba"))
    assert rules.forced(9) == []
    rules.consume([5, END])
    assert rules.forced(9) == []  # a line may break here
    rules.consume([LINE, LINE, A])
    assert rules.forced(9) == [B]


def test_thinking_is_token_ids():
    for fields in ({"end": -1}, {"end": "x"}, {"end": True}, {"end": 1, "between": ("\n",)}):
        with pytest.raises(InvalidRequestError, match="no token ids"):
            Thinking(**fields)
    with pytest.raises(InvalidRequestError, match="thinking is a dict"):
        StructuredOutputs(regex="a", thinking={"end": 1})


SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["size", "on"],
    "additionalProperties": False,
}
PROMPT = "def add(a, b):\n    return a + b\n\n\n"


@pytest.fixture(scope="module")
def engine(demo_bundle):
    with opened(demo_bundle, 4, adaptive=True) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_real_models_take_their_form_behind_the_border(engine, temperature):
    """The demo pair thinks until it writes a parenthesis; greedy texts are those of plain decoding, whatever K is."""
    (end,) = engine.tokenizer.encode("(", add_special_tokens=False).ids
    form = StructuredOutputs(json=SCHEMA, thinking=Thinking(end))
    free = engine.generate([PROMPT], [SamplingParams(max_tokens=40)], drafter="none")[0].token_ids
    drafting = [{"drafter": "none"}, {"drafter": "lookup"}, {"drafter": "auto"}]
    drafting += [{"drafter": "draft-model", "num_speculative_tokens": k} for k in (1, engine.lookahead)]
    texts = []
    for number, how in enumerate(drafting):
        params = SamplingParams(
            max_tokens=150, temperature=temperature, seed=chance.seed(number), structured_outputs=form
        )
        result = engine.generate([PROMPT], [params], **how)[0]
        if result.finish_reason == "stop":
            at = result.token_ids.index(end)
            answer = engine.tokenizer.decode(result.token_ids[at + 1 :])
            assert list(json.loads(answer)) == ["size", "on"]
            assert temperature or result.token_ids[: at + 1] == free[: at + 1]
        texts.append(result.token_ids)
        if number and not temperature:
            assert result.stats.rounds < len(result.token_ids)  # something was drafted and accepted
    if not temperature:
        assert all(text == texts[0] for text in texts)
        assert len(texts[0]) < 150


def test_a_batch_of_texts_that_think_and_that_do_not(engine):
    (end,) = engine.tokenizer.encode("(", add_special_tokens=False).ids
    forms = [None, StructuredOutputs(regex="[a-c]{4}", thinking=Thinking(end)), StructuredOutputs(regex="[a-c]{4}")]
    params = [SamplingParams(max_tokens=30, structured_outputs=form) for form in forms]
    together = engine.generate([PROMPT] * 3, params, drafter="draft-model")
    alone = [engine.generate([PROMPT], [each], drafter="none")[0] for each in params]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert re.fullmatch(r"(?s)[^(]*\([a-c]{4}", together[1].text)
    assert re.fullmatch("[a-c]{4}", together[2].text)


def test_calls_of_real_models(engine, monkeypatch):
    """The demo pair, which was never told of functions, calls one; the same call with every way of drafting."""
    monkeypatch.setattr(engine, "_chat_template", PLAIN)
    tools = [{"type": "function", "function": {"name": "set_size", "parameters": SCHEMA}}]
    messages, functions = [{"role": "user", "content": PROMPT}], read_functions(tools)
    dialect = engine.chat_dialect("json")
    prompt = dialect.render(messages, tools)
    form = dialect.form(prompt, functions, ToolChoice("required", "set_size"))
    params = SamplingParams(max_tokens=100, structured_outputs=form)
    ids = engine.tokenizer.encode(prompt, add_special_tokens=False).ids
    results = [
        engine.generate([ids], [params], drafter=drafter)[0] for drafter in ("none", "draft-model", "lookup", "auto")
    ]
    assert len({result.text for result in results}) == 1
    (call,) = dialect.read(results[0].text, prompt, tools).calls
    assert call.name == "set_size"
    assert list(json.loads(call.arguments)) == ["size", "on"]
    forced = results[1].stats.drafters["forced"]
    assert forced.accepted > 0.8 * forced.drafted > 4
    with pytest.raises(InvalidRequestError, match="knows no tools"):
        engine.format_chat(messages, tools)
    assert engine.encode_chat(messages) == engine.encode(engine.format_chat(messages))

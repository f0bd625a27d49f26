"""What answers consist of: calls in every format, thinking, and what looks like either and is text."""

import random
from dataclasses import replace

import pytest

from specexport_runtime.intake.answer_reader import AnswerReader, AnswerSyntax, ThinkingMarks, read_parts
from specexport_runtime.intake.tool_formats.base import Arguments, Broken, CallBegin, Content, ReasoningSpan
from specexport_runtime.intake.tool_formats.families import FORMATS
from tests.support.cases import chance

NAMES = frozenset({"find", "stop"})
MARKS = ThinkingMarks("<think>", "</think>")
ONE = ("find", '{"a": "}\\""}')
NO_ARGUMENTS = ("stop", "{}")
GOOD = [
    # format, answer, text for the user, calls
    ("hermes", '<tool_call>\n{"name": "find", "arguments": {"a": "}\\""}}\n</tool_call>', "", [ONE]),
    (
        "hermes",
        'Well.\n\n<tool_call>\n{"name": "find", "arguments": {"a": "}\\""}}\n</tool_call>\n<tool_call>\n'
        '{"name": "stop", "arguments": {}}\n</tool_call>\n',
        "Well.",
        [ONE, NO_ARGUMENTS],
    ),
    ("hermes", '<tool_call>{"arguments": {}, "name": "stop"}</tool_call>', "", [NO_ARGUMENTS]),
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"b\\": 1}"}', "", [("find", '{"b": 1}')]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {}}</tool_call> bye', "bye", [NO_ARGUMENTS]),
    ("llama3_json", '{"name": "find", "parameters": {"a": "}\\""}}', "", [ONE]),
    ("llama3_json", ' {"type": "function", "name": "stop", "parameters": {}}', "", [NO_ARGUMENTS]),
    ("llama3_json", '{"name": "stop", "parameters": {}}; {"name": "stop", "parameters": {}}', "", [NO_ARGUMENTS] * 2),
    ("llama3_json", 'Well.<|python_tag|>{"name": "stop", "parameters": {}}', "Well.", [NO_ARGUMENTS]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "find", "arguments": {"a": "}\\""}}, {"name": "stop"}]',
        "",
        [ONE, NO_ARGUMENTS],
    ),
    ("mistral", 'Well.[TOOL_CALLS] [{"arguments": {}, "name": "stop"}]', "Well.", [NO_ARGUMENTS]),
    ("mistral", '[TOOL_CALLS]find[ARGS]{"a": "}\\""}[TOOL_CALLS]stop[ARGS]{}', "", [ONE, NO_ARGUMENTS]),
    ("mistral", "[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}", "", [NO_ARGUMENTS]),
    ("mistral", "[TOOL_CALLS]stop{}", "", [NO_ARGUMENTS]),
    ("json", '{"name": "find", "arguments": {"a": "}\\""}}', "", [ONE]),
    ("json", '[{"name": "find", "arguments": {"a": "}\\""}}, {"name": "stop"}]', "", [ONE, NO_ARGUMENTS]),
]
TEXT = [
    ("hermes", "Hello.\n\n"), ("hermes", ""), ("hermes", "see  <tool_call> and </tool_call>"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": "x"}</tool_call>'), ("hermes", '<tool_call>\n{"na'),
    ("hermes", "<tool_call>[]</tool_call>"), ("llama3_json", '{"x": {"name": "find"}}'),
    ("llama3_json", "<|python_tag|>print(1)"), ("llama3_json", 'as in {"name": "find", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"), ("mistral", "[TOOL_CALLS]"), ("mistral", f"[TOOL_CALLS]{'a' * 300}"),
    ("json", "[1, 2]"), ("json", '{"name": NaN}'),
]  # fmt: skip


def pieces_of(text, draw):
    while text:
        size = draw.choice([1, 1, 2, 5, 30])
        yield text[:size]
        text = text[size:]


def read_in_pieces(syntax, text, draw, *, is_cut=False):
    reader, events = AnswerReader(syntax), []
    for piece in pieces_of(text, draw):
        events += reader.take(piece)
    events += reader.finish(is_cut=is_cut)
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningSpan))
    calls = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, reasoning, calls, any(isinstance(event, Broken) for event in events)


def syntax_of(name, **more):
    return AnswerSyntax(format=FORMATS[name](), names=NAMES, **more)


@pytest.mark.fuzz
@pytest.mark.parametrize("think", [None, "", "<think>\nhm <tool_call> {\n</think>\n\n"])
@pytest.mark.parametrize(("name", "answer", "content", "calls"), GOOD + [(*case, case[1], []) for case in TEXT])
def test_whole_and_in_pieces(name, answer, content, calls, think):
    syntax = syntax_of(name, thinking=None if think is None else MARKS)
    whole = read_parts(syntax, (think or "") + answer, is_cut=False)
    thought = "hm <tool_call> {" if think else ""
    if think and not calls:
        content = content.lstrip("\n")
    assert (whole.content, whole.reasoning) == (content, thought)
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    for i in range(chance.many(4)):
        draw = random.Random(chance.seed(i))
        streamed = read_in_pieces(syntax, (think or "") + answer, draw)
        assert streamed == (content, thought, calls, False)


@pytest.mark.fuzz
@pytest.mark.parametrize("think", ["", "<think>\nhm, </thin \n</think>\n\n"])
@pytest.mark.parametrize(
    ("name", "answer"), [*{case[:2] for case in GOOD + TEXT}, ("hermes", "Well. \n\n<tool_ca"), (None, " a \n")]
)
def test_an_answer_that_goes_on_is_the_rest_of_a_whole_one(name, answer, think):
    """Cut anywhere before its first call: with an echo it is the whole, without one what the beginning has not."""
    syntax = AnswerSyntax(thinking=MARKS) if name is None else syntax_of(name, thinking=MARKS)
    text, calls = think + answer, FORMATS[name]() if name else None
    ends = [text.find(each) for each in calls.openers if each in text] if calls else []
    first = len(think) if calls and answer.lstrip()[:1] in tuple(calls.starts) else min(ends, default=len(text))
    whole = read_in_pieces(syntax, text, random.Random(0))
    for i in range(chance.many(6)):
        draw = random.Random(chance.seed(i))
        at = draw.randint(min(len("<think>") if think else 1, first), first)
        begun = replace(syntax, beginning=text[:at])
        assert read_in_pieces(replace(begun, echo=True), text[at:], draw) == whole
        known = read_parts(syntax, text[:at], is_cut=True)
        rest = read_in_pieces(begun, text[at:], draw)
        for found, all_of_it, said in zip(rest, whole, (known.content, known.reasoning), strict=False):
            assert found == ("" if said.startswith(all_of_it) else all_of_it.removeprefix(said))
        assert rest[2:] == whole[2:]


@pytest.mark.parametrize(
    ("name", "before", "arguments", "after"),
    [
        ("hermes", 'Well. <tool_call>{"name": "find", "arguments": ', '{"a": }', "}</tool_call>"),
        ("hermes", 'Well. <tool_call>{"name": "find", "arguments": ', '{"a": NaN}', "}</tool_call>"),
        ("hermes", 'Well. <tool_call>{"name": "find", "arguments": ', '{"a": 1}', ', "name": "stop"}'),
        ("hermes", 'Well. <tool_call>{"name": "find", "arguments": ', '{"a": 1}', " garbage}"),
        ("hermes", 'Well. <tool_call>{"name": "find", "arguments": ', '{"a": 1', ""),
        ("llama3_json", '{"name": "find", "parameters": ', "{1}", "}"),
        ("mistral", "Well.[TOOL_CALLS]find[ARGS]", "{'a': 1}", ""),
    ],
)
def test_a_call_that_breaks_off_is_text_or_was_sent(name, before, arguments, after):
    """Whole, it is text. In a stream, what was sent of it stays sent."""
    text = before + arguments + after
    whole = read_parts(syntax_of(name), text, is_cut=False)
    assert whole.calls == []
    assert whole.content.replace(" ", "") == text.removesuffix("</tool_call>").replace(" ", "") or (
        whole.content.replace(" ", "") == text.replace(" ", "")
    )
    _, _, calls, is_broken = read_in_pieces(syntax_of(name), text, random.Random(1))
    assert is_broken
    assert calls == [("find", arguments)]


@pytest.mark.parametrize("at", range(1, 60, 4))
def test_what_was_cut_off_is_given_as_far_as_it_goes(at):
    text = '<tool_call>\n{"name": "find", "arguments": {"a": "b", "c": [1, 2]}}\n</tool_call>'[:at]
    parts = read_parts(syntax_of("hermes"), text, is_cut=True)
    begun = text.find('"arguments": {')
    if begun < 0:
        assert (parts.content, parts.calls) == (text, [])
    else:
        assert parts.content == ""
        assert [call.arguments for call in parts.calls] == [text[begun + 13 :][:24]]


def test_one_call_where_one_is_wanted():
    text = '<tool_call>{"name": "find", "arguments": {}}</tool_call>\n' * 3 + "bye"
    syntax = syntax_of("hermes", most_calls=1)
    parts = read_parts(syntax, text, is_cut=False)
    assert ([call.name for call in parts.calls], parts.content) == (["find"], "bye")
    assert read_in_pieces(syntax, text, random.Random(2))[2] == [("find", "{}")]


def test_thinking_that_the_prompt_has_begun():
    syntax = AnswerSyntax(MARKS, has_begun=True)
    assert read_parts(syntax, "\nhm\n</think>\n\nHi\n", is_cut=False).reasoning == "hm"
    assert read_parts(syntax, "\nhm\n</think>\n\nHi\n", is_cut=False).content == "Hi\n"
    assert read_parts(syntax, "hm </thi", is_cut=True).reasoning == "hm </thi"
    later = read_parts(AnswerSyntax(MARKS), "Hi <think>no</think>", is_cut=False)
    assert (later.content, later.reasoning) == ("Hi <think>no</think>", "")


def test_deep_nesting_is_no_error():
    deep = "[" * 50_000 + "]" * 50_000
    text = f'<tool_call>{{"name": "find", "arguments": {{"a": {deep}}}}}</tool_call>'
    assert read_parts(syntax_of("hermes"), text, is_cut=False).calls == []

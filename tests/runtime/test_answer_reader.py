"""What answers consist of: calls in every format, thinking, and what looks like either and is text."""

import random
import time
from dataclasses import replace

import pytest

from specexport_runtime.intake.answer_reader import AnswerReader, AnswerSyntax, ThinkingMarks, read_parts
from specexport_runtime.intake.tool_formats.base import Arguments, Broken, CallBegin, Content, ReasoningSpan
from specexport_runtime.intake.tool_formats.families import FORMATS
from tests.support.cases import chance

SCHEMAS = {
    "find": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/text"}, "n": {"type": "integer"}, "o": {"type": "object"}, "any": {}},
        "$defs": {"text": {"type": "string"}},
    },
    "stop": {"type": "object", "properties": {}},
}
MARKS = ThinkingMarks("<think>", "</think>")
V31, K2 = (FORMATS[name].markers for name in ("deepseek_v31", "kimi_k2"))
JSON = '{"b": ["</parameter></function></tool_call>", 1]}'
TAGS = '{"</parameter><parameter=n>": 0}'
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
    (
        "minimax",
        'Well.\n<tool_calls>\n{"name": "find", "arguments": {"a": "}\\""}}\n'
        '{"name": "stop", "arguments": {}}\n</tool_calls>',
        "Well.",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "deepseek_v31",
        f"Well.{V31[0]}{V31[2]}find{V31[3]}"
        + '{"a": "}\\""}'
        + f"{V31[4]}{V31[2]}stop{V31[3]}{{}}{V31[4]}{V31[1]} bye",
        "Well.bye",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        '{"a": "}\\""}<|tool_call_end|>\n<|tool_call_begin|>functions.stop:1 <|tool_call_argument_begin|> {}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "qwen3_coder",
        'Well.\n<tool_call>\n<function=find>\n<parameter=a>\n}"\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call><function=stop></function></tool_call>",
        "Well.",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=find><parameter=a>\n\n x</parameter> y </function>\n<parameter=n>5</tool_call>\n\n"
        "</parameter><parameter=n>\n-1.50e3\n</parameter><parameter=o>" + TAGS + "</parameter><parameter=any>True"
        "</parameter><parameter=other>\n1 2\n</parameter></function></tool_call>",
        "",
        [
            (
                "find",
                '{"a": "\\n x</parameter> y </function>\\n<parameter=n>5</tool_call>\\n", "n": -1.50e3, '
                '"o": ' + TAGS + ', "any": true, "other": "1 2"}',
            )
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=find>\n<parameter=o>\n" + JSON + "\n</parameter>\n</function>",
        "",
        [("find", f'{{"o": {JSON}}}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="a">}"</parameter>\n</invoke>\n'
        '<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        "",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "glm45",
        'Well.\n<tool_call>find\n<arg_key>a</arg_key>\n<arg_value>}"</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>',
        "Well.",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "glm45",
        "<tool_call>find<arg_key>a</arg_key><arg_value>\n\n</arg_value><arg_key>n</arg_key><arg_value>null</arg_value></tool_call>",
        "",
        [("find", '{"a": "\\n\\n", "n": null}')],
    ),
    (
        "qwen3_coder",  # what is no JSON is a text, and so is what was begun like it
        "<tool_call><function=find><parameter=o>{'b\n</parameter><parameter=any>\n\"c\n</parameter><parameter=n>\nNaN\n"
        "</parameter></function></tool_call>",
        "",
        [("find", '{"o": "{\'b", "any": "\\"c", "n": "NaN"}')],
    ),
    ("openai", '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"a": "}\\""}<|call|>', "", [ONE]),
    (
        "openai",
        " to=functions.find<|channel|>commentary json<|message|>"
        '{"a": "}\\""}<|call|><|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}',
        "",
        [ONE, NO_ARGUMENTS],
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|> to=functions.x "
        "<|end|>\n",
        "Well.\n\n to=functions.x <|end|>\n",
        [],
    ),
]
TEXT = [
    ("hermes", "Hello.\n\n"), ("hermes", ""), ("hermes", "see  <tool_call> and </tool_call>"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": "x"}</tool_call>'), ("hermes", '<tool_call>\n{"na'),
    ("hermes", "<tool_call>[]</tool_call>"), ("llama3_json", '{"x": {"name": "find"}}'),
    ("llama3_json", "<|python_tag|>print(1)"), ("llama3_json", 'as in {"name": "find", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"), ("mistral", "[TOOL_CALLS]"), ("mistral", f"[TOOL_CALLS]{'a' * 300}"),
    ("json", "[1, 2]"),
    ("json", '{"name": NaN}'),
    ("minimax", "<tool_calls>\n</tool_calls>"),
    ("deepseek_v31", f"{V31[0]}{V31[2]}other{V31[3]}{{}}{V31[4]}{V31[1]}"),
    ("deepseek_v31", V31[0] + V31[2] + "x" * 300),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>find<|tool_call_argument_begin|>{}"),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "see <tool_call> and <function=find>"),
    ("qwen3_coder", '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=find"),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("minimax_m2", f'<minimax:tool_call>{" " * 999}<invoke name="x">'),
    ("glm45", "<tool_call>find</tool_call"),
    ("glm45", "<tool_call>find it</tool_call>"),
    ("glm45", "<tool_call></tool_call>"),
    ("openai", "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}"),
    ("openai", "<|channel|>wrong"),
    ("openai", "<|channel|>commentary to=functions.find <|message|>[1]"),
    ("openai", "<|start|>user"),
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
    return AnswerSyntax(format=FORMATS[name](), schemas=SCHEMAS, **more)


@pytest.mark.fuzz
@pytest.mark.parametrize("think", [None, "", "<think>\nhm <tool_call> {\n</think>\n\n"])
@pytest.mark.parametrize(("name", "answer", "content", "calls"), GOOD + [(*case, case[1], []) for case in TEXT])
def test_whole_and_in_pieces(name, answer, content, calls, think):
    syntax = syntax_of(name, thinking=None if think is None else MARKS)
    if think and name == "openai":
        think = "<|channel|>analysis<|message|>\nhm <tool_call> {\n<|end|>"
    whole = read_parts(syntax, (think or "") + answer, is_cut=False)
    thought = "\n" * (name == "openai") + "hm <tool_call> {" if think else ""
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
    ("name", "answer"),
    [*dict.fromkeys(case[:2] for case in GOOD + TEXT), ("hermes", "Well. \n\n<tool_ca"), (None, " a \n")],
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
        ("minimax", 'Well. <tool_calls>{"name": "find", "arguments": ', '{"a": }', "}"),
        ("deepseek_v31", f"Well.{V31[0]}{V31[2]}find{V31[3]}", '{"a": 1,}', ""),
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


CUT = {
    "qwen3_coder": "<tool_call><function=find>\n<parameter=a>\nx</p\n</parameter>\n<parameter=n>\n5\n</parameter>\n<",
    "glm45": "<tool_call>find\n<arg_key>a</arg_key><arg_value>x</p</arg_value>\n<arg_key>n</arg_key><arg_value>5</arg",
    "minimax_m2": '<minimax:tool_call><invoke name="find"><parameter name="a">x</p</parameter><parameter name="n">5',
    "openai": '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"a": "x</p", "n": 5}',
    "kimi_k2": f'{K2[0]}{K2[2]}functions.find:0{K2[3]}{{"a": "x</p", "n": 5}}',
}


@pytest.mark.parametrize("name", CUT)
def test_every_cut_gives_the_beginning_of_what_was_called(name):
    """Whole and in pieces; before that, it is text. Nothing of a tag gets into a value."""
    lengths = set()
    for at in range(len(CUT[name]) + 1):
        text = CUT[name][:at]
        parts = read_parts(syntax_of(name), text, is_cut=True)
        calls = [(call.name, call.arguments) for call in parts.calls]
        assert read_in_pieces(syntax_of(name), text, random.Random(at), is_cut=True)[:3] == (parts.content, "", calls)
        if calls:
            lengths.add(len(calls[0][1]))
            assert '{"a": "x</p", "n": 5}'.startswith(calls[0][1]), text
            assert parts.content == ""
        else:
            assert parts.content == text
    assert len(lengths) > 4


def test_arguments_with_tags_stream():
    """A text comes letter by letter, but for what may be its closing tag."""
    reader, sent = AnswerReader(syntax_of("qwen3_coder")), []
    for letter in "<tool_call>\n<function=find>\n<parameter=a>\nsome <b>text</b>":
        sent += [event.text for event in reader.take(letter) if isinstance(event, Arguments)]
    assert "".join(sent) == '{"a": "some <b>text</b>'
    assert len(sent) > 12


@pytest.mark.parametrize("name", ["qwen3_coder", "openai", "kimi_k2", "glm45"])
def test_long_answers_of_markers_are_read_in_little_time(name):
    """Four times as long takes about four times as long, whatever looks like a call."""

    def seconds(count, unit):
        best = 9.0
        for _ in range(2):
            begin = time.perf_counter()
            reader = AnswerReader(syntax_of(name, thinking=MARKS))
            for _ in range(10):
                reader.take(unit * count)
            reader.finish(is_cut=False)
            best = min(best, time.perf_counter() - begin)
        return best

    for unit in (*FORMATS[name].markers, CUT[name], f"{CUT[name][:-20]}{{{{"):
        assert seconds(200, unit) < 10 * seconds(50, unit) + 0.05


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

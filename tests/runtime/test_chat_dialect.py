"""What chat templates tell: functions, the format of calls, thinking; and the grammars that come of it."""

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.functions import FunctionError, ToolChoice, read_functions
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import Thinking
from tests.support.fakes.chat_fakes import MARKERS, PLAIN, TEMPLATES, THINKS, letters

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "stop", "description": "Ends it."}},
]
ASK = [{"role": "user", "content": "ask"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TALK = [
    *ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
]


def dialect_of(template, *markers, **parsers):
    tokenizer = letters(*markers)
    return ChatDialect(template, {}, tokenizer, [tokenizer.token_to_id("<|end|>")], **parsers)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_in_its_template(name):
    dialect = dialect_of(TEMPLATES[name])
    assert dialect.takes_tools
    assert dialect.tool_format.name == name.split()[0]
    assert dialect.tool_format.has_lists is (name == "mistral")
    text = dialect.render(TALK, TOOLS)
    assert '"city": "Paris"' in text
    assert "rain" in text
    assert dialect.thinking is None


def test_a_template_that_refuses_the_probe_tells_by_its_text():
    refuses = "{{ raise_exception('no') if messages | length > 1 }}{{ tools }}"
    assert dialect_of(refuses + "<tool_call>").tool_format.name == "hermes"
    assert dialect_of(refuses + "[TOOL_CALLS]").tool_format.name == "mistral"
    assert dialect_of(refuses + '{"name": f, "parameters": p}').tool_format.name == "llama3_json"
    assert dialect_of(refuses + "<tool_call><function=f>").tool_format is None


def test_templates_without_tools_refuse_them_or_have_them_told():
    with pytest.raises(InvalidRequestError, match=r"knows no tools.*--tool-call-parser json"):
        dialect_of(PLAIN).render(ASK, TOOLS)
    unknown = dialect_of("{{ tools }}{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="format that is not known"):
        unknown.render(ASK, TOOLS)
    told = dialect_of(PLAIN, tool_call_parser="json")
    calls = [CALL, {**CALL, "id": "second"}]
    talk = [
        {"role": "system", "content": "Be kind."},
        *ASK,
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
        {"role": "tool", "tool_call_id": "second", "content": "sun"},
    ]
    text = told.render(talk, TOOLS)
    assert text.startswith("<|user|>Be kind.\n\nYou may call the functions below.")
    assert '"name": "stop", "description": "Ends it."' in text
    written = '{"name": "weather", "arguments": {"city": "Paris"}}'
    assert f"<|assistant|>Well.\n[{written}, {written}]<|end|>" in text
    assert "<|user|>weather returned: rain\nweather returned: sun<|end|><|assistant|>" in text
    assert told.render(ASK, TOOLS).startswith("<|user|>You may call")
    assert told.render(ASK) == "<|user|>ask<|end|><|assistant|>"


def test_parsers_have_names():
    assert dialect_of(TEMPLATES["hermes"], tool_call_parser="mistral").tool_format.name == "mistral"
    for names in ({"tool_call_parser": "x"}, {"reasoning_parser": "x"}):
        with pytest.raises(InvalidRequestError, match="'x'"):
            dialect_of(PLAIN, **names)
    assert dialect_of(THINKS, reasoning_parser="none").thinking is None


def test_where_a_prompt_leaves_the_thinking():
    dialect = dialect_of(THINKS, *MARKERS)
    begin, end = (dialect._tokenizer.token_to_id(text) for text in ("<think>", "</think>"))
    line = dialect._tokenizer.token_to_id("Ċ")
    form = StructuredOutputs(regex="a")
    for given, thinking, has_begun in (
        ({}, Thinking(end, begin, (line,)), False),
        ({"force_thinking": True}, Thinking(end, None, (line,)), True),
        ({"enable_thinking": False}, None, False),
    ):
        prompt = dialect.render(ASK, (), given)
        assert dialect.form(prompt, answer=form) == StructuredOutputs(regex="a", thinking=thinking)
        syntax = dialect.syntax(prompt)
        assert (syntax.thinking is not None, syntax.has_begun) == (thinking is not None, has_begun)
        assert dialect.shown_tokens(syntax) == ((begin, end) if thinking else ())
    told = dialect.render([*ASK, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}])
    assert "<think>\nhm\n</think>\n\n\n<tool_call>" in told


def test_thinking_without_tokens_takes_no_form():
    dialect = dialect_of(THINKS)
    prompt = dialect.render(ASK)
    assert dialect.syntax(prompt).thinking is not None
    with pytest.raises(InvalidRequestError, match="is no token of this model"):
        dialect.form(prompt, answer=StructuredOutputs(regex="a"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mood": 1}, "does not read 'mood'"), ({"messages": []}, "not yours to set"),
        ({"tools": []}, "not yours to set"), ({"raise_exception": 1}, "not yours to set"),
        ({"enable_thinking": "x" * 5000}, "have 50.. characters"), ({"enable_thinking": {1, 2}}, "no JSON"),
        ({f"a{i}": 1 for i in range(17)}, "17 variables"),
    ],
)  # fmt: skip
def test_variables_of_a_template_are_bounded(given, said):
    with pytest.raises(InvalidRequestError, match=said):
        dialect_of(THINKS).render(ASK, (), given)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "tools"),
        ([TOOLS[0], {"type": "web"}], "tools[1]"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a" * 65}}], "tools[0].function.name"),
        ([*TOOLS, TOOLS[1]], "tools[2].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters",
        ),
        ([{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}], "tools"),
        ([{"type": "function", "function": {"name": "f", "description": {1}}}], "tools"),
    ],
)  # fmt: skip
def test_functions_are_checked(tools, param):
    with pytest.raises(FunctionError) as error:
        read_functions(tools)
    assert error.value.param == param


GOOD = '{"city": "Paris"}'
TEXTS = {
    # what calls weather once; twice, or weather and stop; wrongly; any text after which a call might have come
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {GOOD}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {GOOD}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
        "Hi <tool_call> there",
    ),
    "llama3_json": (
        f'{{"name": "weather", "parameters": {GOOD}}}',
        "",
        '{"name": "weather", "parameters": {"city": 5}}',
        '{"name": "other"}',
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {GOOD}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {GOOD}}}, {{"name": "stop", "arguments": {{}}}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "aaaaaaaaaaaa"}}]',
        "[TOOL_CALLS]",
    ),
    "mistral named": (
        f"[TOOL_CALLS]weather[ARGS]{GOOD}",
        f"[TOOL_CALLS]weather[ARGS]{GOOD}[TOOL_CALLS]stop[ARGS]{{}}",
        '[TOOL_CALLS]weather[ARGS]{"town": "Paris"}',
        "[TOOL_CALLS]stop",
    ),
    "json": (
        f'{{"name": "weather", "arguments": {GOOD}}}',
        f'[{{"name": "weather", "arguments": {GOOD}}}, {{"name": "stop", "arguments": {{}}}}]',
        '{"name": "weather", "arguments": {"city": null}}',
        '[{"name": "weather"}]',
    ),
}


def matcher_of(dialect, choice, answer=None):
    llguidance = pytest.importorskip("llguidance")
    tokenizer = dialect._tokenizer
    form = dialect.form(dialect.render(ASK, TOOLS), read_functions(TOOLS), choice, answer)
    known = llguidance.LLTokenizer(
        tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[tokenizer.token_to_id("<|end|>")]
    )
    matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(form.grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def takes(text):
        mine, ids = matcher.deep_copy(), tokenizer.encode(text, add_special_tokens=False).ids
        return mine.try_consume_tokens(ids) == len(ids) and mine.is_accepting()

    return takes


@pytest.mark.parametrize("markers", [(), MARKERS], ids=["text", "tokens"])
@pytest.mark.parametrize("name", TEXTS)
def test_grammars_hold_from_the_opener_on(name, markers):
    """Markers that are tokens and markers that are text; required and strict; one call or several."""
    dialect = dialect_of(TEMPLATES.get(name, PLAIN), *markers, tool_call_parser=name.split()[0])
    one, two, wrong, half = TEXTS[name]
    stop_alone = one.replace("weather", "stop").replace(GOOD, "{}")

    takes = matcher_of(dialect, ToolChoice("required"))
    assert [takes(text) for text in (one, stop_alone, wrong, half, "Hi there")] == [True, True, False, False, False]
    assert takes(two) is bool(two)
    takes = matcher_of(dialect, ToolChoice("required", parallel=False))
    assert [takes(text) for text in (one, two or half)] == [True, False]
    takes = matcher_of(dialect, ToolChoice("required", "weather"))
    assert [takes(text) for text in (one, stop_alone, two or half)] == [True, False, False]

    takes = matcher_of(dialect, ToolChoice())  # weather is strict
    free = "Hi there {[<é>]}"
    assert [takes(text) for text in (free, "", one, wrong, half)] == [True, True, True, False, False]
    if not dialect.tool_format.starts:
        assert [takes(f"Well.\n{text}") for text in (one, two, wrong)] == [True, True, False]
    takes = matcher_of(dialect, ToolChoice(parallel=False))
    assert [takes(text) for text in (free, one, wrong)] == [True, True, False]
    if two and not dialect.tool_format.starts:
        assert not takes(two)

    answer = StructuredOutputs(json={"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]})
    takes = matcher_of(dialect, ToolChoice(), answer)
    assert [takes(text) for text in (one, wrong, '{"q":3}', '{"q":"x"}', free)] == [True, False, True, False, False]


def test_tags_of_llama_in_the_middle():
    takes = matcher_of(dialect_of(TEMPLATES["llama3_json"], *MARKERS), ToolChoice())
    call = TEXTS["llama3_json"][0]
    assert [takes(text) for text in (f"Hi <|python_tag|>{call}", "Hi <|python_tag|>1", '{"x": 1}')] == [
        True,
        False,
        True,
    ]


def test_what_needs_no_grammar_has_none():
    dialect = dialect_of(TEMPLATES["hermes"])
    loose = read_functions([TOOLS[1]])
    prompt = dialect.render(ASK, [TOOLS[1]])
    assert dialect.form(prompt, loose) is None
    assert dialect.form(prompt, loose, ToolChoice("none")) is None
    with pytest.raises(InvalidRequestError, match="tools are both given"):
        dialect.form(prompt, loose, ToolChoice(), StructuredOutputs(regex="a"))


def test_choices_name_what_is_there():
    dialect, functions = dialect_of(TEMPLATES["hermes"]), read_functions(TOOLS)
    dialect.check_choice(functions, ToolChoice("required", "stop"))
    for choice, given in ((ToolChoice("required", "x"), functions), (ToolChoice("required"), ())):
        with pytest.raises(FunctionError):
            dialect.check_choice(given, choice)


def test_ids_have_the_form_that_templates_take():
    mistral, hermes = (dialect_of(TEMPLATES[name]) for name in ("mistral", "hermes"))
    assert len({mistral.new_id() for _ in range(50)}) == 50
    assert len(mistral.new_id()) == 9
    assert mistral.new_id().isalnum()
    assert hermes.new_id().startswith("call_")

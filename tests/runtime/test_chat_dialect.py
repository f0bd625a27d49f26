"""What chat templates tell: functions, the format of calls, thinking; and the grammars that come of it."""

import json
import random

import numpy as np
import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.functions import FunctionError, ToolChoice, read_functions
from specexport_runtime.intake.tool_formats.families import FORMATS
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import Thinking
from tests.support.cases import chance
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
    return ChatDialect(template, {}, tokenizer, [tokenizer.token_to_id("<|eot|>")], **parsers)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_in_its_template(name):
    dialect = dialect_of(TEMPLATES[name])
    assert dialect.takes_tools
    assert dialect.tool_format.name == name.split()[0]
    lists = ("mistral", "minimax_m2", "minimax", "deepseek_v31", "kimi_k2")
    assert dialect.tool_format.has_lists is (name in lists)
    text = dialect.render(TALK, TOOLS)
    assert (TOLD.get(name) or TEXTS[name][0]) in text
    assert "rain" in text
    assert (dialect.thinking is not None) is (name == "openai")


def test_a_template_that_refuses_the_probe_tells_by_its_text():
    refuses = "{{ raise_exception('no') if messages | length > 1 }}{{ tools }}"
    assert dialect_of(refuses + "<tool_call>").tool_format.name == "hermes"
    assert dialect_of(refuses + "[TOOL_CALLS]").tool_format.name == "mistral"
    assert dialect_of(refuses + '{"name": f, "parameters": p}').tool_format.name == "llama3_json"
    assert dialect_of(refuses + "<tool_call><function=f>").tool_format is None
    tags = "<tool_call><function=f><parameter=k>v</parameter></function></tool_call>"
    assert dialect_of(refuses + tags).tool_format.name == "qwen3_coder"
    tags = "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    assert dialect_of(refuses + tags).tool_format.name == "glm45"
    assert dialect_of(refuses + "".join(V31)).tool_format.name == "deepseek_v31"
    assert dialect_of(refuses + "".join(V31) + "```json").tool_format is None  # as V3 writes them
    assert dialect_of(refuses + "<|channel|>a<|message|>").tool_format.name == "openai"
    assert dialect_of(refuses + "<|channel|>").tool_format is None


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
    assert f"<|assistant|>Well.\n[{written}, {written}]<|eot|>" in text
    assert "<|user|>weather returned: rain\nweather returned: sun<|eot|><|assistant|>" in text
    assert told.render(ASK, TOOLS).startswith("<|user|>You may call")
    assert told.render(ASK) == "<|user|>ask<|eot|><|assistant|>"


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
CITY_TAG = {
    "qwen3_coder": "<parameter=city>\nParis\n</parameter>\n",
    "glm45": "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
    "minimax_m2": '<parameter name="city">Paris</parameter>\n',
}
HEAD, TAIL = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
TOLD = {
    "kimi_k2": "functions.weather:0<|tool_call_argument_begin|>" + GOOD,
    "openai": f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{GOOD}<|call|>",
}
V31, K2 = (FORMATS[name].markers for name in ("deepseek_v31", "kimi_k2"))
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
    "minimax": (
        f'<tool_calls>\n{{"name": "weather", "arguments": {GOOD}}}\n</tool_calls>',
        f'<tool_calls>\n{{"name": "weather", "arguments": {GOOD}}}\n'
        '{"name": "stop", "arguments": {}}\n</tool_calls>',
        '<tool_calls>\n{"name": "weather", "arguments": {}}\n</tool_calls>',
        "<tool_calls>",
    ),
    "deepseek_v31": (
        f"{V31[0]}{V31[2]}weather{V31[3]}{GOOD}{V31[4]}{V31[1]}",
        f"{V31[0]}{V31[2]}weather{V31[3]}{GOOD}{V31[4]}{V31[2]}stop{V31[3]}{{}}{V31[4]}{V31[1]}",
        f"{V31[0]}{V31[2]}weather{V31[3]}{{}}{V31[4]}{V31[1]}",
        V31[0] + V31[2],
    ),
    "kimi_k2": (
        f"{K2[0]}{K2[2]}functions.weather:1{K2[3]}{GOOD}{K2[4]}{K2[1]}",
        f"{K2[0]}{K2[2]}functions.weather:1{K2[3]}{GOOD}{K2[4]}{K2[2]}functions.stop:2{K2[3]}{{}}{K2[4]}{K2[1]}",
        f"{K2[0]}{K2[2]}weather{K2[3]}{GOOD}{K2[4]}{K2[1]}",
        K2[0],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis, Texas\n</parameter>\n</function>\n</tool_call>",
        "Hi <tool_call> there",
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
        "<tool_call>stop\n</tool_call>",
        "<tool_call>weather\n</tool_call>",
        "Hi <tool_call> there",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="town">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "<minimax:tool_call>",
    ),
    "json": (
        f'{{"name": "weather", "arguments": {GOOD}}}',
        f'[{{"name": "weather", "arguments": {GOOD}}}, {{"name": "stop", "arguments": {{}}}}]',
        '{"name": "weather", "arguments": {"city": null}}',
        '[{"name": "weather"}]',
    ),
}


def grammar_of(dialect, choice, answer=None, tools=TOOLS):
    llguidance = pytest.importorskip("llguidance")
    tokenizer = dialect._tokenizer
    form = dialect.form(dialect.render(ASK, tools), read_functions(tools), choice, answer)
    known = llguidance.LLTokenizer(
        tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[tokenizer.token_to_id("<|eot|>")]
    )
    matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(form.grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matcher_of(dialect, choice, answer=None):
    matcher, tokenizer = grammar_of(dialect, choice, answer), dialect._tokenizer

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
    stop_alone = one.replace("weather", "stop").replace(GOOD, "{}").replace(CITY_TAG.get(name, " no tag"), "")

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


def test_grammars_of_channels():
    """Thoughts may come first; then a call, or an answer in its channel."""
    dialect = dialect_of(TEMPLATES["openai"], *MARKERS)
    end = "<|end|><|start|>assistant"
    thought = f"<|channel|>analysis<|message|>hm, 1 < 2{end}"
    said = f"<|channel|>commentary<|message|>Well.{end}"
    one, wrong = f"{HEAD}weather{TAIL}{GOOD}", f"{HEAD}weather{TAIL}{{}}"
    stop, final = f"{HEAD}stop{TAIL}{{}}", "<|channel|>final<|message|>Hi"
    right, other = '<|channel|>final<|message|>{"q":3}', '<|channel|>final<|message|>{"q":"x"}'
    texts = (
        one,
        thought + one,
        thought * 2 + stop,
        said + one,
        thought + final,
        right,
        other,
        wrong,
        "Hi",
        one + end + stop,
        thought,
    )
    answer = StructuredOutputs(json={"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]})

    def taken(*asked):
        takes = matcher_of(dialect, *asked)
        return "".join("01"[takes(text)] for text in texts)

    assert taken(ToolChoice("required")) == "11100000000"
    assert taken(ToolChoice("required", "weather")) == "11000000000"
    assert taken(ToolChoice()) == "11111110000"  # weather is strict
    assert taken(ToolChoice(), answer) == "11100100000"
    assert taken(ToolChoice("none"), answer) == "00000100000"
    for asked, said in ((StructuredOutputs(regex="a"), "no form of an answer in channels"), (answer, "is no token")):
        with pytest.raises(InvalidRequestError, match=said):
            dialect_of(TEMPLATES["openai"], *(MARKERS if asked.regex else ())).form("", answer=asked)


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


def test_ids_of_kimi_tell_names():
    """Other ids are replaced, those of the form stay; a name that is in the id is not left out."""
    kimi = dialect_of(TEMPLATES["kimi_k2"])
    second = {"id": "functions.stop:7", "type": "function", "function": {"name": "stop", "arguments": {}}}
    talk = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL, second]},
        {"role": "tool", "tool_call_id": "functions.stop:7", "content": "sun"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
    ]
    text = kimi.render(talk, TOOLS)
    assert f"functions.weather:0{K2[3]}{GOOD}{K2[4]}{K2[2]}functions.stop:7{K2[3]}{{}}{K2[4]}{K2[1]}" in text
    assert "## Return of functions.stop:7\nsun<|eot|><|user|>## Return of functions.weather:0\nrain" in text
    assert kimi.read(TEXTS["kimi_k2"][0], "", TOOLS).calls[0].id == "functions.weather:1"


def only(part, **more):
    return {"type": "object", "properties": {"k": part}, "required": ["k"], "additionalProperties": False, **more}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (only({"type": "string", "pattern": "a"}), "'pattern' of 'k'"),
        (only({"type": "string", "enum": ["a", "</parameter>"]}), "'enum' of 'k'"),
        (only({"type": "string", "const": 5}), "'const' of 'k'"),
        (only({"type": "string", "enum": 5}), "'enum' of 'k'"),
        (only({"type": "string", "enum": []}), "'enum' of 'k'"),
        (only({}, required=["l"]), "'\\$ref' of 'l'"),
        (only({"type": "string", "maxLength": "9}|"}), "'maxLength' of 'k'"),
        (only({}, properties={"k": {}, "l": {"$ref": "#/properties/k"}}), "'\\$ref' of 'l'"),
        (only({"type": "array", "items": {"$ref": "#"}}), "'\\$ref' of 'k'"),
        (only(False), "'\\$ref' of 'k'"),
        (only({}, minProperties=1), "'minProperties' of 'the arguments'"),
        (only({}, properties=[]), "'properties' of 'the arguments'"),
        (only({}, required=[[1]]), "'properties' of 'the arguments'"),
        (only({}, properties={"a>b": {}}), "'name' of 'a>b'"),
    ],
)  # fmt: skip
def test_what_tags_cannot_hold_is_refused(schema, said):
    """By the function's name, where a form is wanted; without one it is read all the same."""
    dialect = dialect_of(TEMPLATES["qwen3_coder"])
    functions = read_functions([TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(FunctionError, match=f"{said} cannot be held exactly") as error:
        dialect.form("", functions, ToolChoice("required"))
    assert error.value.param == "tools[1].function.parameters"
    assert dialect.form("", functions, ToolChoice("required", "stop")) is not None
    text = "<tool_call><function=f><parameter=k>5</parameter></function></tool_call>"
    (call,) = dialect.read(text, "", [functions[1].tool]).calls
    assert json.loads(call.arguments)["k"] in (5, "5")


@pytest.mark.parametrize(("others", "value"), [({"type": "string"}, "5"), ({"type": "integer"}, 5), (True, 5)])
def test_arguments_without_names_have_their_schema(others, value):
    schema = {"type": "object", "additionalProperties": others}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = "<tool_call><function=f><parameter=k>5</parameter></function></tool_call>"
    (call,) = dialect_of(TEMPLATES["qwen3_coder"]).read(text, "", tools).calls
    assert json.loads(call.arguments) == {"k": value}


KINDS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
        "one": {"type": "string", "enum": ["a", "ab", "\n", "<b>", " x "]},
        "none": {"type": ["string", "null"], "maxLength": 6},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
        "word": {"$ref": "#/$defs/word"},
        "any": {},
    },
    "required": ["text", "one"],
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "maxLength": 3}},
}


@pytest.mark.fuzz
@pytest.mark.parametrize("markers", [(), MARKERS], ids=["text", "tokens"])
@pytest.mark.parametrize("name", CITY_TAG)
def test_what_a_grammar_of_tags_lets_through_is_read_by_its_schema(name, markers):
    """Letters by chance, those of tags more often; also where the schema says nothing."""
    jsonschema = pytest.importorskip("jsonschema")
    more = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 5}}
    schemas = {"f": KINDS, "g": {"type": "object"}, "h": more, "i": {**more, "required": ["r"]}}
    tools = [{"type": "function", "function": {"name": each, "parameters": schemas[each]}} for each in schemas]
    dialect = dialect_of(TEMPLATES[name], *markers)
    start, tokenizer = grammar_of(dialect, ToolChoice("required"), tools=tools), dialect._tokenizer
    end = tokenizer.token_to_id("<|eot|>")
    close = FORMATS[name].close
    tags = [close, f"5{close}", "</function>", '"}', "[1, ", "<arg_key>", '<parameter name="text">']
    for i in range(chance.many(4)):
        draw = random.Random(chance.seed(i))
        matcher, ids, wished = start.deep_copy(), [], []
        while len(ids) < 600:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if end in allowed and (len(allowed) == 1 or draw.random() < 0.7):
                break
            wished = wished or tokenizer.encode(draw.choice(tags), add_special_tokens=False).ids
            token = wished.pop(0) if draw.random() < 0.5 else None
            token = token if token in allowed else int(draw.choice([each for each in allowed if each != end]))
            matcher.consume_token(token)
            ids.append(token)
        else:
            continue
        parts = dialect.read(tokenizer.decode(ids, skip_special_tokens=False), "", tools)
        assert parts.content == ""
        assert parts.calls
        for call in parts.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])

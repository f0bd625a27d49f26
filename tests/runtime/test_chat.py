"""Chat templates render as published ones expect, and wrong ones fail with what and how."""

from datetime import datetime

import pytest

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.chat import render_chat

CHATML = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("role " ~ message.role ~ " is not supported") }}
    {%- endif %}
    {{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "<b>Hello</b> & 'you'"}]


def test_renders_a_published_style_template():
    got = render_chat(CHATML, HELLO, {"bos_token": "<s>"})
    assert got == "<s><|im_start|>user\n<b>Hello</b> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    got = render_chat(CHATML, HELLO, {"bos_token": ""}, add_generation_prompt=False)
    assert got.endswith("<|im_end|>\n")


def test_blocks_leave_no_blank_lines():
    template = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    assert render_chat(template, [{"role": "user", "content": "x"}], {}) == "x\nend"


def test_extensions_of_published_templates():
    messages = [{"role": "user", "content": str(i)} for i in range(5)]
    loop = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% if m.content == '3' %}"
    assert render_chat(loop + "{% break %}{% endif %}{% endfor %}", messages, {}) == "123"
    assert render_chat("{% generation %}{{ messages[0].content }}{% endgeneration %}!", messages, {}) == "0!"
    inner = "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}"
    assert render_chat(inner, messages, {}) == "False"
    assert render_chat("{{ tools is none }} {{ documents is none }}", messages, {}) == "True True"
    year = str(datetime.now().year)
    assert render_chat("{{ strftime_now('%Y') }}", messages, {}) == year


def test_tojson_keeps_html_and_unicode_and_order():
    message = {"role": "user", "content": "x", "call": {"z": "<é>", "a": ["&", 1]}}
    assert render_chat("{{ messages[0].call | tojson }}", [message], {}) == '{"z": "<é>", "a": ["&", 1]}'
    assert render_chat("{{ messages[0].call | tojson(indent=1) }}", [message], {}).startswith('{\n "z"')


def test_content_may_be_parts_and_tool_calls_need_none():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render_chat("{{ messages[0].content[0].text }}", parts, {}) == "hi"
    call = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert render_chat("{{ messages[0].tool_calls[0].name }}", call, {}) == "f"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 7}], r"messages\[0\] has no content"),
    ],
)
def test_wrong_messages_are_refused(messages, what):
    with pytest.raises(InvalidRequestError, match=what) as caught:
        render_chat(CHATML, messages, {"bos_token": ""})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for m in messages %}", "not valid Jinja .line 1"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('only one system message') }}", "refused: only one system message"),
    ],
)
def test_template_errors_say_what_failed(template, what):
    with pytest.raises(InvalidRequestError, match=what) as caught:
        render_chat(template, HELLO, {})
    assert caught.value.hint


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template):
    with pytest.raises(InvalidRequestError):
        render_chat(template, HELLO, {})


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": "x"}]
    render_chat("{% set m = messages[0] %}{{ m.content }}", messages, {})
    assert messages == [{"role": "user", "content": "x"}]

# ruff: noqa: E501 - templates
"""Nothing of a conversation is lost in silence: it is in the prompt, as transformers would write it, or refused."""

import contextlib
import itertools
import random
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake import chat
from specexport_runtime.intake.chat import render_losslessly
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.chat_forms import UnwrittenError
from tests.support.cases import chance
from tests.support.fakes.chat_fakes import letters

HEAD = "{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
LOOP = (
    "<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}\n"
)
CALLS = "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
TEMPLATES = {
    "chatml": HEAD + TURN + TAIL,
    "no developer": HEAD + "{% if m.role in ('system', 'user', 'assistant') %}" + TURN + "{% endif %}" + TAIL,
    "no system": HEAD + "{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}" + TAIL,
    "loop": HEAD + LOOP + TAIL,
    "index": HEAD + "[{{ m.role }}]{{ m['content'][0]['text'] }}\n" + TAIL,
    "system text, others loop": HEAD
    + "{% if m.role == 'system' %}"
    + TURN
    + "{% else %}"
    + LOOP
    + "{% endif %}"
    + TAIL,
    "either": HEAD + "{% if m.content is string %}" + TURN + "{% else %}" + LOOP + "{% endif %}" + TAIL,
    "qwen": (
        "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
        + HEAD
        + "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n{% elif m.role == 'assistant' %}"
        "<|im_start|>assistant\n{{ m.content }}" + CALLS + "<|im_end|>\n{% elif m.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n{% endif %}" + TAIL
    ),
    "llama 3.1": (
        HEAD + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "<|h|>assistant<|e|>" + CALLS + "{% elif m.role == 'tool' or m.role == 'ipython' %}<|h|>ipython<|e|>"
        "{{ m.content | tojson }}{% else %}<|h|>{{ m.role }}<|e|>\n\n{{ m.content | trim }}<|eot|>{% endif %}" + TAIL
    ),
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set sys = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set sys = false %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and sys %}{% set content = '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m['content'] %}"
        "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' }}{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + HEAD
        + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        + TAIL
    ),
    "deepseek": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.s = m['content'] %}"
        "{% endif %}{% endfor %}{{ bos_token }}{{ ns.s }}"
        + HEAD
        + "{% if m['role'] == 'user' %}<User>{{ m['content'] }}"
        "{% elif m['role'] == 'assistant' and m['content'] is none %}<Assistant>"
        + CALLS
        + "{% elif m['role'] == 'assistant' %}<Assistant>{{ m['content'].split('</think>')[-1] }}<end>"
        "{% elif m['role'] == 'tool' %}<out>{{ m['content'] }}</out>{% endif %}" + TAIL
    ),
    "mistral": (
        HEAD + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS]"
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}{% endfor %}"
        + CALLS
        + "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}{% elif m.role == 'system' and loop.first %}"
        "{{ m.content }}\n\n{% endif %}" + TAIL
    ),
}
USER, SYSTEM, DEVELOPER = ({"role": role, "content": f"{role} says"} for role in ("user", "system", "developer"))
SAID = {"role": "assistant", "content": "answered"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLED, FOUND = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}
FOUND |= {"tool_call_id": "abcdefghi"}
TALKS = {
    "plain": [USER, SAID, USER], "system": [SYSTEM, USER], "developer": [DEVELOPER, USER],
    "late system": [USER, SAID, SYSTEM, USER], "calls": [USER, CALLED, FOUND, SAID, USER],
    "text and calls": [USER, CALLED | {"content": "let me see"}, FOUND],
    "empty": [USER, {"role": "assistant", "content": ""}, USER],
    "two parts": [{"role": "user", "content": [{"type": "text", "text": "user"}, {"type": "text", "text": "says"}]}],
}  # fmt: skip


def texts_of(messages):
    for message in messages:
        content = message["content"]
        yield from [content] if isinstance(content, str) else [part["text"] for part in content]
        for call in message.get("tool_calls", ()):
            yield from (call["function"]["name"], *call["function"]["arguments"].values())


def as_others_give(messages):
    """Forms in which users of transformers give a conversation."""
    roles = sorted({message["role"] for message in messages})
    for system, null, joined, split, size in itertools.product(*[(False, True)] * 4, range(len(roles) + 1)):
        for parts in itertools.combinations(roles, size):
            told = []
            for message in messages:
                texts = list(texts_of([{"content": message["content"]}]))
                content = [{"type": "text", "text": text} for text in (["".join(texts)] if joined else texts)]
                content = content if message["role"] in parts else "".join(texts)
                role = "system" if system and message["role"] == "developer" else message["role"]
                if split and message.get("tool_calls") and content:
                    told.append({"role": role, "content": content})
                    content, texts = "", []
                nothing = null and message.get("tool_calls") and not "".join(texts)
                told.append(message | {"role": role, "content": None if nothing else content})
            yield told


def theirs(template, messages):
    return render_jinja_template([messages], chat_template=template, add_generation_prompt=True, bos_token="<s>")[0][0]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_transformers_writes_of_a_form_or_there_is_none(name, talk):
    template, messages = TEMPLATES[name], TALKS[talk]
    possible = []
    for given in as_others_give(messages):
        try:
            text = theirs(template, given)
        except Exception:  # a template is a program
            continue
        if all(each in text for each in texts_of(messages)) and "None" not in text and "'type'" not in text:
            possible.append(text)
    if not possible:
        with pytest.raises(InvalidRequestError):
            render_losslessly(template, messages, {"bos_token": "<s>"})
        return
    assert render_losslessly(template, messages, {"bos_token": "<s>"}) in possible


@pytest.mark.parametrize(
    ("name", "talk", "param"),
    [
        ("no system", "system", r"messages\[0\]\.content, of role 'system'"),
        ("no system", "developer", r"messages\[0\]\.content, of role 'developer'"),
        ("no developer", "calls", r"messages\[1\]\.tool_calls\[0\], of role 'assistant'"),
        ("mistral", "late system", r"messages\[2\]\.content, of role 'system'"),
        ("gemma", "system", "System role not supported"),
    ],
)
def test_what_is_left_out_is_named(name, talk, param):
    with pytest.raises(InvalidRequestError, match=param):
        render_losslessly(TEMPLATES[name], TALKS[talk], {"bos_token": ""})
    with pytest.raises(UnwrittenError):  # a short text is not found in another
        render_losslessly(TEMPLATES["no system"], [{"role": "system", "content": "s"}, USER], {})


def test_arguments_are_text_where_the_template_adds_them_to_text():
    template = (
        HEAD + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    )
    assert (
        render_losslessly(template + "{% endfor %}", TALKS["calls"][:3], {}) == 'user saysweather{"city": "Paris"}rain'
    )


LATER = "{% if not m.tool_calls or loop.index > messages | length - 2 %}{{ m.content }}{% endif %}"


def test_a_text_beside_calls_may_be_left_out_later():
    template = HEAD + LATER + CALLS + "{% endfor %}"
    talk = [*TALKS["text and calls"], SAID, USER]
    assert "let me see" in render_losslessly(template, talk[:3], {})
    assert "let me see" not in render_losslessly(template, talk, {})


def agent(count, first=()):
    called = [CALLED | {"content": "let me see"}, FOUND]
    return [*first, USER, *(message for i in range(count) for message in (*called, *([SAID, USER] * (i % 3 == 2))))]


@pytest.mark.parametrize("name", ["llama 3.1", "mistral", "qwen", "later", "no developer"])
def test_renders_do_not_grow_with_the_messages(name, monkeypatch):
    renders, render = [], chat.render_chat
    monkeypatch.setattr(chat, "render_chat", lambda *given: renders.append(len(given[1])) or render(*given))
    template = {**TEMPLATES, "later": HEAD + LATER + CALLS + TAIL}[name] + f"{{# {name} #}}"
    for count, most in ((8, 95), (8, 4), (200, 4), (203, 4)):
        renders.clear()
        talk = agent(count, [DEVELOPER] if name.startswith("no") else [SYSTEM])
        with contextlib.suppress(UnwrittenError):
            assert render_losslessly(template, talk, {})
        assert len(renders) <= most


def test_what_is_only_left_out_of_a_long_conversation_is_noticed():
    template = HEAD + "{% if loop.index < 90 or m.role != 'user' %}{{ m.content }}{% endif %}" + CALLS + TAIL
    assert render_losslessly(template, agent(30), {})
    with pytest.raises(UnwrittenError, match=r"messages\[96\]\.content, of role 'user'"):
        render_losslessly(template, agent(40), {})


def test_a_conversation_of_many_kinds_is_tried_with_few_of_them(monkeypatch):
    lengths, render = [], chat.render_chat
    monkeypatch.setattr(chat, "render_chat", lambda *given: lengths.append(len(given[1])) or render(*given))
    draw = random.Random(chance.seed(3))
    talk = [
        {"role": draw.choice(("user", "system", "developer")), "content": draw.choice(("a", "", " ", None))}
        | {name: "x" * draw.randint(0, 1) for name in draw.sample("abcd", 2)}
        for _ in range(1000)
    ]
    talk = [
        each if each["content"] is not None else each | {"content": [{"type": "text", "text": "b"}]} for each in talk
    ]
    assert render_losslessly(TEMPLATES["either"], talk, {})
    assert len([each for each in lengths if each >= 1000]) == 2
    assert max(each for each in lengths if each < 1000) <= 64


WRITES = [
    "{{ m.content }}", "{{ m['content'] | trim }}", "{{ m.content | tojson }}", "{{ '>' + m.content }}",
    "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p['text'] | trim }}{% endif %}{% endfor %}",
    "{{ m.content[0].text }}", "{% if m.content is string %}{{ m.content }}{% endif %}",
    "{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    "{% if m.content is none %}{% endif %}", "{{ raise_exception('no') }}",
    "{% if not loop.last %}{{ m.content }}{% endif %}", "",
]  # fmt: skip


@pytest.mark.fuzz
def test_every_word_is_in_the_prompt_or_refused():
    draw = random.Random(chance.seed(5))
    whole = 0
    for _ in range(chance.many(150)):
        roles = ("system", "developer", "user", "assistant", "tool")
        usual = draw.choice(WRITES)
        template = HEAD + "".join(
            f"{{% if m.role == '{role}' %}}<{role}>{draw.choice([*WRITES, *[usual] * 20])}"
            f"{draw.choice(('', CALLS, CALLS))}{{% endif %}}"
            for role in roles
        )
        template += TAIL
        messages, words = [], []
        for i in range(draw.randint(1, 6)):
            told = [f"w{i}x{j}w" for j in range(draw.choice((1, 1, 1, 2)))]
            content = told[0] if len(told) == 1 else [{"type": "text", "text": text} for text in told]
            message = {"role": draw.choice(roles), "content": content}
            if message["role"] == "assistant" and draw.random() < 0.5:
                function = {"name": f"n{i}n", "arguments": {"k": f"v{i}v"}}
                message["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
                told += [f"n{i}n", f"v{i}v"]
            messages.append(message)
            words += told
        try:
            text = render_losslessly(template, messages, {})
        except InvalidRequestError:
            continue
        if not text:  # which is refused as an empty prompt
            continue
        whole += 1
        assert [word for word in words if word not in text] == [], (template, messages, text)
    assert whole > 10


ANSWERED = {"role": "assistant", "content": "so it goes "}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_goes_on_where_its_template_ends_what_it_says(name, talk):
    """Wherever the conversation can be told: the prompt is what is written of it all, up to there."""
    dialect = ChatDialect(TEMPLATES[name], {"bos_token": "<s>"}, letters())
    messages = [*TALKS[talk], *([] if talk == "plain" else [SAID, USER]), ANSWERED]
    try:
        whole = dialect.render(messages, add_generation_prompt=False)
    except InvalidRequestError as error:
        with pytest.raises(InvalidRequestError, match=re.escape(str(error)[:40])):
            dialect.render(messages, continue_final_message=True)
        return
    begun = dialect.render(messages, continue_final_message=True)
    before, said = begun[: -len("so it goes ")], begun[-len("so it goes ") :]
    assert said == "so it goes "
    assert whole.startswith(before + "so it goes")
    assert dialect.render([*messages[:-1], ANSWERED | {"content": ""}], continue_final_message=True) == before
    with contextlib.suppress(InvalidRequestError):  # or it is there as it is
        began = dialect.render([*messages[:-1], ANSWERED | {"content": "\n so"}], continue_final_message=True)
        assert began == before + "\n so"

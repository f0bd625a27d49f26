"""Answers that go on from a beginning, and budgets of thinking, with the official client; with drafts and without."""

import json

import openai
import pytest

from tests.support.cases import patience
from tests.support.servers.odd_bodies import check_odd_bodies
from tests.support.servers.tool_servers import ARGUMENTS, CITY, THOUGHT

llguidance = pytest.importorskip("llguidance")

DRAFTERS = ("none", "draft-model", "lookup")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def bodies(answer, beginning=None, **more):
    """What the official client is given for an answer that goes on, drafted in every way, whole and in a stream."""
    messages, extra = [{"role": "user", "content": answer}], dict(more.pop("extra", {}))
    if beginning is not None:
        said = beginning if isinstance(beginning, dict) else {"content": beginning}
        messages.append({"role": "assistant", **said})
        extra |= {"continue_final_message": True, "add_generation_prompt": False}
    common = {"model": "echo", "messages": messages, "temperature": 0, "max_tokens": 200, **more}
    for drafter in DRAFTERS:
        for stream in (False, True):
            yield common | {"stream": stream, "extra_body": extra | {"speculative": {"drafter": drafter}}}


def parts(answer):
    """Content, thoughts, calls, and why it ended."""
    content, thoughts, calls, finish = "", "", [], None
    for chunk in answer if not hasattr(answer, "usage") or not answer.choices else [answer]:
        (choice,) = chunk.choices
        told = getattr(choice, "delta", None) or choice.message
        content += told.content or ""
        thoughts += getattr(told, "reasoning_content", None) or ""
        for call in told.tool_calls or ():
            if call.function.name:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, thoughts, calls, finish


def answered(client, answer, beginning=None, **more):
    """The one answer that all ways to ask for it give."""
    found = [parts(client.chat.completions.create(**body)) for body in bodies(answer, beginning, **more)]
    assert all(each == found[0] for each in found), found
    return found[0]


@pytest.mark.parametrize("beginning", ["Hello", "Hello ", "Hello w\n", "", " H", "ä€"])
def test_an_answer_goes_on_from_what_was_said(clients, beginning):
    client, served = clients("plain"), clients.served("plain")
    whole = beginning + "äbc, and so on.\n"
    assert answered(client, whole, beginning) == (whole.removeprefix(beginning), "", [], "stop")
    assert answered(client, whole, beginning, extra={"echo": True}) == (whole, "", [], "stop")
    # token for token as the text of it all, and as the server's own tokens
    (body, *_) = bodies(whole, beginning)
    chat = client.chat.completions.create(**body)
    prompt = f"<|user|>{whole}<|eot|><|assistant|>{beginning}"
    completion = client.completions.create(model="echo", prompt=prompt, temperature=0, max_tokens=200)
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens
    assert chat.choices[0].message.content == completion.choices[0].text
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    told = patience.post(f"{served.url}/tokenize", json={"messages": body["messages"], **ending}).json()
    assert told["tokens"] == served.engine.engine.tokenizer.encode(prompt, add_special_tokens=False).ids
    engine = served.engine.engine
    assert engine.encode_chat(body["messages"], continue_final_message=True) == told["tokens"]
    assert engine.chat(body["messages"], continue_final_message=True).text == completion.choices[0].text


def test_log_probabilities_choices_and_parts_of_a_beginning(clients):
    client = clients("plain")
    said = {"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo "}]}
    (body, *_) = bodies("Hello you", said, n=2, logprobs=True, extra={"echo": True})
    answer = client.chat.completions.create(**body)
    assert [choice.message.content for choice in answer.choices] == ["Hello you"] * 2
    assert "".join(each.token for each in answer.choices[0].logprobs.content) == "you<|eot|>"


def test_without_a_generation_prompt_the_prompt_ends_with_the_messages(clients):
    client = clients("plain")
    messages = [{"role": "user", "content": "Hi"}]
    extra = {"add_generation_prompt": False}
    answer = client.chat.completions.create(model="echo", messages=messages, max_tokens=5, extra_body=extra)
    assert answer.usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("beginning", "content", "thoughts"),
    [
        ("<think>\nhm, {le", "Yes.\n", "t me see}"),
        ("<think>", "Yes.\n", "hm, {let me see}"),
        ("<think>\nhm, ", "Yes.\n", "{let me see}"),
        ("<think>\nhm, {let me see}\n</think>\n\nYe", "s.\n", ""),
        ("<think>\nhm, {let me see}\n</think>\n", "Yes.\n", ""),
        ("<think>\nhm, {let me see}\n</thi", "Yes.\n", ""),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_an_answer_goes_on_inside_the_thinking_and_after_it(clients, beginning, content, thoughts, force):
    client, whole = clients("thinks"), f"{THOUGHT}Yes.\n"
    extra = {"chat_template_kwargs": {"force_thinking": force}}
    if beginning.endswith("</thi"):  # no token: the rest of the mark is text too
        client = clients("thinks in text")
    assert answered(client, whole, beginning, extra=extra) == (content, thoughts, [], "stop")
    told = answered(client, whole, beginning, extra=extra | {"echo": True})
    assert told == ("Yes.\n", "hm, {let me see}", [], "stop")


def test_what_was_thought_may_be_given_by_itself(clients):
    client, whole = clients("qwen3"), "<think>\nhm\n</think>\n\nYes."
    said = {"content": "Y", "reasoning_content": "hm"}
    assert answered(client, whole, said) == ("es.", "", [], "stop")
    assert answered(client, whole, {"content": None, "reasoning": "hm"}) == ("Yes.", "", [], "stop")
    # without one the template writes an empty one; a thought that goes on stands in its place
    assert answered(client, whole.replace("hm", ""), "Y") == ("es.", "", [], "stop")
    assert answered(client, whole, "<think>\nh") == ("Yes.", "m", [], "stop")
    assert answered(client, whole, whole[:-3], extra={"echo": True}) == ("Yes.", "hm", [], "stop")


def test_calls_after_a_beginning(clients):
    client = clients("hermes")
    for beginning in ("Well.\n", "We", ""):
        content = "Well."[len(beginning) :]
        wanted = (content, "", [["weather", ARGUMENTS]], "tool_calls")
        assert answered(client, f"Well.\n{CALL}", beginning, tools=TOOLS) == wanted
    more = {"tools": TOOLS, "extra": {"echo": True}}
    assert answered(client, f"Well.\n{CALL}", "Well.\n", **more)[0] == "Well."
    assert answered(client, "Well. {", "Well. ", **more)[0] == "Well. {"


def test_strict_calls_after_a_beginning(clients):
    client = clients("hermes")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    content, _, calls, _ = answered(client, f"Well.\n{CALL.replace('3', 'true')}", "Well", tools=strict)
    assert content.startswith(".")
    assert isinstance(json.loads(calls[0][1])["days"], int)


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}


@pytest.mark.parametrize("beginning", ['{"city":"P', "{", '{"city":"Paris","days":3}', ""])
def test_a_form_is_that_of_the_whole_message(clients, beginning):
    answer = ARGUMENTS.replace(" ", "")
    assert answered(clients("plain"), answer, beginning, response_format=FORM)[0] == answer.removeprefix(beginning)
    content, *_ = answered(clients("plain"), "no JSON at all", beginning, response_format=FORM)
    assert list(json.loads(beginning + content)) == ["city", "days"]
    thought = f"<think>\nhm\n</think>\n\n{beginning}"
    content, *_ = answered(clients("thinks"), "no JSON at all", thought, response_format=FORM)
    assert list(json.loads(beginning + content)) == ["city", "days"]
    content, thoughts, *_ = answered(clients("thinks"), f"{THOUGHT}no JSON", "<think>\nhm", response_format=FORM)
    assert (list(json.loads(content)), thoughts) == (["city", "days"], ", {let me see}")


HI, SAID = {"role": "user", "content": "x"}, {"role": "assistant", "content": "He"}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
BEGUN, HINTED = GOES_ON | {"messages": [HI, SAID]}, "thinking_token_budget"


def begun(text, **more):
    return GOES_ON | {"messages": [HI, SAID | {"content": text}]} | more


@pytest.mark.parametrize(
    ("name", "body", "param", "code"),
    [
        ("plain", GOES_ON, "messages[0]", "invalid_value"),
        ("plain", GOES_ON | {"messages": [SAID, HI]}, "messages[1]", "invalid_value"),
        ("hermes", GOES_ON | {"messages": [HI, SAID | {"tool_calls": [CALLED]}]}, "messages[1]", "invalid_value"),
        ("plain", BEGUN | {"add_generation_prompt": True}, "continue_final_message", "invalid_value"),
        ("plain", {"echo": True}, "echo", "invalid_value"),
        ("plain", BEGUN | {"continue_final_message": "yes"}, "continue_final_message", "invalid_type"),
        ("trims", begun(" He"), "messages[1].content", "invalid_value"),
        ("talk", GOES_ON | {"messages": [{"role": "system", "content": "s"}, SAID]}, "messages[0].content", None),
        ("thinks", begun("<think>\nhm", chat_template_kwargs={"enable_thinking": False}), "messages[1]", None),
        ("thinks", GOES_ON | {"messages": [HI, SAID | {"content": "<think>", "reasoning": "x"}]}, "messages[1]", None),
        ("plain", GOES_ON | {"messages": [HI, SAID | {"reasoning": "x"}]}, "messages[1].reasoning_content", None),
        ("qwen3", begun("\nHe"), "messages[1].content", "invalid_value"),
        ("qwen3", begun("hm\n</think>\n\nHe"), "messages[1].content", "invalid_value"),
        ("hermes", begun(f"W {CALL[:20]}", tools=TOOLS), "messages[1].content", "invalid_value"),
        ("llama3_json", begun(' {"na', tools=TOOLS), "messages[1].content", "invalid_value"),
        ("hermes", begun("Well.", tools=TOOLS, tool_choice="required"), "messages[1].content", "invalid_value"),
        ("plain", begun("no", response_format=FORM), "messages[1].content", "invalid_value"),
        ("plain", begun("x " * 2000), "messages", "context_length_exceeded"),
        ("plain", {HINTED: 5}, HINTED, "unsupported_parameter"),
        ("plain and little", {HINTED: 0}, HINTED, "unsupported_parameter"),
        ("thinks in text", {HINTED: 5}, HINTED, "unsupported_parameter"),
        ("thinks", {HINTED: -1}, HINTED, "invalid_value"),
        ("thinks", {HINTED: 1.0}, HINTED, "invalid_type"),
        ("thinks", {HINTED: 10**400}, HINTED, None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_honoured_is_named(clients, name, body, param, code):
    served = clients.served(name)
    answer = patience.post(f"{served.url}/v1/chat/completions", json={"messages": [HI]} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["code"] == (code or "invalid_value")
    assert len(error["message"]) < 500


def test_a_template_that_trims_takes_what_it_does_not_change(clients):
    assert answered(clients("trims"), "Hello you", "Hello ") == ("you", "", [], "stop")


def test_odd_values_are_no_defect(clients):
    body = BEGUN | {"echo": True, HINTED: 4, "max_tokens": 1, "tools": TOOLS}
    check_odd_bodies(clients.served("thinks"), "/v1/chat/completions", body)


SPOKEN = "<think>\nabcdefgh\n</think>\n\nYes."


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 4, 9, 10, 11, 100])
def test_thinking_ends_with_its_budget(clients, budget, force):
    """The model repeats, place by place, what it was told; the end of the thought stands in one of these places."""
    begun = "<think>\n" if force else ""  # by the template
    rest = SPOKEN.removeprefix(begun)
    thought = "\nabcdefgh\n".removeprefix("\n" if force else "")
    extra = {"chat_template_kwargs": {"force_thinking": force}, HINTED: budget}
    content, thoughts, _, finish = answered(clients("thinks"), SPOKEN, extra=extra)
    assert finish == "stop"
    if budget >= len(thought):
        assert (content, thoughts) == ("Yes.", "abcdefgh")
        return
    assert thoughts == thought[:budget].strip()
    spoken = rest.removeprefix("<think>")[budget + 1 :]  # one place was taken
    assert content == spoken.lstrip("\n")
    assert answered(clients("thinks"), SPOKEN, extra=extra | {"logit_bias": {"3": 0}})[0] == content


def test_a_beginning_uses_its_share_of_the_budget(clients):
    for used, told in (("<think>abcd", "efg"), ("<think>abcdefg", ""), ("<think>abcdefgh", "")):
        content, thoughts, *_ = answered(clients("thinks"), "<think>abcdefghijk</think>Yes", used, extra={HINTED: 7})
        assert thoughts == told
        assert content.endswith("</think>Yes")
    after = "<think>abcdefgh</think>Y"  # the budget is no longer of any meaning
    assert answered(clients("thinks"), "<think>abcdefgh</think>Yes", after, extra={HINTED: 0})[0] == "es"
    off = {"chat_template_kwargs": {"enable_thinking": False}, HINTED: 0}
    assert answered(clients("thinks"), "<think>\n\n</think>\n\nYes", extra=off)[0] == "Yes"


def test_forms_and_calls_follow_a_thought_that_was_ended(clients):
    answer, thought = ARGUMENTS.replace(" ", ""), "<think>abc"
    content, thoughts, *_ = answered(clients("thinks"), f"{thought}x{answer}", response_format=FORM, extra={HINTED: 3})
    assert (json.loads(content), thoughts) == (json.loads(answer), "abc")
    found = answered(clients("thinks"), f"{thought}x{CALL}", tools=TOOLS, extra={HINTED: 3})
    assert found == ("", "abc", [["weather", ARGUMENTS]], "tool_calls")


def test_the_server_s_own_budget_holds_where_there_is_thinking(clients):
    client, text = clients("thinks little"), "<think>abcdefgh</think>Yes."
    assert answered(client, text)[1] == "abc"
    assert answered(client, text, extra={HINTED: 5})[1] == "abcde"
    response = client.responses.create(model="echo", input=text, temperature=0)
    assert response.output[0].content[0].text == "abc"
    for name in ("plain and little", "thinks little in text"):
        content, thoughts, *_ = answered(clients(name), text)
        assert (thoughts + content).endswith("Yes.")
        assert "abcdefgh" in thoughts + content


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}])
def test_a_form_goes_on_in_the_channel_that_the_template_began(clients, more):
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY}}
    for beginning in ('{"city":', ""):
        text, *others = answered(clients("final channel"), "x", beginning, response_format=form, **more)
        assert others == ["", [], "stop"]
        assert json.loads(beginning + text).keys() == {"city", "days"}
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for asked in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": strict}):
        with pytest.raises(openai.BadRequestError, match="calls cannot be held to a schema"):
            answered(clients("final channel"), "x", "{", **asked)

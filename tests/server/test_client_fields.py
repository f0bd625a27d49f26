"""What clients send besides: hints change no answer, what would change it is honoured or refused by its name."""

import pytest

from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.servers.serving import TEMPLATE, Served, fake_engine

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
LEAST = {
    COMPLETIONS: {"prompt": "w1 w2", "max_tokens": 6, "seed": 5},
    CHAT: {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 6, "seed": 5},
    RESPONSES: {"input": "w1 w2", "max_output_tokens": 6, "seed": 5},
}
HINTS = {
    "user": "somebody", "safety_identifier": "somebody", "metadata": {"trace": "1"}, "store": True,
    "prompt_cache_key": "thread-1", "prompt_cache_retention": "24h", "service_tier": "auto", "top_p": 1, "top_k": -1,
    "stop": [], "logit_bias": {}, "stream": False, "min_tokens": 0, "use_beam_search": False, "temperature": None,
    "speculative": None,
}  # fmt: skip
NO_TOOLS = {"tools": [], "tool_choice": "none", "parallel_tool_calls": False}
OFF_IN_CHAT = NO_TOOLS | {
    "functions": [], "function_call": "none", "audio": None, "modalities": ["text"],
    "response_format": {"type": "text"}, "add_generation_prompt": True, "continue_final_message": False, "echo": False,
    "chat_template_kwargs": {},
}  # fmt: skip
OFF_IN_RESPONSES = NO_TOOLS | {
    "truncation": "disabled", "background": False, "text": {"format": {"type": "text"}}, "top_logprobs": 0,
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls")),
}  # fmt: skip
CODEX = {
    "instructions": "",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": ""}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w1 w2"}]},
    ],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"installation": "1"},
}
TAKEN = [
    *((path, HINTS) for path in LEAST),
    *((path, dict.fromkeys(("top_p", "stream", "stop", "logit_bias", "user", "top_k"))) for path in LEAST),
    (COMPLETIONS, {"suffix": "", "best_of": 1, "n": 1, "add_special_tokens": True}),
    (COMPLETIONS, {"suffix": None, "n": None, "logprobs": None}),
    (CHAT, OFF_IN_CHAT),
    (RESPONSES, OFF_IN_RESPONSES),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1 w2", **EPHEMERAL}], **EPHEMERAL}]}),
    (CHAT, {"verbosity": "medium", "reasoning_effort": "none", "top_logprobs": 0, "metadata": {"tags": ["a"]}}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "w1 w2", **EPHEMERAL}]}]}),
    (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}, "include": []}),
    (RESPONSES, CODEX),
]


def post(served, path, fields):
    return patience.post(served.url + path, json=LEAST[path] | fields)


def text_of(path, answer):
    assert answer.status_code == 200, answer.text
    if path == RESPONSES:
        return answer.json()["output"][0]["content"][0]["text"]
    (choice,) = answer.json()["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


@pytest.mark.parametrize(("path", "fields"), TAKEN, ids=lambda value: str(value)[:60])
def test_a_hint_changes_nothing(fake_served, path, fields):
    assert text_of(path, post(fake_served, path, fields)) == text_of(path, post(fake_served, path, {}))


def test_nothing_is_stored_whatever_is_asked_for(fake_served):
    answer = post(fake_served, RESPONSES, NO_TOOLS | {"store": True, "reasoning": {"effort": "none"}, "user": "me"})
    answer = answer.json()
    assert (answer["store"], answer["reasoning"]["effort"], answer["user"]) == (False, "none", "me")
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("none", False)


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("top_p", [0, 1e-320])
def test_a_top_p_of_zero_is_the_likeliest_token(fake_served, path, top_p):
    greedy = text_of(path, post(fake_served, path, {"temperature": 0}))
    for more in ({}, {"temperature": 2, "seed": 2}):
        assert text_of(path, post(fake_served, path, {"top_p": top_p} | more)) == greedy


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup", "chained", "suffix"])
def test_a_top_p_of_zero_is_greedy_whoever_drafts(fake_served, drafter):
    for more in ({"presence_penalty": 1.5}, {"logit_bias": {"3": 2}, "top_k": 5, "min_p": 0.01}):
        more |= {"max_tokens": 12}
        greedy = text_of(COMPLETIONS, post(fake_served, COMPLETIONS, {"temperature": 0} | more))
        fields = more | {"top_p": 0, "seed": 3, "n": 2, "logprobs": 2, "speculative": {"drafter": drafter}}
        choices = post(fake_served, COMPLETIONS, fields).json()["choices"]
        assert [choice["text"] for choice in choices] == [greedy] * 2


def test_an_effort_reaches_a_template_that_reads_it():
    def engine(condition: str):
        return lambda: fake_engine(chat_template=f"{{% if {condition} %}}w7 {{% endif %}}{TEMPLATE}")

    def prompts(served):
        return {effort: text(served, effort) for effort in ("low", "high", "none", None)}

    def text(served, effort):
        said = text_of(CHAT, post(served, CHAT, {"reasoning_effort": effort}))
        assert said == text_of(RESPONSES, post(served, RESPONSES, {"reasoning": {"effort": effort}}))
        return said

    config = ServerConfig(model_name="fake")
    with Served(engine("reasoning_effort == 'low'"), config) as served:
        plain = text_of(COMPLETIONS, post(served, COMPLETIONS, {}))
        low = text_of(COMPLETIONS, post(served, COMPLETIONS, {"prompt": "w7 w1 w2"}))
        assert low != plain
        assert prompts(served) == {"low": low, "high": plain, "none": plain, None: plain}
        own = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
        assert text_of(CHAT, post(served, CHAT, own)) == plain  # by its own name goes first
    with Served(engine("enable_thinking is defined and not enable_thinking"), config) as served:
        assert [text(served, effort) for effort in ("none", None)] == [low, plain]
        assert post(served, CHAT, {"reasoning_effort": "low"}).json()["error"]["param"] == "reasoning_effort"

"""A ``top_p`` of 0 is the likeliest token on every route, whatever else is asked for."""

import pytest

from tests.support.cases import patience

PROMPT = "w1 w2 w3"
DRAFTERS = ("none", "draft-model", "lookup", "chained", "suffix")


def texts(served, path, fields):
    body = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 12},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 12},
    }[path]
    answer = patience.post(served.url + path, json=body | fields)
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        return [answer.json()["output"][0]["content"][0]["text"]]
    choices = answer.json()["choices"]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("top_p", [0, 1e-320])
def test_it_is_greedy_on_every_route(fake_served, path, top_p):
    (greedy,) = texts(fake_served, path, {"temperature": 0})
    for temperature, seed in ((0, 1), (2, 1), (2, 2)):
        fields = {"top_p": top_p, "temperature": temperature, "seed": seed}
        assert texts(fake_served, path, fields) == [greedy]
    assert texts(fake_served, path, {"top_p": top_p}) == [greedy]  # at the default temperature


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_is_greedy_whoever_drafts(fake_served, drafter):
    for extra in ({"presence_penalty": 1.5}, {"logit_bias": {"3": 2}, "top_k": 5, "min_p": 0.01}):
        (greedy,) = texts(fake_served, "/v1/completions", {"temperature": 0} | extra)
        fields = {"top_p": 0, "seed": 3, "n": 2, "logprobs": 2, "speculative": {"drafter": drafter}}
        assert texts(fake_served, "/v1/completions", fields | extra) == [greedy] * 2

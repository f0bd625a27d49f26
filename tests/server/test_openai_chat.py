"""``/v1/chat/completions`` with the official client."""

import pytest

from tests.support.servers.openai_help import alone

MESSAGES = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]


def test_an_answer_is_that_of_the_rendered_prompt(client, fake_served):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, n=3, seed=9, max_tokens=12)
    prompt = fake_served.engine.engine.encode_chat(MESSAGES)
    for i, choice in enumerate(answer.choices):
        assert choice.message.content == alone(fake_served, prompt, seed=9 + i, max_tokens=12).text
        assert (choice.index, choice.message.role, choice.finish_reason) == (i, "assistant", "length")
    assert (len(answer.choices), answer.object, answer.usage.prompt_tokens) == (3, "chat.completion", 3)
    assert answer.usage.speculative["rounds"] > 0


def test_the_limit_has_two_names_and_without_it_an_answer_may_fill_the_context(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, **{name: 5})
        assert answer.usage.completion_tokens == 5
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0)
    assert answer.usage.total_tokens == 400


@pytest.mark.parametrize(("as_parts", "drafter"), [(False, "lookup"), (True, None)])
def test_a_prediction_is_copied_from(client, fake_served, as_parts, drafter):
    params = {"model": "fake", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    extra = {"speculative": {"drafter": drafter}}
    plain = client.chat.completions.create(**params, extra_body=extra)
    content = plain.choices[0].message.content
    parts = [{"type": "text", "text": content[:20]}, {"type": "text", "text": content[20:]}]
    prediction = {"type": "content", "content": parts if as_parts else content}
    predicted = client.chat.completions.create(**params, extra_body=extra, prediction=prediction)
    assert predicted.choices[0].message.content == content
    assert predicted.usage.speculative["rounds"] < plain.usage.speculative["rounds"]
    prompt = fake_served.engine.engine.encode_chat(MESSAGES)
    expected = alone(fake_served, prompt, content, temperature=0, max_tokens=40, drafter=drafter or "chained").stats
    assert predicted.usage.speculative["accepted"] == expected.accepted

"""``/tokenize``, ``/detokenize`` and ``/version``."""

import httpx
import pytest

TEXT = "def add(a, b):\n    return a + b\n"


def post(served, path, **body):
    answer = httpx.post(f"{served.url}{path}", json=body)
    return answer.status_code, answer.json()


def test_a_prompt_and_back(demo_served):
    engine = demo_served.engine.engine
    status, told = post(demo_served, "/tokenize", model="demo", prompt=TEXT * 99, return_token_strs=True)
    ids = engine.tokenizer.encode(TEXT * 99).ids
    assert (status, told["tokens"], told["count"]) == (200, ids, len(ids))
    assert told["token_strs"] == [engine.tokenizer.id_to_token(token) for token in ids]
    assert told["max_model_len"] == engine.max_model_len
    assert post(demo_served, "/detokenize", tokens=ids) == (200, {"prompt": TEXT * 99})
    assert post(demo_served, "/tokenize", prompt=TEXT)[1]["token_strs"] is None


def test_a_conversation_is_that_of_the_template(fake_served):
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": [{"type": "text", "text": "w2"}]}]
    plain = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    assert post(fake_served, "/tokenize", messages=messages)[1]["tokens"] == fake_served.engine.engine.encode_chat(
        plain
    )


def test_the_version_is_that_of_the_package(fake_served):
    assert set(httpx.get(f"{fake_served.url}/version").json()) == {"version"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "w1", "x": 1}, 400, "x"),
        ("/tokenize", {"prompt": "w1", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_what_is_wrong_is_named(fake_served, path, body, status, param):
    code, told = post(fake_served, path, **body)
    assert code == status
    assert told["error"]["param"].startswith(param)

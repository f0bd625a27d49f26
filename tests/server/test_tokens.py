"""``/tokenize``, ``/detokenize`` and ``/version``."""

import httpx
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from specexport_runtime.requests.token_bytes import compute_max_token_length, decode_ids, ids_of
from specexport_runtime.server import prompt_tokens

TEXT = "def add(a, b):\n    return a + b\n"


def post(served, path, **body):
    answer = httpx.post(f"{served.url}{path}", json=body)
    return answer.status_code, answer.json()


def test_a_prompt_and_back(demo_served):
    engine = demo_served.engine.engine
    text = TEXT * 15
    status, told = post(demo_served, "/tokenize", model="demo", prompt=text, return_token_strs=True)
    ids = engine.tokenizer.encode(text).ids
    assert (status, told["tokens"], told["count"]) == (200, ids, len(ids))
    assert told["token_strs"] == [engine.tokenizer.id_to_token(token) for token in ids]
    assert told["max_model_len"] == engine.max_model_len
    assert post(demo_served, "/detokenize", tokens=ids) == (200, {"prompt": text})
    assert post(demo_served, "/tokenize", prompt=TEXT)[1]["token_strs"] is None


def test_what_cannot_fit_is_refused_before_anything_is_made_of_it(demo_served, monkeypatch):
    """By its characters, where every byte of a text is in a token; nothing that fits is."""
    engine = demo_served.engine.engine
    longest = compute_max_token_length(engine.tokenizer)
    assert longest == max(map(len, engine.tokenizer.get_vocab()))
    too_many = {"tokens": [5] * (engine.max_model_len + 1)}
    assert post(demo_served, "/detokenize", **too_many)[1]["error"]["code"] == "context_length_exceeded"
    assert post(demo_served, "/tokenize", prompt=TEXT * 99)[1]["error"]["code"] == "context_length_exceeded"
    monkeypatch.setattr(prompt_tokens, "ids_of", lambda *_, **__: [5])
    for prompt, status in (
        ("x" * longest * engine.max_model_len, 200),
        ("x" * (longest * engine.max_model_len + 1), 400),
    ):
        assert post(demo_served, "/tokenize", prompt=prompt)[0] == status
    body = {"prompt": "x" * 10**6, "max_tokens": 1}
    assert post(demo_served, "/v1/completions", **body)[1]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Replace("x", "")),
        ("normalizer", normalizers.NFKC()),
        ("pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        ("model", models.WordLevel({"w": 0}, unk_token="w")),
    ],
    ids=str,
)
def test_texts_of_any_length_may_fit_where_something_is_left_out(demo_served, change, value):
    tokenizer = Tokenizer.from_str(demo_served.engine.engine.tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    assert compute_max_token_length(tokenizer) == 4 * compute_max_token_length(demo_served.engine.engine.tokenizer)
    changed = Tokenizer.from_str(tokenizer.to_str())
    setattr(changed, change, value)
    assert compute_max_token_length(changed) is None


def test_long_texts_are_batches_of_one(demo_served):
    """Tokenizers keep Python's lock while they encode or decode one text, and no other client is served meanwhile."""

    class Noted:
        def __init__(self):
            self.asked = []

        def __getattr__(self, name):
            self.asked.append(name)
            return getattr(demo_served.engine.engine.tokenizer, name)

    text, tokenizer = "x = 1 " * 1000, Noted()
    ids = ids_of(tokenizer, text, add_special_tokens=True)
    assert ids == demo_served.engine.engine.tokenizer.encode(text).ids
    assert decode_ids(tokenizer, ids, skip_special_tokens=False) == text
    assert tokenizer.asked == ["encode_batch_fast", "decode_batch"]


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

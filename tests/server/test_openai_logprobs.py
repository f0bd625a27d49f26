"""Log-probabilities in both shapes, and the text and bytes of single tokens."""

import json
import math
import threading

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specexport_runtime.requests.results import StreamPiece
from specexport_runtime.sampling.logprobs import TokenLogprobs
from specexport_runtime.server.answer_format import ChatFormat, CompletionFormat, Header
from specexport_runtime.server.answer_schema import ChatAnswer, CompletionAnswer
from specexport_runtime.server.json_text import LongList, json_text
from specexport_runtime.server.token_text import TokenText, TokenTexts
from tests.support.servers.openai_help import alone, client_of
from tests.support.servers.serving import VOCAB

MESSAGES = [{"role": "user", "content": "w1 w2"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "# 日本語 é\nname = '🙂"


@pytest.mark.parametrize(("count", "streamed"), [(0, False), (3, True)])
def test_of_completions(client, fake_served, count, streamed):
    params = {"model": "fake", "prompt": "w1 w2", "n": 2, "seed": 3, "max_tokens": 12, "logprobs": count}
    got = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(2)]
    answers = client.completions.create(**params, stream=True) if streamed else [client.completions.create(**params)]
    for choice in (choice for answer in answers for choice in answer.choices):
        for name, values in got[choice.index].items():
            values.extend(getattr(choice.logprobs, name))
    for i, logprobs in enumerate(got):
        result = alone(fake_served, "w1 w2", seed=3 + i, max_tokens=12, logprobs=count)
        assert [int(token.removeprefix(" w")) for token in logprobs["tokens"]] == result.token_ids
        assert logprobs["token_logprobs"] == [item.logprob for item in result.logprobs]
        for at, token, top, item in zip(
            logprobs["text_offset"], logprobs["tokens"], logprobs["top_logprobs"], result.logprobs, strict=True
        ):
            assert result.text[at:].startswith(token)
            assert top == {f" w{j}": value for j, value in (*item.top, (item.token_id, item.logprob))}


@pytest.mark.parametrize(("streamed", "count"), [(False, 0), (True, 2)])
def test_of_chats(client, fake_served, streamed, count):
    params = {"model": "fake", "messages": MESSAGES, "seed": 3, "max_tokens": 12, "logprobs": True}
    params["top_logprobs"] = count or None
    answers = client.chat.completions.create(**params, stream=streamed)
    choices = [choice for answer in (answers if streamed else [answers]) for choice in answer.choices]
    content = [item for choice in choices if choice.logprobs for item in choice.logprobs.content]
    plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3, logprobs=False)
    assert plain.choices[0].logprobs is None
    result = alone(fake_served, "w1 w2", seed=3, max_tokens=12, logprobs=count)
    assert len(content) == 12
    for item, token, expected in zip(content, result.token_ids, result.logprobs, strict=True):
        assert (item.token, item.logprob) == (f" w{token}", expected.logprob)
        assert bytes(item.bytes) == item.token.encode()
        assert [(top.token, top.logprob) for top in item.top_logprobs] == [(f" w{j}", v) for j, v in expected.top]


@pytest.mark.parametrize("form", [CompletionFormat, ChatFormat])
def test_what_cannot_be_is_json(fake_served, form):
    logprobs = TokenLogprobs(1, -math.inf, 3, ((1, -math.inf), (2, -0.5)))
    texts = TokenTexts(fake_served.engine.engine.tokenizer)
    answer = form(Header("x", 0, "fake", None), texts=texts, origins=False, include_usage=False)
    choice = answer.choice(0, "w1", [StreamPiece("w1", 1, "target", logprobs)], "length")
    assert "-9999.0" in json_text(choice)


def test_bytes_of_a_real_answer_are_its_text(demo_served):
    params = {"seed": 2, "max_tokens": 40, "temperature": 1.3}
    with client_of(demo_served) as client:
        answer = client.completions.create(model="demo", prompt=TEXT, logprobs=2, **params)
    result = alone(demo_served, TEXT, **params)
    texts = TokenTexts(demo_served.engine.engine.tokenizer)
    assert answer.choices[0].logprobs.tokens == [texts[token].text for token in result.token_ids]
    whole = b"".join(texts[token].data for token in result.token_ids)
    assert whole.decode("utf-8", "replace") == result.text
    assert answer.choices[0].logprobs.text_offset[0] == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_scores_of_its_prompt(demo_served, max_tokens):
    """As lm-eval asks for them: the first token has none, and those of the prompt come before those of the answer."""
    texts = [TEXT, "def add(a, b):"]
    with client_of(demo_served) as client:
        answer = client.completions.create(
            model="demo", prompt=texts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
        )
    names = TokenTexts(demo_served.engine.engine.tokenizer)
    for choice, text in zip(answer.choices, texts, strict=True):
        ids = demo_served.engine.engine.encode(text)
        whole = alone(demo_served, text, temperature=0, max_tokens=max(max_tokens, 1), prompt_logprobs=1, logprobs=1)
        entries = [*whole.prompt_logprobs[1:], *whole.logprobs[:max_tokens]]
        assert choice.text == text + (whole.text if max_tokens else "")
        assert choice.logprobs.tokens == [names[token].text for token in ids + whole.token_ids[:max_tokens]]
        first, *others = choice.logprobs.token_logprobs
        assert first is None
        assert others == [entry.logprob for entry in entries]  # whoever else is in a step, and the draft after it
        assert choice.logprobs.top_logprobs[0] is None
        assert all(len(top) in (1, 2) for top in choice.logprobs.top_logprobs[1:])
    assert answer.usage.completion_tokens == 2 * max_tokens


def prompt_logprobs(served, path, **body):
    """What is told of prompts: one list a choice; and the whole answer."""
    source = {"messages": MESSAGES} if path == CHAT else {"prompt": ["w1 w2 w3", "w4 w5"]}
    answer = httpx.post(f"{served.url}{path}", json={"max_tokens": 3, "seed": 1} | source | body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return [told["prompt_logprobs"]] if path == CHAT else [each["prompt_logprobs"] for each in told["choices"]], told


@pytest.mark.parametrize(("path", "count"), [(COMPLETIONS, 0), (COMPLETIONS, 20), (CHAT, 2)])
def test_of_prompts_as_vllm_tells_them(fake_served, path, count):
    more = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    more["speculative"] = {"token_origins": True}
    told, answer = prompt_logprobs(fake_served, path, prompt_logprobs=count, n=2, **more)
    (CompletionAnswer if path == COMPLETIONS else ChatAnswer).model_validate(answer)
    prompts = [[1, 2]] if path == CHAT else [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
    assert len(told) == len(prompts)
    for (first, *rest), prompt in zip(told, prompts, strict=True):
        assert first is None
        assert len(rest) == len(prompt) - 1
        for i, found in enumerate(rest, 1):
            (entry,) = alone(fake_served, prompt[:i], max_tokens=1, logprobs=20).logprobs
            every = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)]
            assert len(every) == VOCAB
            own = next(item for item in every if item[0] == prompt[i])
            wanted = {str(token): (value, rank, f" w{token}") for token, value, rank in [own, *every[:count]]}
            assert list(found) == list(wanted)  # its own token comes first
            for token, (value, rank, text) in wanted.items():
                assert found[token] == {"logprob": pytest.approx(value, abs=1e-6), "rank": rank, "decoded_token": text}


def test_of_prompts_beside_others(fake_served):
    """An echo wants three alternatives, the prompt one: both get what they asked for."""
    told, answer = prompt_logprobs(fake_served, COMPLETIONS, prompt_logprobs=1, echo=True, logprobs=3, max_tokens=0)
    assert {len(each) for each in told[0][1:]} <= {1, 2}
    assert {len(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    _, answer = prompt_logprobs(fake_served, CHAT, prompt_logprobs=0)
    assert answer["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in httpx.post(fake_served.url + CHAT, json={"messages": MESSAGES}).json()


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt_logprobs": 3, "prompt": [[1] * 50] * 6}, "prompt_logprobs", "limit_exceeded"),
        ({"logprobs": 3, "echo": True, "prompt": [[1] * 50] * 6}, "logprobs", "limit_exceeded"),
        ({"prompt_logprobs": 3, "prompt": [[1] * 50] * 5}, None, None),
    ],
    ids=str,
)
def test_no_answer_holds_more_of_prompts_than_it_may(fake_served, monkeypatch, body, param, code):
    monkeypatch.setattr("specexport_runtime.server.answer_format.MAX_ENTRIES", 1000)
    answer = httpx.post(fake_served.url + COMPLETIONS, json=body)
    assert answer.status_code == (400 if param else 200)
    if param:
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_no_answer_holds_more_of_its_own_tokens_than_it_may(fake_served, monkeypatch):
    """Who asks for too many is told; an answer without a length ends there."""
    monkeypatch.setattr("specexport_runtime.server.answer_format.MAX_ENTRIES", 100)
    ask = {"prompt": ["w1", "w2"], "logprobs": 4, "ignore_eos": True}
    answer = httpx.post(fake_served.url + COMPLETIONS, json=ask | {"max_tokens": 11})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("logprobs", "limit_exceeded")
    assert httpx.post(fake_served.url + COMPLETIONS, json=ask | {"max_tokens": 10}).status_code == 200
    ask = {"input": "w1", "max_output_tokens": 21, "top_logprobs": 4, "include": ["message.output_text.logprobs"]}
    assert httpx.post(f"{fake_served.url}/v1/responses", json=ask).json()["error"]["param"] == "top_logprobs"
    ask = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4, "n": 2, "ignore_eos": True}
    told = httpx.post(fake_served.url + CHAT, json=ask).json()
    assert [choice["finish_reason"] for choice in told["choices"]] == ["length"] * 2
    assert told["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_written_in_pieces_that_keep_nobody_waiting(fake_served, monkeypatch, path, stream):
    """Beside the event loop, or a few tokens at a time: never many in one call."""
    pieces, dumps = [], json.dumps

    def noted(value, **options):
        text = dumps(value, **options)
        pieces.append((len(text), threading.current_thread().name))
        return text

    monkeypatch.setattr("specexport_runtime.server.json_text.json.dumps", noted)
    ask = {"ignore_eos": True, "stream": stream, "speculative": {"token_origins": path != "/v1/responses"}}
    match path:
        case "/v1/completions":
            ask |= {"prompt": "w1", "max_tokens": 390, "logprobs": 17}
        case "/v1/chat/completions":
            ask |= {"messages": MESSAGES, "max_tokens": 390, "logprobs": True, "top_logprobs": 17}
        case _:
            ask |= {"input": "w1", "max_output_tokens": 390, "top_logprobs": 17}
            ask["include"] = ["message.output_text.logprobs"]
    answer = httpx.post(fake_served.url + path, json=ask, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 200_000
    assert max(size for size, _ in pieces) < len(answer.content) // 3
    on_the_loop = [size for size, thread in pieces if not thread.startswith("specexport")]
    assert max(on_the_loop, default=0) < 120_000


def test_json_in_pieces_is_json():
    items = [{"a": [1, None]}, "é", 2.5] * 70
    value = {"a": {"b": items, "c": [items[:3]]}, "d": [items[0]] * 3, "e": []}
    assert json_text(value) == json.dumps(value)
    assert json_text(LongList(210, lambda begin, end: items[begin:end]), (",", ":")) == json.dumps(
        items, separators=(",", ":")
    )
    assert json_text(LongList(0, lambda *_: [])) == "[]"


def test_every_token_of_a_byte_level_vocabulary(demo_served):
    tokenizer = demo_served.engine.engine.tokenizer
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    assert b"".join(texts[token].data for token in ids) == TEXT.encode()
    parts = [texts[token] for token in ids if texts[token].text.startswith("bytes:")]
    assert parts  # characters of several tokens
    assert all(part.text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in part.data) for part in parts)
    for token in range(tokenizer.get_vocab_size()):
        data = texts[token].data
        assert data.decode("utf-8", "replace") == tokenizer.decode([token], skip_special_tokens=False)
    assert texts[0] == TokenText("<|endoftext|>", b"<|endoftext|>")
    assert texts[10**6] == TokenText("", b"")  # a row of the LM head without a token


def sentencepiece_like():
    vocab = {"<unk>": 0, "▁Hi": 1, "there": 2, "▁there": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6, "<0x41>": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, {1: b" Hi", 2: b"there", 3: b" there", 4: b"\xe2", 5: b"\x82", 6: b"\xac", 7: b"A"}


def metaspace_like():
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "▁a": 1, "b": 2, "▁": 3}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, {1: b" a", 2: b"b", 3: b" "}


def wordpiece_like():
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, {1: b" play", 2: b"ing"}


def words():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer, {0: b" a", 1: b" b"}


@pytest.mark.parametrize("make", [sentencepiece_like, metaspace_like, wordpiece_like, words])
def test_tokens_of_other_vocabularies(make):
    tokenizer, expected = make()
    tokenizer.add_special_tokens(["<|end|>"])
    texts = TokenTexts(tokenizer)
    assert {token: texts[token].data for token in expected} == expected
    end = tokenizer.token_to_id("<|end|>")
    assert texts[end].text == "<|end|>"
    assert json.dumps([texts[token].text for token in expected]).isascii()

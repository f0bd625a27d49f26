"""Text, echo, streams, stop strings and offsets are of prompt and answer decoded as one, by the tokenizers library."""

import json

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.server.config import ServerConfig
from tests.support.cases.patience import HANG_S
from tests.support.fakes.engine_of import engine_of
from tests.support.servers.openai_help import alone
from tests.support.servers.serving import MAX_MODEL_LEN, Served

NO_CHARACTER = "\ufffd"
SMILE = "😀"
SEEDS = range(2)


def letters(space, spelled, more=()):
    """A BPE model of few letters and words; the first three pieces are special, then come those of a character."""
    vocab = ["<unk>", "<s>", "</s>", *spelled, space, *"acehnt.", *more, "th", "at"]
    merges = [("t", "h"), ("a", "t"), ("th", "e"), ("c", "at"), (space, "the"), (space, "cat")]
    vocab = list(dict.fromkeys([*vocab, *(one + other for one, other in merges)]))
    ids = {piece: i for i, piece in enumerate(vocab)}
    return models.BPE(ids, merges, unk_token="<unk>", byte_fallback=spelled[0].startswith("<"))


def sentencepiece(kind):
    tokenizer = Tokenizer(letters("▁", [f"<0x{byte:02X}>" for byte in SMILE.encode()]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Metaspace(prepend_scheme="first", split=False), *steps[1:]]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level(_):
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(letters("Ġ", spell.pre_tokenize_str(SMILE)[0][0]))
    tokenizer.pre_tokenizer, tokenizer.decoder = spell, decoders.ByteLevel()
    return tokenizer


def wordpiece(_):
    pieces = ["<unk>", "<s>", "</s>", "the", "cat", "##s", "##at", "c", ".", "don", "'", "##'", "t", "##t"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


KINDS = {"llama": sentencepiece, "gemma": sentencepiece, "metaspace": sentencepiece} | {
    "bytes": byte_level,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="module", params=KINDS)
def served(request):
    tokenizer = KINDS[request.param](request.param)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    target, draft = (
        FakeExecutor(tokenizer.get_vocab_size(), 8, MAX_MODEL_LEN + 16, noise=noise, sharpness=0.7)
        for noise in (0, 0.4)
    )
    template = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"

    def make():
        return engine_of(target, tokenizer, draft=draft, max_model_len=MAX_MODEL_LEN, chat_template=template)

    with Served(make, ServerConfig(model_name="fake")) as served, httpx.Client(timeout=HANG_S) as served.client:
        yield served


def prompts_of(tokenizer):
    """Texts and ids: nothing but the beginning, a word, half a character, a run of one and a half."""
    the, smile = tokenizer.encode("the cat").ids, list(range(3, 7))
    texts = ["", "the cat", "the cat the cat cat."]
    return [*texts, [1], [1, 1, 2], [*the, *smile[:2]], [*the, *smile, *smile[:3]], the * 20]


def split(tokenizer, prompt, output, skip=True):
    ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    whole, before = (tokenizer.decode(each, skip_special_tokens=skip) for each in ([*ids, *output], ids))
    border = next(
        (i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before))
    )
    return whole[:border], whole[border:]


def ask(served, **body):
    answer = served.client.post(f"{served.url}/v1/completions", json={"max_tokens": 16} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def parts_of(served, **body):
    answer = served.client.post(f"{served.url}/v1/completions", json={"max_tokens": 16, "stream": True} | body)
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def streamed(served, **body):
    return "".join(part["text"] for part in parts_of(served, **body))


def test_text_echo_streams_and_stop_strings(served):
    tokenizer, fell_apart, found = served.engine.engine.tokenizer, 0, 0
    for prompt in prompts_of(tokenizer):
        for seed in SEEDS:
            result = alone(served, prompt, seed=seed)
            echo, text = split(tokenizer, prompt, result.token_ids)
            fell_apart += echo != split(tokenizer, prompt, [])[0]
            body = {"prompt": prompt, "seed": seed}
            assert result.text == text
            assert ask(served, **body)[0]["text"] == streamed(served, **body) == text
            assert ask(served, **body, echo=True)[0]["text"] == echo + text
            assert streamed(served, **body, echo=True) == echo + text
            if text[:1] not in ("", NO_CHARACTER):
                body, found = body | {"stop": text[:1]}, found + 1
                assert ask(served, **body)[0]["text"] == streamed(served, **body) == ""
                assert ask(served, **body, include_stop_str_in_output=True)[0]["text"] == text[:1]
        each = ask(served, prompt=prompt, seed=0, n=2, skip_special_tokens=False, echo=True)
        for i, choice in enumerate(each):
            output = alone(served, prompt, seed=i, skip_special_tokens=False).token_ids
            assert choice["text"] == "".join(split(tokenizer, prompt, output, skip=False))
    assert found > 5
    assert fell_apart or 3 in tokenizer.encode("the").ids  # half a character in a prompt became another's


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_in_the_text_that_is_told(served, echo):
    tokenizer, whole = served.engine.engine.tokenizer, 0
    special, is_words = {"<unk>", "<s>", "</s>"}, tokenizer.token_to_id("the") == 3
    for prompt in prompts_of(tokenizer):
        ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        for seed in SEEDS:
            no_bytes = dict.fromkeys(range(3, 7), -100.0) if seed % 2 and not is_words else {}
            biases = {str(token): bias for token, bias in no_bytes.items()}
            (choice,) = ask(served, prompt=prompt, seed=seed, logprobs=1, echo=echo, logit_bias=biases)
            told, text = choice["logprobs"], choice["text"]
            result = alone(served, prompt, seed=seed, logit_bias=no_bytes)
            tokens = [*ids, *result.token_ids] if echo else result.token_ids
            shown = len("".join(split(tokenizer, prompt, result.token_ids))) - len(text)
            assert len(told["text_offset"]) == len(told["tokens"]) == len(tokens)
            for i, (offset, name) in enumerate(zip(told["text_offset"], told["tokens"], strict=True)):
                before = tokenizer.decode([*([] if echo else ids), *tokens[:i]])
                assert 0 <= offset <= len(text)
                if NO_CHARACTER not in text and NO_CHARACTER not in before:
                    assert offset == len(before) - shown
                    if name not in special and not name.startswith("bytes:"):
                        assert text[offset:].startswith(name), (prompt, i, told, text)
            names = [name for name in told["tokens"] if name not in special]
            if NO_CHARACTER not in text and not any(name.startswith("bytes:") for name in names):
                whole += 1
                assert "".join(names) == text
            for name, top, logprob in zip(told["tokens"], told["top_logprobs"], told["token_logprobs"], strict=True):
                assert top is None or name in top
                assert (top is None) == (logprob is None)
    assert whole > 3


def test_offsets_of_a_stream_and_of_a_cut_answer(served):
    tokenizer, cut = served.engine.engine.tokenizer, 0
    for seed in range(5):
        body = {"prompt": "the cat", "seed": seed, "logprobs": 0}
        (whole,) = ask(served, **body)
        told = [at for part in parts_of(served, **body) for at in part["logprobs"]["text_offset"]]
        assert told == whole["logprobs"]["text_offset"]
        stop = whole["text"][3:6]
        if stop and NO_CHARACTER not in stop:
            (short,) = ask(served, **body, stop=stop, echo=True)
            assert max(short["logprobs"]["text_offset"]) <= len(short["text"])
            shown = whole["text"][: whole["text"].index(stop)]
            assert short["text"] == tokenizer.decode(tokenizer.encode("the cat").ids) + shown
            cut += 1
    assert cut


def test_a_chat_answers_behind_its_template(served):
    engine = served.engine.engine
    messages = [{"role": "user", "content": "the cat"}]
    prompt = engine.encode_chat(messages)
    for seed in SEEDS:
        body = {"messages": messages, "seed": seed, "max_tokens": 12}
        answer = served.client.post(f"{served.url}/v1/chat/completions", json=body).json()["choices"][0]
        output = alone(served, prompt, seed=seed, max_tokens=12).token_ids
        assert answer["message"]["content"] == split(engine.tokenizer, prompt, output)[1]

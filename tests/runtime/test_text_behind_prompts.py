"""The text of an answer is what ``tokenizer.decode`` of prompt and answer has more than that of the prompt.

The tokenizers library, decoding the whole, is the authority: for every kind of decoder and added token.
"""

import random
from functools import cache
from itertools import takewhile

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

from specexport_runtime.requests.text import TextStream, decode_continuation
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases import chance
from tests.support.models.tokenizers import byte_level, llama_like, metaspace, sentencepiece, wordpiece

NO_CHARACTER = "\ufffd"
_FROM_MARK, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
MARKED = {
    "llama": [_FROM_MARK, _BYTES, _FUSE, decoders.Strip(" ", 1, 0)],
    "gemma": [_FROM_MARK, _BYTES, _FUSE],
    "metaspace": [decoders.Metaspace()],
    "metaspace, bytes": [_BYTES, decoders.Metaspace()],
    "metaspace first": [decoders.Metaspace(prepend_scheme="first"), _BYTES, _FUSE],
    "metaspace never": [decoders.Metaspace(prepend_scheme="never"), _BYTES, _FUSE],
    "two spaces": [_FROM_MARK, _BYTES, _FUSE, decoders.Strip(" ", 2, 0)],
    "several a token": [decoders.Replace("▁a", " A"), _FROM_MARK, decoders.Strip(" ", 1, 0), _FUSE],
    "clean-up of the whole": [_FROM_MARK, _BYTES, _FUSE, decoders.Replace(" .", ".")],
    "pattern in the whole": [_FROM_MARK, _FUSE, decoders.Replace(Regex(" *a+ *"), "-")],
    "words": [],
    "suffix": [decoders.BPEDecoder("c")],
    "suffix before the end": [decoders.BPEDecoder("▁")],
    "repeats": [decoders.CTC("c", "▁", cleanup=True)],
    "letters": [decoders.ByteLevel()],
    "letters, stripped": [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)],
}


@cache
def marked(kind):
    steps = MARKED[kind]
    tokenizer = sentencepiece(decoders.Sequence(steps) if len(steps) > 1 else steps[0] if steps else None)
    tokenizer.add_tokens([AddedToken(" x ", lstrip=True), AddedToken("<tool>", special=False)])
    return tokenizer


@cache
def tokenizers():
    plain = {"byte level": byte_level(), "wordpiece": wordpiece()}
    raw = Tokenizer.from_str(wordpiece().to_str())
    raw.decoder = decoders.WordPiece(cleanup=False)
    raw.add_special_tokens(["[SEP]"])
    return plain | {"wordpiece, raw": raw} | {kind: marked(kind) for kind in MARKED}


KINDS = ["byte level", "wordpiece", "wordpiece, raw", *MARKED]


def whole_text(tokenizer, ids, params, hidden=None):
    if hidden is not None:
        return tokenizer.decode([token for token in ids if token not in hidden], skip_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def answer_text(tokenizer, prompt, ids, params, hidden=None):
    whole, before = (whole_text(tokenizer, each, params, hidden) for each in ([*prompt, *ids], prompt))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(whole, before, strict=False))
    return whole[len(list(shared)) :]


def until_stop(tokenizer, prompt, ids, params, hidden=None):
    """How many tokens until a stop string is there (None: it never is), and the text up to it."""
    for count in range(1, len(ids) + 1):
        text = answer_text(tokenizer, prompt, ids[:count], params, hidden)
        decided = text if count == len(ids) else text.rstrip(NO_CHARACTER)
        for end in range(len(decided) + 1):
            found = [s for s in params.stop_strings if decided[:end].endswith(s)]
            if found:
                return count, decided[: end if params.include_stop_str_in_output else end - max(map(len, found))]
    return None, answer_text(tokenizer, prompt, ids, params, hidden)


def draw_ids(rng, tokenizer, most):
    """Token ids, runs of bytes and of one token more often than chance would have it, and such as no token has."""
    size, ids = tokenizer.get_vocab_size(), []
    byte_tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    letters = [tokenizer.token_to_id(letter) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = [t for t in range(size) if t not in byte_tokens]
    for _ in range(rng.randrange(most)):
        kind = rng.randrange(8)
        if kind == 0 and None not in byte_tokens:
            ids += [byte_tokens[b] for b in rng.choice(["é", "中", "😀", " .", "a"]).encode()][: rng.randrange(1, 5)]
        elif kind == 0 and None not in letters:
            spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
            text = rng.choice(["é", "中", "😀"])
            ids += [tokenizer.token_to_id(letter) for letter in spell(text)[0][0]][: rng.randrange(1, 5)]
        elif kind == 1:
            ids += [rng.choice(plain)] * rng.randrange(1, 9)
        elif kind == 2:
            ids.append(size + 7)
        else:
            ids.append(rng.choice(plain) if rng.random() < 0.9 else rng.randrange(size))
    return ids


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_what_the_whole_has_more_than_the_prompt(kind):
    tokenizer, rng = tokenizers()[kind], random.Random(chance.seed(1))
    specials = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    for _ in range(chance.many(60)):
        prompt = draw_ids(rng, tokenizer, rng.choice([1, 3, 12, 80]))
        ids = draw_ids(rng, tokenizer, rng.choice([2, 8, 40]))
        stops = ["".join(rng.choices("ab c.中", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        params = SamplingParams(
            stop=stops or (), include_stop_str_in_output=rng.random() < 0.5, skip_special_tokens=rng.random() < 0.5
        )
        hidden = frozenset(specials[1:]) if params.skip_special_tokens and rng.random() < 0.3 else None
        count, wanted = until_stop(tokenizer, prompt, ids, params, hidden)
        stream, joined, stopped_at = TextStream(tokenizer, params, hidden, prompt), "", None
        open_end = stream.open_end() if rng.random() < 0.5 else None
        for i, token in enumerate(ids, 1):
            if stream.append(token):
                stopped_at = i
                break
            if rng.random() < 0.5:
                joined += stream.take()
                assert wanted.startswith(joined)
        case = (prompt, ids, params, hidden)
        joined += stream.finish()
        assert joined == stream.text == wanted, case
        assert stopped_at == count or (stopped_at is None and count == len(ids)), case
        assert stream.length == len(wanted)
        before = whole_text(tokenizer, prompt, params, hidden)
        echo = before[: len(before) - stream.replaced] + wanted
        assert open_end is None or stream.replaced <= open_end, case
        if count is None:
            assert echo == whole_text(tokenizer, [*prompt, *ids], params, hidden), case
            if not params.skip_special_tokens:
                assert decode_continuation(tokenizer, prompt, ids) == wanted


@pytest.mark.parametrize("make", [llama_like, metaspace])
def test_a_prompt_that_shows_nothing_has_no_text_to_follow(make):
    tokenizer = make()
    word, bos = (tokenizer.token_to_id(name) for name in ("▁a", "<s>"))
    for prompt, skip, text in (([], True, "a"), ([bos], True, "a"), ([bos] * 30, True, "a"), ([bos], False, " a")):
        stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip), prompt=prompt)
        stream.append(word)
        assert stream.finish() == text


def test_a_character_across_the_border_is_of_the_answer():
    tokenizer = byte_level()
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ids = [tokenizer.token_to_id(letter) for letter in spell("ab😀x")[0][0]]
    for cut in (3, 4, 5):
        stream = TextStream(tokenizer, SamplingParams(stop="x"), prompt=ids[:cut])
        assert stream.open_end() == 1
        pieces = [stream.take() for token in ids[cut:-1] if stream.append(token) is False]
        assert pieces == [""] * (5 - cut) + ["😀"]
        assert stream.replaced == 1
        assert stream.append(ids[-1])
        stream = TextStream(tokenizer, SamplingParams(), prompt=ids[:cut])
        stream.append(ids[0])
        assert (stream.finish(), stream.replaced) == ("a", 0)


def test_a_long_run_of_bytes_in_front_of_an_answer_is_seen_whole():
    """Its last byte decides what the run shows, however far back it begins."""
    tokenizer = llama_like()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in ("中" * 60).encode()]
    a, bad = tokenizer.token_to_id("a"), tokenizer.token_to_id("<0xFF>")
    for ids in ([a], [bad, a], run[:2], [*run, a]):
        params = SamplingParams()
        stream = TextStream(tokenizer, params, prompt=[a, *run])
        for token in ids:
            stream.append(token)
        assert stream.finish() == answer_text(tokenizer, [a, *run], ids, params)

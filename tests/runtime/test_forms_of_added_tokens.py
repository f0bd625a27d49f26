"""Forms that spell what added tokens are called: with plain tokens, whatever drafts, under every kind of decoder."""

import json
import random
import re
import time
from contextlib import closing

import chance
import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.grammars import GrammarCompiler
from specexport_runtime.requests.plain_tokens import PlainTokens
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sequences.text import text_behind
from specexport_runtime.sequences.token_bytes import token_bytes

pytest.importorskip("llguidance")

SPECIAL = ("<s>", "</s>", "<|end|>", "[SEP]", "é")
ADDED = ("<tool_call>", "<think>", "ab", "\n\n", "true", '"x"', "▁▁")
"""Others than special ones. One is a word, one is of white space, one is JSON."""
PIECES = ["▁the", "the", "▁a", "ab", "abc", "▁true", "tru", "▁<", "end", "tool", "_call", "|>", '{"', '":', '"}', "日"]
DRAFTERS = ("none", "draft-model", "lookup", "suffix", "chained", "self", "head", "auto")
PROMPT = "a cat"


def bytes_of_tokens(decoder="fallback", *, missing=""):
    """SentencePiece's kind of vocabulary: pieces with ``▁``, and tokens of bytes."""
    letters = [chr(code) for code in range(33, 127) if chr(code) not in missing]
    names = ["<unk>", *(() if missing else (f"<0x{byte:02X}>" for byte in range(256))), "▁", *letters, *PIECES]
    names = [*names, *(each for each in (*SPECIAL, *ADDED) if each not in names)]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=not missing)
    )
    if decoder == "fallback":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    return with_added(tokenizer)


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "Ġthe", "the", "ab", "end", "tool", '{"', '":']
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "n"), ("en", "d"), ("a", "b")]
    names += [one + other for one, other in merges if one + other not in names]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def with_added(tokenizer):
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


KINDS = {"byte level": byte_level, "byte tokens": bytes_of_tokens}


def make_engine(tokenizer):
    size = tokenizer.get_vocab_size() + 3  # the LM head has rows without a token
    options = {"context": 2, "sharpness": 1.0}
    return SpecEngine(
        FakeExecutor(size, 16, 900, num_gates=12, gives_features=True, **options),
        tokenizer,
        draft=FakeExecutor(size, 16, 900, noise=0.3, **options),
        head=FakeExecutor(size, 16, 900, reads_features=True, noise=0.3, **options),
        max_model_len=800,
        eos_token_ids=[tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("ab")],
    )


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    with closing(make_engine(KINDS[request.param]())) as engine:
        yield engine
        engine.check()


def draw_text(rng):
    parts = [*SPECIAL, *ADDED, "▁", " ", "the", "\n", "日本", "\t\\", "x", "<", "q"]
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))


def draw_value(rng):
    return rng.choice([draw_text(rng), draw_text(rng), [draw_text(rng)], {draw_text(rng): 1}, True])


def draw_schema(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return {"const": draw_value(rng)}
    if kind == 1:
        return {"enum": [draw_value(rng) for _ in range(rng.randint(1, 3))]}
    if kind == 2:
        return {"type": "string", "maxLength": 3}
    keys = [draw_text(rng) for _ in range(rng.randint(1, 2))]
    return {
        "type": "object",
        "properties": {key: draw_schema(rng) for key in keys},
        "required": keys[:1],
        "additionalProperties": False,
    }


def quoted(text):
    return "".join(f"\\{sign}" if sign in r"\.+*?()|[]{}^$" else sign for sign in text)


def draw_form(rng):
    """A form, and whether a text has it, by another authority."""
    kind = rng.choice(["choice", "json", "json", "regex", "grammar"])
    if kind == "choice":
        choices = [draw_text(rng) for _ in range(rng.randint(1, 3))]
        return {"choice": choices}, choices.__contains__
    if kind == "json":
        schema = draw_schema(rng)
        return {"json": schema}, lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    one, two = draw_text(rng), draw_text(rng)
    if kind == "regex":
        pattern = f"{quoted(one)}({quoted(two)}|[a-c<]{{1,2}})"
        return {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None
    token = json.dumps(one)
    return {"grammar": f"start: {token} ({json.dumps(two)} | /[ab]/)"}, [one + two, one + "a", one + "b"].__contains__


@pytest.mark.fuzz
def test_drawn_forms_are_spelled_alike_by_every_drafter(engine):
    rng = random.Random(chance.seed(11))
    drawn = [draw_form(rng) for _ in range(chance.many(100))]
    params = [SamplingParams(max_tokens=300, structured_outputs=StructuredOutputs(**form)) for form, _ in drawn]
    plain = None
    for drafter in DRAFTERS:
        results = engine.generate([PROMPT] * len(drawn), params, drafter=drafter)
        for (form, is_right), result in zip(drawn, results, strict=True):
            assert result.finish_reason == "stop", form
            assert is_right(result.text), (form, result.text)
        tokens = [result.token_ids for result in results]
        plain = plain or tokens
        assert tokens == plain, drafter

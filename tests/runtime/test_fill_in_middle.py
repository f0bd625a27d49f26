"""Prompts to fill in the middle: which tokens they have, whatever the tokenizer puts before a text."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.fill_in_middle import MiddleEncoder
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.middle_fakes import LAYOUTS, Filler, filling_engine

MARKS = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
LEGACY = (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None)
METASPACE = (None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False))


def code_llama(normalizer, pre_tokenizer):
    """As CodeLlama's: a text begins with BOS, and with a space that is taken away again."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "\n"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens(["<s>", "</s>", *(AddedToken(mark, normalized=False) for mark in MARKS)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("parts", [LEGACY, METASPACE], ids=["legacy", "metaspace"])
@pytest.mark.parametrize(
    ("prefix", "suffix", "tokens"),
    [
        ("a", "a", "<s> ▁<PRE> ▁a ▁<SUF> a ▁<MID>"),
        ("a a\n", " a", "<s> ▁<PRE> ▁a ▁a \n ▁<SUF> ▁a ▁<MID>"),
        ("", "\na", "<s> ▁<PRE> ▁<SUF> \n a ▁<MID>"),
        ("a", "</s>", "<s> ▁<PRE> ▁a ▁<SUF> <0x3C> <0x2F> <0x73> <0x3E> ▁<MID>"),
    ],
)
def test_only_the_prefix_begins_as_a_text(parts, prefix, suffix, tokens):
    tokenizer = code_llama(*parts)
    prompt = MiddleEncoder(tokenizer, tokenizer.get_vocab_size()).encode(prefix, suffix)
    assert [tokenizer.id_to_token(token) for token in prompt] == tokens.split(" ")


@pytest.mark.parametrize("prefix", ["a", "a\n", ""])
def test_a_middle_keeps_its_first_space_and_hides_its_end(prefix):
    tokenizer = code_llama(*LEGACY)
    size = tokenizer.get_vocab_size()
    prompt = MiddleEncoder(tokenizer, size).encode(prefix, "\n")
    written = [tokenizer.token_to_id(piece) for piece in ("▁a", "b", "▁", "▁<EOT>")]
    engine = engine_of(Filler(size, [([*prompt], written)]), tokenizer, eos_token_ids=[2], max_model_len=99)
    with engine:
        result = engine.generate(engine.encode_middle(prefix, "\n"))[0]
    assert (result.text, result.finish_reason, result.token_ids) == (" ab ", "stop", written)


def test_python_fills_in_many_with_drafts_as_without():
    filled = [("def f(a):\n", "    return a\n", "\n\ndef g(a):\n    return a\n"), ("x = ", "1", "\ny = 1\n")]
    with filling_engine("qwen", *filled) as engine:
        prompts = [engine.encode_middle(prefix, suffix) for prefix, _, suffix in filled]
        for drafter in ("none", "lookup", "chained"):
            assert [each.text for each in engine.generate(prompts, drafter=drafter)] == [each[1] for each in filled]
        shown = engine.generate(
            prompts[1], SamplingParams(skip_special_tokens=False), references=["y = 1"], drafter="lookup"
        )[0]
        assert shown.text == "1" + LAYOUTS["qwen"][1]


def test_a_tokenizer_that_lacks_a_token_has_none():
    tokenizer = code_llama(*LEGACY)
    with pytest.raises(InvalidRequestError, match="no tokens to fill in the middle"):
        MiddleEncoder(tokenizer, tokenizer.token_to_id("▁<MID>"))  # the model's vocabulary ends before it
    with filling_engine("qwen") as engine, pytest.raises(InvalidRequestError, match="half a surrogate pair"):
        engine.encode_middle("\ud800", "x")


def test_a_text_that_only_control_tokens_spell_is_refused():
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "w"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(InvalidRequestError, match="no tokens to fill in the middle"):
        MiddleEncoder(tokenizer, 4)  # these are words like others
    tokenizer.add_tokens(names[:3])
    encoder = MiddleEncoder(tokenizer, 4)
    assert encoder.encode("w", "w w") == [0, 3, 1, 3, 3, 2]
    with pytest.raises(InvalidRequestError, match="the suffix spells a control token"):
        encoder.encode("w", "w <fim_middle>")

"""Forms that spell what added tokens are called: with plain tokens, whatever drafts, under every kind of decoder."""

import contextlib
import json
import random
import re
from contextlib import closing

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specexport_runtime import SamplingParams
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.intake.grammars import GrammarCompiler
from specexport_runtime.requests.token_bytes import token_bytes
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.cases import chance
from tests.support.fakes.engine_of import engine_of

pytest.importorskip("llguidance")

SPECIAL = ("<s>", "</s>", "<|end|>", "[SEP]", "日")
ADDED = ("<tool_call>", "<think>", "ab", "\n\n", "true", '"x"', "▁▁")
"""Others than special ones. One is a word, one is of white space, one is JSON."""
PIECES = ["▁the", "the", "▁a", "ab", "abc", "▁true", "tru", "▁<", "end", "tool", "_call", "|>", '{"', '":', '"}']
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
        tokenizer.decoder = decoder
    return with_added(tokenizer)


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "Ġthe", "the", "ab", "end", "tool", '{"', '":']
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "n"), ("en", "d"), ("a", "b")]
    names += [one + other for one, other in merges if one + other not in names]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.normalizer = normalizers.NFC()  # a form may have what no prompt is read as
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
    return engine_of(
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
    parts = [*SPECIAL, *ADDED, "▁", " ", "the", "\n", "日本", "e\u0301", "\t\\", "x", "<", "q"]
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
    drawn = [draw_form(rng) for _ in range(chance.many(60))]
    params = [SamplingParams(max_tokens=300, structured_outputs=StructuredOutputs(**form)) for form, _ in drawn]
    plain = None
    for drafter in DRAFTERS:
        results = engine.generate([PROMPT] * len(drawn), params, drafter=drafter)
        assert drafter == "none" or sum(result.stats.drafted for result in results) > len(drawn)
        for (form, is_right), result in zip(drawn, results, strict=True):
            assert result.finish_reason == "stop", form
            assert is_right(result.text), (form, result.text)
        tokens = [result.token_ids for result in results]
        plain = plain or tokens
        assert tokens == plain, drafter


def word_pieces(*, cleanup=True):
    letters = [chr(code) for code in range(33, 127)]
    names = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "the", "##ing", "do", "not"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return with_added(tokenizer)


def words():
    """Without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"w": 0, "v": 1, "no": 2}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return with_added(tokenizer)


OTHERS = {
    "Metaspace": lambda: bytes_of_tokens(decoders.Metaspace(prepend_scheme="always")),
    "Metaspace never": lambda: bytes_of_tokens(decoders.Metaspace(prepend_scheme="never")),
    "Metaspace in a sequence": lambda: bytes_of_tokens(decoders.Sequence([decoders.Metaspace(), decoders.Fuse()])),
    "Replace": lambda: bytes_of_tokens(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])),
    "WordPiece": word_pieces,
    "WordPiece as it is": lambda: word_pieces(cleanup=False),
    "words": words,
}


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_the_bytes_of_tokens_are_what_they_add_to_a_text(kind):
    tokenizer, rng = (KINDS | OTHERS)[kind](), random.Random(chance.seed(12))
    size = tokenizer.get_vocab_size()
    found = token_bytes(tokenizer, size + 2)
    assert found[size:] == [b"", b""]
    added = tokenizer.get_added_tokens_decoder()
    plain = [token for token in range(size) if token not in added]
    before = [token for token in plain if found[token].strip().isalpha()][:1]
    runs = [[i for byte in "日é".encode() for i in plain if tokenizer.id_to_token(i) == f"<0x{byte:02X}>"]]
    whole = 0
    for _ in range(chance.many(300)):
        tokens = [token for _ in range(rng.randint(1, 6)) for token in rng.choice([[rng.choice(plain)], *runs])]
        start, text = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
        added_text = text.removeprefix(start).encode()
        data = b"".join(found[token] for token in tokens)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        assert added_text == data
        whole += 1
    assert whole > 50


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Strip(" ", 0, 1), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]), "Replace"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]), "ByteFallback"),
        (decoders.Sequence([decoders.Metaspace(), decoders.ByteLevel()]), "ByteLevel"),
    ],
)
def test_tokens_whose_text_depends_on_their_neighbours_are_refused(step, name):
    tokenizer = bytes_of_tokens(step)
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [1])
    with pytest.raises(InvalidRequestError, match=rf"depends on their neighbours \(decoder step {name}\)"):
        compiler.compile(StructuredOutputs(choice=("a",)))


@pytest.fixture(scope="module")
def metaspace():
    tokenizer = OTHERS["Metaspace"]()
    tokenizer.add_tokens(["<|end|>"])
    with closing(make_engine(tokenizer)) as engine:
        yield engine


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup", "self", "head"])
@pytest.mark.parametrize("text", [" the", "the the", " ", "<|end|> true", "ab", "<0x41>", "  x"])
def test_spaces_of_metaspace_are_spelled(metaspace, text, drafter):
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(choice=(text,)))
    result = metaspace.generate([PROMPT], [params], drafter=drafter)[0]
    assert (result.text, result.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"choice": ("the", "a▁b")}, "no tokens for '▁b' in 'a▁b'"),
        ({"choice": ("é",)}, "no tokens for 'é' in 'é'"),
        ({"json": {"const": "é"}}, "no tokens for 'é"),
        ({"json": {"properties": {"a": {"enum": ["b", "▁"]}}}}, "no tokens for '▁"),
        ({"json": {"properties": {"▁": {}}}}, "no tokens for '▁"),
        ({"grammar": 'start: "a" x\nx: "b" | "a▁"'}, "no tokens for '▁' in 'a▁'"),
        ({"grammar": 'start: "a" %json {"properties": {"b": {"const": "▁"}}} "c"'}, "no tokens for '▁"),
        ({"regex": "▁+"}, "no tokens for how such a text begins"),
        ({"grammar": "start: /▁|é/"}, "no tokens for how such a text begins"),
    ],
)
def test_what_no_plain_tokens_spell_is_refused_before_a_row_is_taken(metaspace, form, said):
    for drafter in ("none", "draft-model", "lookup"):
        with pytest.raises(InvalidRequestError, match=said):
            metaspace.submit(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(**form)), drafter=drafter)
    assert metaspace.current_load().num_waiting == 0
    schema = {"properties": {"a": {"description": "é", "const": "b"}}}  # a description is said nowhere
    metaspace.submit(PROMPT, SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(json=schema))).result()


@pytest.mark.fuzz
def test_a_text_that_no_tokens_can_end_fails_with_every_drafter_or_with_none(metaspace):
    """A vocabulary without bytes: a first token may lead to where nothing is possible, and a draft of it must not."""
    rng = random.Random(chance.seed(13))
    outcomes = set()
    for _ in range(chance.many(12)):
        letters = rng.sample("abcdefgxyz", 6)
        form = StructuredOutputs(regex=f"([{''.join(letters[:3])}][{letters[4]}]?){{2,5}}({letters[5]}é|!)")
        said = []
        for drafter in ("none", "draft-model", "self", "head", "auto"):
            try:
                params = SamplingParams(max_tokens=40, structured_outputs=form)
                said.append(metaspace.generate([PROMPT], [params], drafter=drafter)[0].text)
            except InvalidRequestError as error:
                said.append(str(error))
        assert len(set(said)) == 1, said
        outcomes.add("cannot be followed" in said[0])
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_ends_where_its_grammar_does(kind):
    """A token that ends the text is left out of `any token`, wherever a grammar names it."""
    tokenizer = KINDS[kind]()
    end, other = (tokenizer.token_to_id(text) for text in ("<|end|>", "<tool_call>"))
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [end])
    x = tokenizer.token_to_id("x")
    grammar = compiler.compile(StructuredOutputs(grammar=f'start: <[^{x},{other}]>* <tool_call> "x"'))
    assert not grammar.allowed([])[end]
    assert grammar.allowed([])[other]
    assert grammar.cut([other, end]) == 1
    assert grammar.cut([other, x, end]) == 3
    assert grammar.forced(4, [other, x]) == [end]
    with pytest.raises(CheckFailedError, match="where its grammar does not end"):
        grammar.consume([other, end])
    for name in ("<|end|>", f"<[{end}]>", f"<[{end}-{end}]>"):
        with pytest.raises(InvalidRequestError, match="names a token that ends the text"):
            compiler.compile(StructuredOutputs(grammar=f'start: "x" {name}'))
    for text in (f'"<[{end}]>"', '"<|end|>"', "/<[|]end[|]>/", f'"x" // <[{end}]>', f"<[{other},{end}]>"):
        assert compiler.compile(StructuredOutputs(grammar=f"start: {text}")).allowed([]).any()


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_text_behind_a_prompt_without_text_is_right_or_refused(kind):
    """Decoders strip the space of the first token that shows: it is spelled without one, or not at all."""
    tokenizer = (KINDS | OTHERS)[kind]()
    right = []
    with closing(make_engine(tokenizer)) as engine:
        for text in (" the", "the", "  the", "the the", "<s>", "##ing", " ", "no w"):
            params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputs(choice=(text,)))
            for drafter in ("none", "draft-model", "lookup"):
                with contextlib.suppress(InvalidRequestError):
                    result = engine.generate([[tokenizer.token_to_id("<s>")]], [params], drafter=drafter)[0]
                    assert result.text == text
                    right.append(text)
    assert all(right.count(text) == 3 for text in right)  # refused for every drafter, or for none
    assert kind in ("words", "WordPiece", "WordPiece as it is") or "the the" in right
    assert (" the" in right) == (kind in ("byte level", "Metaspace never", "Replace"))

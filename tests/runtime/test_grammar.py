"""Texts of a given form: always valid, greedy texts equal for every drafter, sampled ones of the same distribution."""

import json
import random
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.grammar import _make_masks
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.fakes.rounds import opened

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_function": {"type": "string", "maxLength": 12},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name_of_the_function", "arguments", "lines"],
    "additionalProperties": False,
}
PROMPT = "def add(a, b):\n    return a + b\n\n\n# As JSON:\n"
DRAFTERS = ("none", "draft-model", "self", "auto")


@pytest.fixture(scope="module")
def engine(demo_bundle):
    with opened(demo_bundle, 4, adaptive=True) as engine:
        yield engine


def check_json(text):
    found = json.loads(text)
    assert list(found) == SCHEMA["required"]
    assert len(found["name_of_the_function"]) <= 12
    assert len(found["arguments"]) <= 3
    assert 1 <= found["lines"] <= 99


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(text)


CHOICES = ("add", "adder", 'a "quoted" \\ one')
FORMS = {
    "json": (StructuredOutputs(json=SCHEMA), check_json),
    "regex": (StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2,4}"), matches(r"[a-f]{3}-[0-9]{2,4}")),
    "choice": (StructuredOutputs(choice=CHOICES), matches("|".join(map(re.escape, CHOICES)))),
    "grammar": (StructuredOutputs(grammar='start: "(" start ")" | "x"'), matches(r"\(*x\)*")),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_texts_have_their_form(engine, form, temperature):
    """One with a form between two without, whose texts do not change."""
    wanted, check = FORMS[form]
    free = SamplingParams(max_tokens=12, seed=5)
    alone = engine.generate([PROMPT], [free], drafter="none")[0].token_ids
    texts = set()
    for drafter in DRAFTERS:
        params = SamplingParams(max_tokens=120, temperature=temperature, seed=3, structured_outputs=wanted)
        before, result, after = engine.generate([PROMPT] * 3, [free, params, free], drafter=drafter)
        assert before.token_ids == after.token_ids == alone
        if result.finish_reason == "stop":
            check(result.text)
        else:  # only the nesting has no end
            assert form == "grammar"
        texts.add(result.text)
    assert temperature or len(texts) == 1


def test_what_is_forced_is_accepted(engine):
    """And drafts are cut where the grammar refuses them, so that no copy is tested for nothing."""
    params = SamplingParams(max_tokens=120, structured_outputs=FORMS["json"][0])
    plain = engine.generate([PROMPT], [params], drafter="none")[0].stats
    drafted = engine.generate([PROMPT], [params], drafter="lookup")[0].stats
    forced = drafted.drafters["forced"]
    assert plain.drafters == {}
    assert forced.accepted > 0.8 * forced.drafted > 8
    assert drafted.rounds < 0.7 * plain.rounds


def test_guesses_go_on_behind_what_is_forced(engine):
    """Rounds with both have more tokens than either alone; and a draft ends with the text."""
    params = SamplingParams(max_tokens=120, structured_outputs=FORMS["json"][0])
    result = engine.generate([PROMPT], [params], drafter="draft-model", trace=True)[0]
    both = [each for each in result.trace if each.forced[:1] == (0,) and each.own[0]]
    between = [each for each in result.trace if each.own[0] and each.forced and each.forced[0] > 0]
    assert both
    assert between
    for each in (*both, *between):
        assert each.own[0] <= 4
        assert len(each.drafted) <= 8
    alone = engine.generate([PROMPT], [params], drafter="lookup")[0]
    assert result.token_ids == alone.token_ids
    ends = engine._builder.eos_token_ids
    for each in result.trace:
        assert not set(each.drafted[:-1]) & set(ends)


def test_a_text_that_is_known_takes_one_round(engine):
    """Its end too is drafted: nothing else can follow."""
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(choice=("return",)))
    for temperature in (0.0, 1.0):
        result = engine.generate([PROMPT], [replace(params, temperature=temperature, seed=1)], drafter="draft-model")[0]
        assert result.text == "return"
        assert result.finish_reason == "stop"
        assert result.stats.rounds == 1


def test_streams_logprobs_and_stop_texts_are_those_of_plain_decoding(engine):
    options = {"stop": ('lines":',), "include_stop_str_in_output": True, "structured_outputs": FORMS["json"][0]}
    params = SamplingParams(max_tokens=60, logprobs=2, **options)
    (plain,) = engine.generate([PROMPT], [params], drafter="none")
    assert plain.text.endswith('lines":')
    for drafter in ("draft-model", "auto"):
        handle = engine.submit(PROMPT, params, drafter=drafter)
        pieces = [piece for chunk in handle for piece in chunk.pieces]
        assert "".join(piece.text for piece in pieces) == plain.text
        assert "forced" in {piece.drafter for piece in pieces}
        found = handle.result()
        assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


def test_what_drafting_has_made_is_not_made_again(engine):
    """The masks of a verify step are those of the draft steps, and one more."""
    grammar = engine._builder.grammars.compile(StructuredOutputs(regex="[a-z ]{2,40}"))
    matcher = grammar._matcher = Mock(wraps=grammar._matcher)
    made = matcher.compute_bitmask
    tokens = engine.tokenizer.encode("return the sum of a list", add_special_tokens=False).ids[:4]
    for count in range(3):
        grammar.allowed(tokens[:count])
    assert grammar.cut(tokens[:3]) == 3
    assert made.call_count == 3
    _make_masks([(grammar, tokens[:3])])
    assert made.call_count == 4
    grammar.allowed(tokens[:1])
    assert made.call_count == 4
    grammar.consume(tokens[:2])
    grammar.allowed(())
    assert made.call_count == 5


def test_what_goes_wrong_behind_a_draft_does_not_stay(engine):
    grammar, said = engine._builder.grammars.compile(FORMS["regex"][0]), []
    for _ in range(3):
        mask = grammar.allowed(()).copy()
        right, wrong = int(mask.argmax()), int(mask[100:].argmin()) + 100  # no end of the text
        with pytest.raises(InvalidRequestError, match="cannot be followed"):
            grammar.allowed([wrong])
        assert (grammar.allowed(()) == mask).all()
        grammar.consume([right])
        said.append(right)
    whole = engine._builder.grammars.compile(FORMS["regex"][0])
    assert (grammar.allowed(()) == whole.allowed(said)).all()


def test_masks_do_not_depend_on_what_was_asked_before(engine):
    """Whatever is drafted, cut, asked again and committed, they are those of a grammar that was only fed the tokens."""
    compile_form = engine._builder.grammars.compile
    form, rng = FORMS["json"][0], random.Random(3)
    [end] = engine._builder.eos_token_ids[:1]
    for _ in range(4):
        grammar, said = compile_form(form), []
        while end not in said and len(said) < 40:
            drafted = []
            for _ in range(rng.randint(0, 5)):
                mask = grammar.allowed(drafted)
                if mask is None:
                    break
                drafted.append(int(rng.choice(mask.nonzero()[0])))
                if rng.random() < 0.3:
                    drafted += grammar.forced(rng.randint(0, 3), drafted)
            fresh = compile_form(form)
            fresh.consume(said)
            assert grammar.cut([*drafted, *said[:1]]) == fresh.cut([*drafted, *said[:1]])
            for count in rng.sample(range(len(drafted) + 1), rng.randint(1, len(drafted) + 1)):
                mine, other = grammar.allowed(drafted[:count]), fresh.allowed(drafted[:count])
                assert (mine is None) == (other is None)
                assert mine is None or (mine == other).all()
                known = grammar.forced(4, drafted[:count])
                assert known == fresh.forced(4, drafted[:count])
                if known:  # the only one that is allowed
                    assert mine.nonzero()[0].tolist() == known[:1]
            taken = drafted[: rng.randint(0, len(drafted))]
            mask = grammar.allowed(taken)
            if mask is not None:
                taken.append(int(rng.choice(mask.nonzero()[0])))
            grammar.consume(taken)
            said += taken


def test_penalties_and_bias_go_along(engine):
    """A token that is banned and the only one that is allowed: the request says so, and ends alone."""
    comma = engine.tokenizer.encode("a", add_special_tokens=False).ids[-1]
    params = SamplingParams(
        max_tokens=5, structured_outputs=StructuredOutputs(regex="a"), logit_bias={comma: float("-inf")}
    )
    handle = engine.submit(PROMPT, params)
    with pytest.raises(Exception, match="no token is possible"):
        handle.result()
    assert engine.generate([PROMPT], [SamplingParams(max_tokens=3)])[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "nothing is given"), ({"regex": "a", "choice": ("b",)}, "regex, choice"), ({"json": "{"}, "no JSON"),
        ({"json": "[]"}, "no JSON schema"), ({"choice": "text"}, "choice"), ({"choice": ()}, "0 texts"),
        ({"json_object": 1}, "json_object is 1"), ({"regex": 5}, "regex"),
        ({"regex": "a" * 300_000}, "300000 characters"),
    ],
)  # fmt: skip
def test_a_form_is_one_thing_of_its_type(fields, said):
    with pytest.raises(InvalidRequestError, match=said):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ."not".'),
        ({"json": {"type": "object", "properties": {"a": {"type": "wat"}}}}, "Invalid type: wat"),
        ({"json": {"$ref": "http://x.example/y"}}, "does not fetch"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: nothing"}, "nothing"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_row_is_taken(engine, fields, said):
    params = SamplingParams(structured_outputs=StructuredOutputs(**fields))
    with pytest.raises(InvalidRequestError, match=said):
        engine.submit(PROMPT, params)
    assert engine.current_load().num_waiting == 0


def test_a_bomb_is_bounded(engine):
    """Its lexer is made as far as a text goes, so an expression of billions of states costs what is used of it."""
    form = StructuredOutputs(regex="((a{1,500}){1,500}){1,500}")
    result = engine.generate([PROMPT], [SamplingParams(max_tokens=12, structured_outputs=form)])[0]
    assert set(result.text) == {"a"}


def test_a_form_that_never_ends_is_refused_beside_ignore_eos(engine):
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="ignore_eos does not"):
        engine.submit(PROMPT, params)
    with pytest.raises(InvalidRequestError, match="structured_outputs is a dict"):
        SamplingParams(structured_outputs={"regex": "a"})

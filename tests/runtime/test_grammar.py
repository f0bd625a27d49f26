"""Texts of a given form: always valid, greedy texts equal for every drafter, sampled ones of the same distribution."""

import json
import re
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from scipy import stats

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.structured import StructuredOutputs

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
DRAFTERS = ("none", "draft-model", "lookup", "self", "auto")


@pytest.fixture(scope="module")
def engine(demo_bundle):
    with closing(SpecEngine.load(demo_bundle, max_num_seqs=4, num_threads=1, spin=False)) as engine:
        engine._loop._check = True
        yield engine
        engine.check()


def check_json(text):
    found = json.loads(text)
    assert list(found) == SCHEMA["required"]
    assert len(found["name_of_the_function"]) <= 12
    assert len(found["arguments"]) <= 3
    assert 1 <= found["lines"] <= 99


FORMS = {
    "json": (StructuredOutputs(json=SCHEMA), check_json),
    "regex": (
        StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2,4}"),
        lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{2,4}", text) or pytest.fail(text),
    ),
    "choice": (
        StructuredOutputs(choice=("add", "adder", 'a "quoted" \\ one')),
        lambda text: text in ("add", "adder", 'a "quoted" \\ one') or pytest.fail(text),
    ),
    "grammar": (
        StructuredOutputs(grammar='start: "(" start ")" | "x"'),
        lambda text: re.fullmatch(r"\(*x\)*", text) or pytest.fail(text),
    ),
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


@pytest.mark.parametrize("drafter", ["draft-model", "lookup"])
def test_sampled_texts_follow_the_masked_distribution(engine, drafter):
    """Against plain decoding, whose law is the target's given that each token is allowed."""
    form = StructuredOutputs(regex="(a|b|c|return|def)( x| y)")
    counts = []
    for name in ("none", drafter):
        params = [
            SamplingParams(max_tokens=9, temperature=1.0, seed=i + 10_000 * (name != "none"), structured_outputs=form)
            for i in range(700)
        ]
        results = engine.generate(["def add(x, y):\n"] * 700, params, drafter=name)
        counts.append(Counter(result.text for result in results))
    texts = [text for text in counts[0] + counts[1] if counts[0][text] + counts[1][text] >= 10]
    table = np.array([[count[text] for text in texts] for count in counts])
    assert len(texts) >= 4
    assert stats.chi2_contingency(table).pvalue > 1e-3


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
        ({}, "nothing is given"),
        ({"regex": "a", "choice": ("b",)}, "regex, choice are given"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[]"}, "is no JSON schema"),
        ({"choice": "text"}, "no list of texts"),
        ({"choice": ()}, "has 0 texts"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": 5}, "regex is no text"),
        ({"regex": "a" * 300_000}, "has 300000 characters"),
    ],
)
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

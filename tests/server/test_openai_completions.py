"""``/v1/completions`` with the official client: every parameter does what it does in the engine itself."""

import pytest

from specexport_runtime.requests.records import Share
from specexport_runtime.requests.stats import RequestStats
from specexport_runtime.server.answer_format import build_usage
from specexport_runtime.server.answer_schema import SpeculativeUsage
from tests.support.servers.openai_help import alone, client_of

PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def complete(fake_served):
    """The prompt of all, continued by the official client."""
    with client_of(fake_served) as client:
        yield lambda **params: client.completions.create(**{"model": "fake", "prompt": PROMPT} | params)


@pytest.mark.parametrize(
    "prompt", ["w1 w2", ["w1 w2", "w3", "w4 w5 w6"], [3, 4, 5], [[3, 4], [5], [6, 7, 8]]], ids=lambda p: str(type(p))
)
def test_every_form_of_prompt(complete, fake_served, prompt):
    answer = complete(prompt=prompt, temperature=0, max_tokens=12)
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    each = [alone(fake_served, item, temperature=0, max_tokens=12) for item in prompts]
    assert [choice.text for choice in answer.choices] == [result.text for result in each]
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert answer.usage.prompt_tokens == sum(result.stats.num_prompt_tokens for result in each)
    assert answer.usage.completion_tokens == 12 * len(prompts)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("text_completion", "fake")


STANDARD = [
    *({name: 2.0} for name in ("presence_penalty", "frequency_penalty")),
    *({"top_p": 0.5}, {"max_tokens": 5}, {"temperature": 0.3}, {"temperature": 0}),
]
OF_VLLM = [{"top_k": 2}, {"min_p": 0.4}, {"repetition_penalty": 3.0}, {"stop_token_ids": [0, 4, 5, 6]}]


@pytest.mark.parametrize(
    ("params", "extra"), [*((each, {}) for each in STANDARD), *(({}, each) for each in OF_VLLM)], ids=str
)
def test_a_parameter_reaches_the_engine(complete, fake_served, params, extra):
    shared = {"seed": 11, "max_tokens": 40} | params
    answer = complete(extra_body=extra, **shared)
    expected = alone(fake_served, PROMPT, **shared, **extra)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert expected.text != alone(fake_served, PROMPT, seed=11, max_tokens=40).text  # it changes something


def test_logit_bias_has_ids_as_keys(complete):
    answer = complete(max_tokens=4, logit_bias={"5": 100}, seed=1)
    assert answer.choices[0].text == " w5 w5 w5 w5"


def test_stop_strings(complete, fake_served):
    whole = alone(fake_served, PROMPT, temperature=0, max_tokens=40).text
    word = next(word for word in whole.split()[3:] if word not in whole.split()[:3])
    for stop, include in ((word, True), (["zzz", word], False)):
        answer = complete(temperature=0, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": include})
        assert answer.choices[0].text == whole[: whole.index(word) + include * len(word)]
        assert answer.choices[0].finish_reason == "stop"


def test_ends_of_text(demo_served):
    with client_of(demo_served) as demo:
        params = {"temperature": 0, "max_tokens": 5, "logit_bias": {"0": 100}}
        ended = demo.completions.create(model="demo", prompt="def f(", **params)
        assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        going = demo.completions.create(model="demo", prompt="def f(", **params, extra_body=extra)
        assert (going.choices[0].text, going.choices[0].finish_reason) == ("<|endoftext|>" * 5, "length")


def test_each_of_n_choices_can_be_asked_for_alone(complete, fake_served):
    answer = complete(prompt=["w1 w2", "w3"], n=3, seed=40, max_tokens=12)
    texts = [choice.text for choice in answer.choices]
    assert texts == [alone(fake_served, p, seed=40 + i, max_tokens=12).text for p in ("w1 w2", "w3") for i in range(3)]
    assert len(set(texts)) > 3
    again = complete(prompt="w3", seed=42, max_tokens=12)
    assert again.choices[0].text == texts[5]
    assert answer.usage.prompt_tokens == 3  # a prompt counts once


def test_without_a_seed_texts_differ(complete):
    answer = complete(n=4, max_tokens=12)
    assert len({choice.text for choice in answer.choices}) > 1


def test_defaults_are_openais(complete, fake_served):
    answer = complete(seed=5)
    assert answer.choices[0].text == alone(fake_served, PROMPT, seed=5, temperature=1.0, max_tokens=16).text
    assert answer.usage.completion_tokens == 16


def test_the_default_length_ends_where_the_context_does(complete):
    answer = complete(prompt=[1] * 396)
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"


def test_usage_tells_of_the_draft(complete, fake_served):
    answer = complete(temperature=0, max_tokens=40)
    stats = alone(fake_served, PROMPT, temperature=0, max_tokens=40).stats
    assert stats.drafted > stats.accepted > 0
    assert answer.usage.speculative == {
        "rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted, "branches": stats.branches,
        "accepted_branches": stats.accepted_branches, "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "drafters": {name: counts.to_json() for name, counts in stats.drafters.items()},
    }  # fmt: skip
    assert list(stats.drafters) == ["draft-model"]


def test_usage_of_drafters_is_that_of_all_choices():
    """Two choices, one of which another drafter helped; the sums are those of the answer."""
    stats = [RequestStats(), RequestStats()]
    stats[0].record_round(4, 2, 3, shares=[Share("suffix", 4, 2, 1, 1)])
    stats[0].record_round(3, 3, 4, shares=[Share("draft-model", 3, 3)])
    stats[1].record_round(5, 1, 2, shares=[Share("suffix", 5, 1, 3, 0)])
    stats[1].record_round(0, 0, 1)
    usage = build_usage(7, stats)["speculative"]
    assert usage["drafters"] == {
        "suffix": {"rounds": 2, "drafted": 9, "accepted": 3, "branches": 4, "accepted_branches": 1},
        "draft-model": {"rounds": 1, "drafted": 3, "accepted": 3, "branches": 0, "accepted_branches": 0},
    }
    assert (usage["rounds"], usage["drafted"], usage["accepted"]) == (4, 12, 6)
    assert (usage["branches"], usage["accepted_branches"]) == (4, 1)
    assert (usage["acceptance_rate"], usage["mean_accepted_length"]) == (0.5, 3.0)
    assert stats[0].drafters["suffix"].drafted == 4  # they are added up elsewhere
    assert SpeculativeUsage.model_validate(usage).model_dump() == usage


@pytest.mark.parametrize("streamed", [False, True])
def test_how_to_draft_for_one_request(complete, fake_served, streamed):
    def usage(**speculative):
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        answer = complete(temperature=0, max_tokens=40, extra_body={"speculative": speculative}, **options)
        return (list(answer)[-1] if streamed else answer).usage.speculative

    none = usage(drafter="none")
    assert (none["rounds"], none["drafted"]) == (40, 0)
    assert none["acceptance_rate"] is None
    assert none["mean_accepted_length"] is None
    one = usage(num_speculative_tokens=1)
    assert one["mean_accepted_length"] <= 2 < usage()["mean_accepted_length"]
    reference = alone(fake_served, PROMPT, temperature=0, max_tokens=40).text
    assert usage(drafter="lookup", reference=reference)["accepted"] > usage(drafter="lookup")["accepted"]
    assert usage(reference=reference)["accepted"] > usage()["accepted"]  # a reference implies that it is used


def test_how_drafts_are_accepted(complete, fake_served):
    def text(**speculative):
        asked = {"speculative": speculative}
        return complete(seed=5, max_tokens=40, extra_body=asked).choices[0].text

    texts = {
        rule: alone(fake_served, PROMPT, seed=5, max_tokens=40, acceptance=rule).text for rule in ("block", "token")
    }
    assert texts["block"] != texts["token"]
    assert {rule: text(acceptance=rule) for rule in texts} == texts
    assert text() == texts["block"]


def test_origins_of_tokens(complete):
    answer = complete(n=2, max_tokens=30, extra_body={"speculative": {"token_origins": True}})
    tokens = [token for choice in answer.choices for token in choice.tokens]
    for choice in answer.choices:
        assert "".join(token["text"] for token in choice.tokens) == choice.text
    assert len(tokens) == answer.usage.completion_tokens
    assert sum(token["kind"] == "accepted" for token in tokens) == answer.usage.speculative["accepted"]
    assert {token["kind"] for token in tokens} == {"accepted", "corrected", "bonus", "target"}
    drafted = [token.get("drafter") for token in tokens if token["kind"] == "accepted"]
    assert drafted == ["draft-model"] * len(drafted)
    assert all(set(token) == {"text", "kind"} for token in tokens if token["kind"] != "accepted")

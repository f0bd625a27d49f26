"""A budget of thinking: its end is forced at its place, drafted or not, and nothing else is changed."""

import numpy as np
import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking import Thinking
from specexport_runtime.sampling.thinking_budget import BudgetRules, ThinkingBudget
from tests.support.cases import chance
from tests.support.fakes.forced import DECODERS, PROMPTS
from tests.support.fakes.loop import VOCAB, make_decoder, make_sequence, make_target, run
from tests.support.fakes.rounds import opened
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import SMALL, least_p_value, make_requests, small_model

END, BEGIN, LINE = 2, 3, 4
LOOKAHEAD = 3


def rules_of(count, begin=None, *, between=(), vocab=VOCAB, most=LOOKAHEAD, form=None):
    return BudgetRules(ThinkingBudget(count, Thinking(END, begin, between)), vocab, form, most)


def must_end(count, begin, between, text):
    """Whether a text must end its thinking now; written down anew."""
    text = list(text)
    while begin is not None and text and text[0] in between:
        text.pop(0)
    if begin is not None:
        if text[:1] != [begin]:
            return False
        text.pop(0)
    return END not in text and len(text) >= count


@pytest.mark.parametrize("begin", [None, BEGIN])
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("width", [0, 1, 6])
def test_the_end_alone_is_allowed_where_the_budget_is_used_up(count, begin, width):
    thought = [*range(7, 7 + count), END]
    texts = [[5, 6, BEGIN, 9, 9, 9, 9, 9, 9, 9], [BEGIN, *thought, 9, BEGIN, 9, 9, 9, 9, 9, 9], [LINE, BEGIN, *thought]]
    texts += [[*thought[1:], 5, 5, 5, 5, 5], thought, [LINE, 9, BEGIN, 5, 5, 5, 5, 5]]
    for text in texts:
        rules, at, between = rules_of(count, begin, between=(LINE,)), 0, (LINE,)
        while at < len(text):
            draft = text[at : at + width]
            wrong = [
                i for i, token in enumerate(draft)
                if must_end(count, begin, between, text[: at + i]) and token != END
            ]  # fmt: skip
            assert rules.cut(draft) == (wrong[0] if wrong else len(draft))
            for taken in range(len(draft) + 1):
                forced = must_end(count, begin, between, text[: at + taken])
                found = rules.allowed(draft[:taken])
                assert (found is not None) is forced
                assert found is None or found.nonzero()[0].tolist() == [END]
                assert rules.forced(5, draft[:taken]) == ([END] if forced else [])
            if any(must_end(count, begin, between, text[: at + i]) for i in range(width + 1)):
                assert rules.current is rules or width > LOOKAHEAD
            rules.consume(text[at : at + width + 1])
            at += width + 1


def plain_text(target, prompt, length, count):
    """The likeliest tokens one by one; after ``count`` of them the end, if it did not come."""
    tokens = list(prompt)
    for place in range(length):
        forced = place == count and END not in tokens[len(prompt) :]
        tokens.append(END if forced else int(target.logits_after(tokens)[:VOCAB].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("count", [0, 2, 11])
@pytest.mark.parametrize("drafter", DECODERS)
def test_greedy_texts_are_those_of_plain_decoding(drafter, count):
    requests = [
        make_sequence(i, prompt, SamplingParams(max_tokens=24), grammar=rules_of(count), seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    events = run(DECODERS[drafter](LOOKAHEAD, 0.4), requests)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == plain_text(make_target(), prompt, 24, count)
    assert sum(event.accepted for event in events) > 0


def test_rounds_before_the_end_are_those_of_any_request(monkeypatch):
    """Up to there no mask is made, and after it none: the request is sampled as one without a budget."""
    count, asked, allowed, most = 14, [], BudgetRules.allowed, SamplingParams(max_tokens=50)
    free = make_sequence(0, [3], most)
    run(make_decoder(make_target(), None, 0), [free])
    end = next(token for token in range(VOCAB) if token not in free.output[:count])
    rules = BudgetRules(ThinkingBudget(count, Thinking(end)), VOCAB, None, LOOKAHEAD)
    request = make_sequence(0, [3], most, grammar=rules)

    def counted(self, drafted):
        asked.append(request.num_generated)
        return allowed(self, drafted)

    monkeypatch.setattr(BudgetRules, "allowed", counted)
    assert request.sampler.is_plain_greedy
    run(DECODERS["draft-model"](LOOKAHEAD, 0.4), [request])
    assert request.sampler.is_plain_greedy
    assert request.output[: count + 1] == [*free.output[:count], end]
    assert count - LOOKAHEAD <= min(asked) <= max(asked) <= count


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize(("count", "begin", "lookahead"), [(0, None, 2), (1, None, 2), (1, 1, 2), (2, None, 1)])
def test_sampled_texts_follow_the_target_given_the_end(count, begin, lookahead, acceptance):
    """In the last case masks come only after a round without one."""
    target, params = small_model(), SamplingParams(temperature=1.0, max_tokens=4)
    make = lambda _=0: rules_of(count, begin, vocab=SMALL, most=lookahead)  # noqa: E731
    plan = (DraftStage("draft-model", lookahead),)
    decoder = make_decoder(target, small_model(noise=0.7, seed=3), lookahead, plan=plan)
    requests = make_requests(600, params, grammar=make, acceptance=acceptance)
    assert requests[0].sampler.is_plain is (count > lookahead)
    run(decoder, requests)
    assert sum(request.stats.accepted for request in requests) > 100
    assert least_p_value(target, requests, grammar=make) > P_VALUE


def test_a_budget_is_checked():
    for count in (-1, 1.0, True, "5"):
        with pytest.raises(InvalidRequestError, match="integer of at least 0"):
            ThinkingBudget(count, Thinking(END))
    with pytest.raises(InvalidRequestError, match="no Thinking"):
        ThinkingBudget(5, 7)
    with pytest.raises(InvalidRequestError, match="thinking_budget is a int"):
        SamplingParams(thinking_budget=5)
    with pytest.raises(InvalidRequestError, match="names token 17"):
        BudgetRules(ThinkingBudget(1, Thinking(17)), VOCAB, None, 3)


PROMPT = "def add(a, b):\n    return a + b\n\n\n"


@pytest.fixture(scope="module")
def engine(demo_bundle):
    with opened(demo_bundle, 4, adaptive=True) as engine:
        yield engine


@pytest.mark.parametrize("form", [None, StructuredOutputs(regex="[a-c]{4}")], ids=["free", "form"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_real_models_think_as_long_as_they_may(engine, form, temperature):
    """The demo pair thinks until it writes what it never does; then it is told to, and goes on, or takes a form."""
    if form is not None:
        pytest.importorskip("llguidance")
    end = engine.tokenizer.token_to_id("~")
    thinking = Thinking(end)
    form = form and StructuredOutputs(regex=form.regex, thinking=thinking)
    common = {"max_tokens": 40, "temperature": temperature, "seed": chance.seed(1)}
    for count in (0, 1, 20):
        texts = []
        for drafter in ("none", "lookup", "draft-model", "auto"):
            params = SamplingParams(
                **common,
                structured_outputs=form,
                thinking_budget=ThinkingBudget(count, thinking),
                logit_bias={end: -50.0},
            )
            result = engine.generate([PROMPT], [params], drafter=drafter)[0]
            assert result.token_ids.index(end) == count
            if form is not None:
                assert len(result.text.rpartition("~")[2]) == 4
            texts.append(result.token_ids)
        if not temperature:
            assert all(text == texts[0] for text in texts)
            free = engine.generate([PROMPT], [SamplingParams(max_tokens=count + 1)], drafter="none")[0].token_ids
            assert texts[0][:count] == free[:count]
            if form is None:
                ids = [*engine.encode(PROMPT), *texts[0][: count + 1]]
                rest = engine.generate([ids], [SamplingParams(max_tokens=39 - count)], drafter="none")[0].token_ids
                assert texts[0][count + 1 :] == rest
    batch = [SamplingParams(max_tokens=30, thinking_budget=ThinkingBudget(n, thinking)) for n in (3, 9)]
    together = engine.generate([PROMPT] * 3, [*batch, SamplingParams(max_tokens=30)], drafter="draft-model")
    alone = [engine.generate([PROMPT], [each], drafter="none")[0] for each in (*batch, SamplingParams(max_tokens=30))]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert np.flatnonzero(np.array(together[0].token_ids) == end).tolist() == [3]

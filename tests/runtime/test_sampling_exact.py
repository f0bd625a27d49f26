"""The whole draft-and-test procedure emits the target's distribution, for every combination of parameters.

A toy target and toy drafts are tables: the logits of a position depend on the token before it. For each combination
the joint distribution of the first tokens is enumerated exactly, the procedure is run many times, and a chi-square test
compares the two. Wrong acceptance rules must fail the same check.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

from specexport_runtime.sampling import accept
from specexport_runtime.sampling.accept import Verdict, accept_sampled
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.distribution import sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import Draws, RandomStream, RoundDraws
from tests.support.references.exact import DRAFTS, P_VALUE, Toy, emit, p_value

pytestmark = pytest.mark.slow


SWITCHES = {
    "temperature": ({"temperature": 0.7}, {"temperature": 1.4}),
    "top-k": ({}, {"top_k": 4}),
    "top-p": ({}, {"top_p": 0.85}),
    "min-p": ({}, {"min_p": 0.08}),
    "penalties": ({}, {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.4}),
    "bias": ({}, {"logit_bias": {0: 1.0, 3: -0.7, 5: 0.4}}),
}
COMBINATIONS = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*SWITCHES.values())]
# A quarter of them runs every day, in which any three switches still meet in all their positions.
QUARTER = [
    (a ^ b ^ c, b ^ c ^ d) == (e, f)  # a fractional factorial design of resolution IV
    for a, b, c, d, e, f in itertools.product((0, 1), repeat=len(SWITCHES))
]


class Numbers:
    """Random numbers that are listed, in place of a ``RandomStream``."""

    def __init__(self, rows):
        self.draws = [Draws(*row) for row in rows].__getitem__

    def round_draws(self):
        return RoundDraws(self)


def check(params, draft, *, rule=accept_sampled, samples=800, length=2, lookahead=3, seed=0):
    toy = Toy(params, draft)
    uniforms = np.random.default_rng([seed, samples, lookahead]).random((samples, length * (lookahead + 1), 3))
    counts = Counter(emit(toy, length, lookahead, Numbers(rows).round_draws(), rule) for rows in uniforms.tolist())
    return p_value(counts, toy.exact(length))


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(
            each, marks=[] if every_day else [pytest.mark.whole], id=" ".join(f"{k}={v}" for k, v in each.items())
        )
        for each, every_day in zip(COMBINATIONS, QUARTER, strict=True)
    ],
)
def test_every_combination_of_parameters_with_every_draft(combination):
    for number, draft in enumerate(DRAFTS):
        rule = list(RULES.values())[(number + COMBINATIONS.index(combination)) % 2]
        p = check(SamplingParams(**combination), draft, rule=rule, seed=number)
        assert p > P_VALUE, f"{draft} draft: p = {p}"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    ("lookahead", "rule"),
    [
        (5, "token"),
        *(
            pytest.param(*each, marks=pytest.mark.whole)
            for each in [(0, "token"), (1, "token"), (2, "block"), (5, "block")]
        ),
    ],
)
def test_three_tokens_with_many_samples(draft, lookahead, rule):
    params = SamplingParams(temperature=0.9, top_k=5, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3)
    assert check(params, draft, rule=RULES[rule], samples=2000, length=3, lookahead=lookahead, seed=11) > P_VALUE


def test_with_the_real_random_streams():
    toy = Toy(SamplingParams(temperature=1.0), "random")
    streams = (RoundDraws(RandomStream(seed)) for seed in range(2000))
    counts = Counter(emit(toy, 2, 3, draws, accept_sampled) for draws in streams)
    assert p_value(counts, toy.exact(2)) > P_VALUE


def accept_always(drafted, distributions, target, draws):
    return Verdict(len(drafted), sample_token(target(len(drafted)), draws(len(drafted)).resample), True)


def residual_is_target(drafted, distributions, target, draws):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept, "residual", lambda q, p: q.probs.copy())
        return accept_sampled(drafted, distributions, target, draws)


def ratio_inverted(drafted, distributions, target, draws):
    for j, token in enumerate(drafted):
        q, p = target(j), distributions[j] if distributions else None
        if draws(j).accept * q.probability(token) >= (p.probability(token) if p else 1.0):
            rest = accept.normalised(q, accept.residual(q, p)) if p else q
            return Verdict(j, sample_token(rest, draws(j).resample), False)
    return accept_always(drafted, distributions, target, draws)


def one_uniform_for_all(drafted, distributions, target, draws):
    return accept_sampled(drafted, distributions, target, lambda j: Draws(*[draws(j).draft] * 3))


def bonus_from_the_last_row(drafted, distributions, target, draws):
    return accept_sampled(drafted, distributions, lambda j: target(max(0, min(j, len(drafted) - 1))), draws)


@pytest.mark.parametrize(
    ("rule", "drafts"),
    [
        (accept_always, ["random", "adversarial", "disjoint", "one-hot"]),
        (residual_is_target, ["random", "adversarial", "short"]),
        (ratio_inverted, ["random", "adversarial", "disjoint", "one-hot"]),
        (one_uniform_for_all, ["random", "adversarial"]),
        (bonus_from_the_last_row, ["good"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_rules_fail_the_same_check(rule, drafts):
    params = SamplingParams(temperature=0.7)
    for draft in drafts:
        assert check(params, draft, lookahead=1, rule=rule) < P_VALUE, f"{draft} draft: not noticed"


def test_a_draft_processed_differently_fails_the_same_check():
    """Drawn from the raw softmax, tested as if from the processed one."""
    toy = Toy(SamplingParams(temperature=0.7, top_k=3), "random")
    raw = Toy(SamplingParams(temperature=1.0), "random")

    def propose(done, lookahead, draws):
        drafted, _ = raw.propose(done, lookahead, draws)
        return drafted, [toy.draft(done, drafted[:j]) for j in range(lookahead)]

    toy.propose = propose

    def lenient(drafted, distributions, target, draws):
        if distributions[0].probability(drafted[0]) == 0:  # a library without our check: rejected at once
            return Verdict(0, sample_token(target(0), draws(0).resample), False)
        return accept_sampled(drafted, distributions, target, draws)

    counts = Counter(
        emit(toy, 2, 1, Numbers(rows).round_draws(), lenient)
        for rows in np.random.default_rng(5).random((4000, 5, 3)).tolist()
    )
    assert p_value(counts, toy.exact(2)) < P_VALUE

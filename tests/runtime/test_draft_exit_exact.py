"""Sampled text follows the target's distribution with draft exit, and broken rules are noticed.

The real drafts, acceptance, thresholds and random streams run on the table-driven models of the sampling tests: one
seed, one sample.
"""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from specexport_runtime.drafters.draft_loop import Draft
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.request import Request
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from tests.support.references.exact import DRAFTS, P_VALUE, PROMPT, TARGET, VOCAB, joint, p_value

pytestmark = pytest.mark.slow


class Rules:
    """Draft exit as it is."""

    def draft(self, seq, table, lookahead):
        draft = Draft(seq, lookahead)
        while draft.is_open:
            draft.draw(table[(seq.tokens + draft.tokens)[-1]])
        return draft

    def observe(self, state, drafted, accepted):
        state.observe(accepted, rejected=accepted < drafted)


class LeavesTokensOut(Rules):
    """A token that is not likely enough itself is drawn, looked at, and left out."""

    def draft(self, seq, table, lookahead):
        draft = super().draft(seq, table, lookahead)
        for j, (token, law) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
            if law.probability(token) < seq.draft_exit.gamma:
                del draft.tokens[j:], draft.distributions[j:]
                break
        return draft


class CountsDiscarded(Rules):
    """Acceptance is measured as in the paper: of all drafted tokens, so of discarded ones too."""

    def observe(self, state, drafted, accepted):
        params = state.params
        state.acceptance = params.beta1 * state.acceptance + (1 - params.beta1) * accepted / drafted
        step = params.epsilon if state.acceptance <= params.target_acceptance else -params.epsilon
        moved = params.beta2 * state.gamma + (1 - params.beta2) * (state.gamma + step)
        state.gamma = min(max(moved, 0.0), 1.0)


def emit(seed, params, rules, exits, table, target, lookahead, length, rule):
    """The first tokens of one sequence, round by round as the decoding loop does it."""
    seq = Request(
        0, PROMPT, params, vocab_size=VOCAB, max_model_len=99, seed=seed, draft_exit=DraftExit(exits), acceptance=rule
    )
    while seq.num_generated < length:
        draft = rules.draft(seq, table, lookahead)
        verdict = RULES[rule](
            draft.tokens,
            draft.distributions,
            lambda j, draft=draft: target((*seq.output, *draft.tokens[:j])),
            seq.draws,
        )
        if draft.tokens:
            rules.observe(seq.draft_exit, len(draft.tokens), verdict.accepted)
        seq.commit([*draft.tokens[: verdict.accepted], verdict.next_token])
    return tuple(seq.output[:length])


def at(counts, position):
    """The same counts or probabilities, of one position alone."""
    marginal = Counter()
    for tokens, value in counts.items():
        marginal[tokens[position]] += value
    return marginal


@pytest.mark.parametrize(
    ("rule", "draft", "params", "exits"),
    [
        ("block", "random", {"temperature": 1.0}, {"gamma": 0.45, "epsilon": 0.4, "beta2": 0.2}),
        ("token", "good", {"temperature": 0.7, "top_k": 4}, {"gamma": 0.6, "epsilon": 0.2, "beta1": 0.1, "beta2": 0.0}),
        ("block", "adversarial", {"temperature": 1.2, "min_p": 0.08}, {"gamma": 0.3, "epsilon": 0.05}),
        ("token", "short", {"temperature": 0.9, "frequency_penalty": 0.5}, {"gamma": 0.5, "epsilon": 0.3}),
    ],
)
def test_sampled_text_follows_the_targets_distribution(rule, draft, params, exits):
    params = SamplingParams(**params)

    @cache
    def target(done):
        sampler = Sampler(params, PROMPT, VOCAB)
        sampler.append(done)
        return sampler.distribution(TARGET[(*PROMPT, *done)[-1]])

    exits = DraftExitParams(**{"target_acceptance": 0.6, **exits})
    counts = Counter(emit(seed, params, Rules(), exits, DRAFTS[draft], target, 5, 3, rule) for seed in range(1200))
    assert p_value(counts, joint(target, 3)) > P_VALUE


class TestAModelMadeToShowIt:
    """Tokens 2 … 5 are sure of what follows, 0 and 1 are not, and the draft is right but for the second position.

    The second draft token is nearly always rejected, for token 5. How many tokens were discarded behind it tells
    whether the fourth was one of 2 … 5; a threshold that knows this decides by it whether the fourth position is tested
    next, with the very number that draws its draft token again.
    """

    PARAMS = SamplingParams(temperature=1.0)
    EXITS = DraftExitParams(gamma=0.4, target_acceptance=0.18, epsilon=0.5, beta1=0.0, beta2=0.0)
    SURE, FLAT, FIVE = [0.1, 0.1, 0.56, 0.12, 0.07, 0.05], [1 / 6] * 6, [0.01] * 5 + [0.95]
    TABLE = np.log(np.array([FLAT, FLAT, SURE, SURE, SURE, SURE])).astype(np.float32)

    def count(self, rules, rule):
        sampler = Sampler(self.PARAMS, PROMPT, VOCAB)
        rows = [sampler.distribution(row) for row in self.TABLE]
        five = sampler.distribution(np.log(np.array(self.FIVE)).astype(np.float32))

        def target(done):
            return five if len(done) == 1 else rows[(*PROMPT, *done)[-1]]

        options = (self.PARAMS, rules, self.EXITS, self.TABLE, target, 8, 4, rule)
        return Counter(emit(seed, *options) for seed in range(2000)), joint(target, 4)

    @pytest.mark.parametrize("rule", RULES)
    def test_the_rules_as_they_are(self, rule):
        counts, exact = self.count(Rules(), rule)
        assert p_value(counts, exact) > P_VALUE
        assert all(p_value(at(counts, i), at(exact, i)) > P_VALUE for i in range(4))

    def test_counting_discarded_tokens_is_noticed(self):
        counts, exact = self.count(CountsDiscarded(), "token")
        assert p_value(at(counts, 3), at(exact, 3)) < P_VALUE

    def test_leaving_a_token_out_after_looking_at_it_is_noticed(self):
        counts, exact = self.count(LeavesTokensOut(), "block")
        assert p_value(at(counts, 0), at(exact, 0)) < P_VALUE

"""Block verification is exact: each draw of a round is integrated; out comes the target's distribution to 1e-12.

A round is run once for each way that its comparisons and draws can end, and each way is weighed by its probability.
After what it gives, the target goes on: the text as a whole must have the target's distribution. So must texts of many
rounds.
"""

from collections import Counter

import numpy as np
import pytest

from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling import accept, block
from specexport_runtime.sampling.accept import Verdict, accept_sampled
from specexport_runtime.sampling.block import RULES, accept_block
from specexport_runtime.sampling.distribution import HostDistribution
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import Draws
from tests.support.fakes.loop import finish, make_decoder, make_sequence
from tests.support.references import drawn
from tests.support.references.drawn import distribution, error

VOCAB, LONGEST = drawn.Models.VOCAB, 3


@pytest.fixture(autouse=True)
def whole_distribution(monkeypatch):
    drawn.integrate(monkeypatch, accept, block)


class Rounds(drawn.Models):
    """Rounds of drafts.

    Args:
        points: places in the draft whose token is no draw.
        leaves: the draft ends after a token that it was not sure of: with a top probability below this.
    """

    def __init__(self, *args, points=(), leaves=0.0, **options):
        super().__init__(*args, **options)
        self.points, self.leaves = points, leaves

    def propose(self, way, lookahead):
        text, distributions = (), []
        while len(text) < lookahead:
            drawn_from = self.draft(text)
            if len(text) in self.points:
                text += (sum(text) % VOCAB,)
                distributions.append(None)
                continue
            text += (drawn.draw(drawn_from, drawn.Uniform(way)),)
            distributions.append(drawn_from)
            if drawn_from.probs.max() < self.leaves:
                break
        return text, distributions

    def round(self, rule, lookahead):
        def run(way):
            drafted, distributions = self.propose(way, lookahead)
            uniforms = [Draws(None, drawn.Uniform(way), drawn.Uniform(way)) for _ in range(lookahead + 1)]
            verdict = rule(drafted, distributions, lambda j: self.target(drafted[:j]), uniforms.__getitem__)
            return drafted, verdict.accepted, (*drafted[: verdict.accepted], verdict.next_token)

        return distribution(run)

    def judged(self, rule, lookahead):
        """Largest difference of the distribution of a text that begins with a round; mean draft tokens that stay."""
        rounds, accepted = Counter(), 0.0
        for (_, count, tokens), weight in self.round(rule, lookahead).items():
            rounds[tokens] += weight
            accepted += weight * count
        return error(rounds, self.target, LONGEST + 1), accepted


KINDS = [
    {}, {"sparse": True}, {"kind": "same"}, {"kind": "disjoint"}, {"kind": "disjoint", "sparse": True},
    {"points": (0,)}, {"points": (1,)}, {"points": (0, 2), "sparse": True}, {"points": (0, 1, 2)}, {"leaves": 0.6},
    {"leaves": 0.6, "points": (1,)},
]  # fmt: skip


@pytest.mark.parametrize("models", KINDS, ids=str)
def test_a_round_leaves_the_distribution_of_the_text_as_it_is_and_a_block_keeps_no_fewer_tokens(models):
    for seed in range(2):
        for lookahead in range(LONGEST + 1):
            (wrong, whole), (also_wrong, one_by_one) = (
                Rounds(seed, **models).judged(rule, lookahead) for rule in (accept_block, accept_sampled)
            )
            assert max(wrong, also_wrong) < 1e-12
            assert whole >= one_by_one - 1e-12
            assert lookahead > 1 or whole == pytest.approx(one_by_one, abs=1e-12)


def test_a_block_keeps_more():
    gains = [Rounds(i).judged(accept_block, 3)[1] / Rounds(i).judged(accept_sampled, 3)[1] for i in range(8)]
    assert min(gains) > 1.001
    assert np.mean(gains) > 1.03


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("models", [{}, {"points": (1,)}], ids=str)
def test_counts_of_drafts_of_all_lengths_tell_what_each_length_gives(models, rule):
    """What ``lookahead/acceptance.py`` relies on: passed up to what stays, then one failure, then nothing is known."""
    for seed in range(2):
        made, tests, fails = Rounds(seed, **models), np.zeros(LONGEST), np.zeros(LONGEST)
        for lookahead in range(1, LONGEST + 1):
            for (_, count, _), weight in made.round(rule, lookahead).items():
                tests[: min(count + 1, lookahead)] += weight
                fails[count:lookahead][:1] += weight
        reach = np.cumprod(1 - fails / tests)
        for lookahead in range(1, LONGEST + 1):
            assert made.judged(rule, lookahead)[1] == pytest.approx(sum(reach[:lookahead]), abs=1e-12)


def by_the_paper(drafted, distributions, target, draws, *, end=0, forwards=False, weighed=True):
    """Algorithm 2 in a few lines, and what can be got wrong in it.

    Args:
        drafted, distributions, target, draws: as for a rule.
        end: tokens by which the length of another row's draft differs, where the last test is.
        forwards: the first test that fails ends them.
        weighed: what is drawn at the end knows the chance of what is kept.
    """

    def probs(distribution, token=None):
        if distribution is None:
            return np.eye(VOCAB)[token]
        full = np.zeros(VOCAB)
        full[slice(None) if distribution.token_ids is None else distribution.token_ids] = distribution.probs
        return full

    last, chances, tests = len(drafted), [1.0], []
    for j, token in enumerate(drafted):
        p = probs(distributions[j], token)[token]
        chances.append(min(1.0, chances[-1] * probs(target(j))[token] / p) if chances[-1] else 0.0)
    rest = [np.maximum(chances[j] * probs(target(j)) - probs(distributions[j], drafted[j]), 0) for j in range(last)]
    for i in range(1, last + 1):
        mass = rest[i].sum() if i < last else chances[i]
        whole = mass + 1 - chances[i]
        chance = chances[i] if i >= last + end else mass / whole if whole else 1.0
        tests.append(draws(i - 1).accept < chance)
    passed = [i for i in range(1, last + 1) if (all(tests[:i]) if forwards else tests[i - 1])]
    kept = max(passed, default=0)
    if kept == last:
        return Verdict(last, drawn.draw(target(last), draws(last).resample), True)
    masses = rest[kept] if weighed else np.maximum(probs(target(kept)) - probs(distributions[kept], drafted[kept]), 0)
    masses = masses if masses.any() else probs(target(kept))
    return Verdict(kept, drawn.draw(HostDistribution(None, masses), draws(kept).resample), False)


def test_the_rule_is_the_papers():
    for seed in range(2):
        for options in ({}, {"sparse": True}, {"kind": "disjoint"}):
            made = Rounds(seed, **options)
            ours, papers = made.round(accept_block, 3), made.round(by_the_paper, 3)
            assert all(abs(ours[each] - papers[each]) < 1e-12 for each in {*ours, *papers})


@pytest.mark.parametrize(("uniform", "rows"), [(0.1, [0]), (0.07, [0, 1]), (0.01, [0, 1, 2, 3])])
def test_rows_that_cannot_matter_are_not_processed(uniform, rows):
    """The first token stays with a chance of 0.02; at best, that doubles with each token after it."""
    rare, fair = (HostDistribution(None, np.array([p, 1 - p])) for p in (0.01, 0.5))
    seen = []

    def target(j):
        seen.append(j)
        return fair if j else rare

    verdict = accept_block([0, 0, 0], [fair] * 3, target, lambda _: Draws(0.0, uniform, 0.5))
    assert (seen, verdict.accepted) == (rows, 3 * (len(rows) == 4))


@pytest.mark.parametrize("wrong", [{"end": -1}, {"forwards": True}, {"weighed": False}], ids=str)
def test_a_wrong_rule_has_another_distribution(wrong):
    def rule(*given):
        return by_the_paper(*given, **wrong)

    assert min(Rounds(seed).judged(rule, 3)[0] for seed in range(4)) > 1e-4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("models", [{}, {"points": (1,)}], ids=str)
def test_where_there_is_no_distribution_the_draft_ends_and_it_is_an_error_if_the_text_comes_there(models, rule):
    for seed in range(4):
        made = Rounds(seed, **models)
        right, expected = drawn.with_dead_ends(made.target)

        def run(way, made=made, right=right):
            drafted, distributions = made.propose(way, LONGEST)
            uniforms = [Draws(None, drawn.Uniform(way), drawn.Uniform(way)) for _ in range(LONGEST + 1)]
            try:
                verdict = rule(drafted, distributions, lambda j: right(drafted[:j]), uniforms.__getitem__)
            except drawn.NoDistributionError as error:
                return (*error.text, drawn.NO_DISTRIBUTION)
            return (*drafted[: verdict.accepted], verdict.next_token)

        assert error(distribution(run), expected, LONGEST + 1, VOCAB + 1) < 1e-12


def test_where_nothing_is_drawn_both_rules_give_the_same_text():
    """Plain decoding and copies: the numbers of a seed are then those of its positions."""
    params = SamplingParams(max_tokens=40, temperature=0.8)
    for plan in ([], [DraftStage("lookup", 4)]):
        options = {"seed": 3, "draft_plan": plan}
        pair = [make_sequence(0, [1, 2, 3, 1, 2], params, acceptance=rule, **options) for rule in RULES]
        finish(make_decoder(FakeExecutor(17, 4, 80, context=1), None, 4, plan=()), pair)
        assert pair[0].output == pair[1].output
        assert bool(plan) == bool(pair[0].stats.accepted)

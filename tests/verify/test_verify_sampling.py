"""The sampling part: exact draws pass for any draft, and each way of getting acceptance wrong fails."""

import numpy as np
import pytest

from specexport.verify.goodness_of_fit import assess_outcomes
from specexport.verify.logit_tree import IMPOSSIBLE, LogitTree, Partition, make_conditional
from specexport.verify.sampling import FAMILY_ALPHA, SETTINGS, accept_everything, check_sampling, draw_outcome
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.accept import Verdict, accept_sampled
from specexport_runtime.sampling.block import DEFAULT_RULE, RULES
from specexport_runtime.sampling.distribution import HostDistribution, sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler
from specexport_runtime.sampling.tree import TREE_RULES
from tests.support.fakes.verify_fakes import PROMPTS, VOCAB, make_engine, make_executor

SIZES = {"num_samples": 700, "num_runs": 100, "num_contexts": 1}
ENGINE = {"num_samples": 100, "num_runs": 300, "num_contexts": 1}
LAST = SETTINGS[-1:]


@pytest.mark.parametrize(
    ("draft", "lookahead", "contexts"), [("same", 4, 1), ("good", 1, 2), ("random", 2, 1), (None, 4, 1)]
)
def test_exact_draws_pass_with_any_draft(draft, lookahead, contexts):
    """With fewer draft tokens than an outcome has, a token that follows accepted drafts is a part of the outcome."""
    result = check_sampling(make_engine(draft, lookahead=lookahead), PROMPTS, **SIZES | {"num_contexts": contexts})
    assert result.passed, [test for test in result.tests if not test.passed]
    assert result.has_power
    assert len(result.tests) == (contexts + 1) * len(SETTINGS)
    assert result.min_p_value > result.alpha
    # The draft that is the target gives a control nothing to see.
    assert (result.control_p_value > result.alpha) == (draft == "same")


def tree_engine(draft):
    target = make_executor()
    target.takes_trees = True
    return make_engine(draft, target)


@pytest.mark.parametrize("draft", ["good", "random"])
def test_exact_draws_of_trees_pass(draft):
    engine = tree_engine(draft)
    result = check_sampling(engine, PROMPTS, settings=LAST, **ENGINE)
    assert result.passed, [test for test in result.tests if not test.passed]
    assert [(test.kind, test.setting) for test in result.tests if test.kind == "trees"] == [("trees", LAST[0].name)]
    assert result.alpha == FAMILY_ALPHA / 2 / 3, "one more test of the family"
    assert engine.times.moved > 0


def test_a_broken_rule_for_trees_fails_them_alone(monkeypatch):
    def take_the_chain(nodes, parents, distributions, target_distribution, draws):
        place = max(i for i, parent in enumerate(parents) if parent == i - 1)
        return Verdict(place + 1, sample_token(target_distribution(place), draws(place + 1).resample), is_bonus=True)

    monkeypatch.setitem(TREE_RULES, DEFAULT_RULE, take_the_chain)
    result = check_sampling(tree_engine("random"), PROMPTS, settings=LAST, **ENGINE)
    assert {test.kind for test in result.tests if not test.passed} == {"trees"}


def resample_from_the_target(drafted, draft_distributions, target_distribution, draws):
    """Rejects rightly, then draws from q instead of max(0, q - p)."""
    verdict = accept_sampled(drafted, draft_distributions, target_distribution, draws)
    if verdict.is_bonus:
        return verdict
    token = sample_token(target_distribution(verdict.accepted), draws(verdict.accepted).resample)
    return Verdict(verdict.accepted, token, is_bonus=False)


def reuse_the_draft_number(drafted, draft_distributions, target_distribution, draws):
    """Tests a token with the random number that drew it."""
    return accept_sampled(
        drafted, draft_distributions, target_distribution, lambda j: draws(j)._replace(accept=draws(j).draft)
    )


def accept_a_little_too_often(drafted, draft_distributions, target_distribution, draws):
    return accept_sampled(
        drafted, draft_distributions, target_distribution, lambda j: draws(j)._replace(accept=draws(j).accept * 0.7)
    )


def take_drafts_for_certain(drafted, draft_distributions, target_distribution, draws):
    """Accepts with probability q(x), as if drafts were one-hot: wasteful and exact."""
    return accept_sampled(drafted, None, target_distribution, draws)


@pytest.mark.parametrize(
    ("rule", "failed"),
    [
        (accept_everything, {"acceptance"}),
        (resample_from_the_target, {"acceptance"}),
        (reuse_the_draft_number, {"acceptance"}),
        (accept_a_little_too_often, {"acceptance"}),
        (take_drafts_for_certain, set()),
    ],
)
def test_a_broken_acceptance_rule_fails_and_another_exact_one_passes(rule, failed):
    sizes = SIZES | {"num_samples": 1500}
    result = check_sampling(make_engine("random"), PROMPTS, accept=rule, settings=SETTINGS[1:2], **sizes)
    assert result.passed == (not failed)
    assert {test.kind for test in result.tests if not test.passed} == failed


def test_a_broken_rule_in_the_decoder_fails_the_generations_and_impossible_tokens_are_found(monkeypatch):
    monkeypatch.setitem(RULES, DEFAULT_RULE, accept_everything)
    result = check_sampling(make_engine("adversarial"), PROMPTS, settings=SETTINGS[1:3], **ENGINE)
    assert not result.passed
    assert {test.kind for test in result.tests if not test.passed} == {"engine"}
    assert sum(test.impossible for test in result.tests) > 0
    assert all(not test.passed for test in result.tests if test.impossible)


def test_the_result_depends_on_the_seed_only():
    options = {"settings": SETTINGS[1:2], "num_samples": 100, "num_runs": 100, "num_contexts": 1}
    first, again = (check_sampling(make_engine(), PROMPTS, **options) for _ in range(2))
    assert first == again
    assert check_sampling(make_engine(), PROMPTS, seed=10_000, **options) != first


def test_too_few_samples_or_no_prompts_are_refused():
    for prompts, sizes in ([], SIZES), (PROMPTS, SIZES | {"num_runs": 5}):
        with pytest.raises(InvalidRequestError):
            check_sampling(make_engine(), prompts, **sizes)


def test_the_tree_gives_the_logits_of_every_path():
    executor = make_executor()
    tree = LogitTree(executor, [1, 2, 3], vocab_size=20)
    for path in [(), (4,), (5, 6), (4,), (4, 9, 9)]:
        assert (tree(path) == executor.logits_after([1, 2, 3, *path])[:20]).all()
    assert len(executor.calls) == 5  # the context, and each of four paths once
    stands_in = LogitTree(executor, [1, 500])((400, 2))  # for ids that a draft with fewer embeddings lacks
    assert (stands_in == executor.logits_after([1, 0, 0, 2])).all()


def exact_tree(params):
    executor = make_executor()
    context = [1, 2]
    return make_conditional(LogitTree(executor, context), Sampler(params, context, VOCAB))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_cells_have_the_probability_of_their_outcomes(setting):
    target = exact_tree(setting.params)
    partition = Partition(target, 2, 500)
    masses = np.zeros(len(partition.probabilities))
    for a in range(VOCAB):
        for b in range(VOCAB):
            first = target(()).probability(a)
            probability = first * target((a,)).probability(b) if first else 0.0
            cell = partition.cell((a, b))
            if cell == IMPOSSIBLE:
                assert probability == 0.0
            else:
                masses[cell] += probability
    assert masses == pytest.approx(partition.probabilities)
    assert partition.probabilities.min() * 500 >= 10 * (1 - 1e-9)


def test_a_rest_without_mass_joins_another_cell():
    probs = np.array([0.7, 0.3 - 1e-20, 1e-20])
    partition = Partition(lambda path: HostDistribution(None, probs), 1, 100)
    assert len(partition.probabilities) == 2
    assert partition.cell((2,)) == partition.cell((1,))


def test_one_impossible_outcome_fails():
    partition = Partition(lambda path: HostDistribution(None, np.array([0.5, 0.5, 0.0])), 1, 100)
    right = [(0,), (1,)] * 500
    for outcomes, passed in ((right, True), ([*right, (2,)], False)):
        assert assess_outcomes("engine", "x", 0, partition, outcomes, 1, 1e-6).passed == passed


def test_outcomes_use_the_random_numbers_of_the_engine():
    """On the same seed the recorded draw and the engine give the same tokens after the prompt's first."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    engine = make_engine("same")
    tokens = engine.generate([[1, 2]], params, num_speculative_tokens=4)[0].token_ids
    target = exact_tree(params)
    # With the draft equal to the target every draft is accepted, so each token comes from its `draft` number.
    outcome = draw_outcome(target, target, RoundDraws(RandomStream(5)), accept_sampled, depth=3, lookahead=4)
    stream = RandomStream(5)
    expected = ()
    for position in range(3):
        expected += (sample_token(target(expected), stream.draws(position).draft),)
    assert outcome == expected
    assert tokens[0] == sample_token(target(()), stream.draws(0).resample)

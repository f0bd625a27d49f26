"""The sampling part: exact draws pass for any draft, and each way of getting acceptance wrong fails."""

import numpy as np
import pytest

from specexport.verify.logit_tree import IMPOSSIBLE, LogitTree, Partition, conditional
from specexport.verify.sampling import SETTINGS, accept_everything, check_sampling, draw_outcome
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.accept import Verdict, accept_sampled
from specexport_runtime.sampling.block import DEFAULT_RULE, RULES
from specexport_runtime.sampling.distribution import Distribution, sample_token
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.rng import RandomStream, RoundDraws
from specexport_runtime.sampling.sampler import Sampler
from specexport_runtime.sampling.tree import TREE_RULES
from tests.support.fakes.verify_fakes import PROMPTS, VOCAB, make_engine, make_executor

SIZES = {"num_samples": 1500, "num_runs": 200, "num_contexts": 2}
RECORDED = {"num_samples": 1500, "num_runs": 100, "num_contexts": 1}
ENGINE = {"num_samples": 100, "num_runs": 300, "num_contexts": 1}


@pytest.mark.parametrize("draft", ["same", "good", "random", "adversarial", None])
def test_exact_draws_pass_with_any_draft(draft):
    check_exact(make_engine(draft), draft)


@pytest.mark.parametrize("lookahead", [1, 2])
def test_exact_draws_pass_with_fewer_draft_tokens_than_an_outcome_has(lookahead):
    """Then a token that follows accepted drafts is a part of the outcome."""
    check_exact(make_engine("good", lookahead=lookahead), "good")


def tree_engine(draft):
    target = make_executor()
    target.takes_trees = True
    return make_engine(draft, target)


@pytest.mark.parametrize("draft", ["good", "random"])
def test_exact_draws_of_trees_pass(draft):
    engine = tree_engine(draft)
    result = check_sampling(engine, PROMPTS, **SIZES)
    assert result.passed, [test for test in result.tests if not test.passed]
    assert [test.setting for test in result.tests if test.kind == "trees"] == [SETTINGS[-1].name]
    assert result.alpha < check_sampling(make_engine(draft), PROMPTS, **SIZES).alpha, "one more test of the family"
    assert engine.times.moved > 0


def test_a_broken_rule_for_trees_fails_them_alone(monkeypatch):
    def take_the_chain(nodes, parents, laws, target_law, draws):
        place = max(i for i, parent in enumerate(parents) if parent == i - 1)
        return Verdict(place + 1, sample_token(target_law(place), draws(place + 1).resample), is_bonus=True)

    monkeypatch.setitem(TREE_RULES, DEFAULT_RULE, take_the_chain)
    result = check_sampling(tree_engine("random"), PROMPTS, **ENGINE)
    assert {test.kind for test in result.tests if not test.passed} == {"trees"}


def check_exact(engine, draft):
    result = check_sampling(engine, PROMPTS, **SIZES)
    assert result.passed, [test for test in result.tests if not test.passed]
    assert result.has_power
    assert len(result.tests) == 3 * len(SETTINGS)
    assert result.min_p_value > result.alpha
    if draft == "same":
        assert result.control_p_value > result.alpha  # nothing to see: the draft is the target
    else:
        assert result.control_p_value < result.alpha


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


@pytest.mark.parametrize(
    "rule",
    [
        accept_everything,
        resample_from_the_target,
        reuse_the_draft_number,
        accept_a_little_too_often,
    ],
)
def test_a_broken_acceptance_rule_fails(rule):
    result = check_sampling(make_engine("random"), PROMPTS, accept=rule, **RECORDED)
    assert not result.passed
    assert {test.kind for test in result.tests if not test.passed} == {"acceptance"}


def test_another_exact_rule_passes():
    """Accepting with probability q(x), as if drafts were one-hot, is wasteful and exact."""

    def take_drafts_for_certain(drafted, draft_distributions, target_distribution, draws):
        return accept_sampled(drafted, None, target_distribution, draws)

    assert check_sampling(make_engine("random"), PROMPTS, accept=take_drafts_for_certain, **RECORDED).passed


def test_a_broken_rule_in_the_decoder_fails_the_generations(monkeypatch):
    monkeypatch.setitem(RULES, DEFAULT_RULE, accept_everything)
    result = check_sampling(make_engine("random"), PROMPTS, **ENGINE)
    assert not result.passed
    assert {test.kind for test in result.tests if not test.passed} == {"engine"}


def test_tokens_the_target_never_gives_are_found(monkeypatch):
    monkeypatch.setitem(RULES, DEFAULT_RULE, accept_everything)
    result = check_sampling(make_engine("adversarial"), PROMPTS, **ENGINE)
    assert sum(test.impossible for test in result.tests) > 0
    assert all(not test.passed for test in result.tests if test.impossible)


def test_the_result_depends_on_the_seed_only():
    first, again = (check_sampling(make_engine(), PROMPTS, **ENGINE) for _ in range(2))
    assert first == again
    assert check_sampling(make_engine(), PROMPTS, seed=10_000, **ENGINE) != first


def test_a_certain_target_has_no_power():
    engine = make_engine(target=make_executor(sharpness=2000.0))
    result = check_sampling(engine, PROMPTS, **RECORDED)
    assert not result.has_power
    assert result.control_p_value is None


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


def test_a_draft_with_fewer_embeddings_gets_a_stand_in():
    executor = make_executor()
    tree = LogitTree(executor, [1, 500])
    assert (tree((400, 2)) == executor.logits_after([1, 0, 0, 2])).all()


def exact_tree(params):
    executor = make_executor()
    context = [1, 2]
    return conditional(LogitTree(executor, context), Sampler(params, context, VOCAB))


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
    partition = Partition(lambda path: Distribution(None, probs), 1, 100)
    assert len(partition.probabilities) == 2
    assert partition.cell((2,)) == partition.cell((1,))


def test_outcomes_use_the_random_numbers_of_the_engine():
    """On the same seed the recorded draw and the engine give the same tokens after the prompt's first."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    engine = make_engine("same")
    tokens = engine.generate([[1, 2]], params, num_speculative_tokens=4)[0].token_ids
    target = exact_tree(params)
    # With the draft equal to the target every draft is accepted, so each token comes from its `draft` number.
    outcome = draw_outcome(
        target, target, RoundDraws(RandomStream(5), fresh=True), accept_sampled, depth=3, lookahead=4
    )
    stream = RandomStream(5)
    expected = ()
    for position in range(3):
        expected += (sample_token(target(expected), stream.draws(position).draft),)
    assert outcome == expected
    assert tokens[0] == sample_token(target(()), stream.draws(0).resample)

"""The threshold that ends drafts: how it moves, and where drafts of a model end under it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.heads_on_fakes import check_plain, make_sequences
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run

SURE, NEVER = DraftExitParams(gamma=1.0, epsilon=0.0), DraftExitParams(gamma=0.0, epsilon=0.0)


def test_the_threshold_moves_as_worked_by_hand():
    state = DraftExit(DraftExitParams(gamma=0.6, target_acceptance=0.8, epsilon=0.1, beta1=0.5, beta2=0.75))
    state.observe(1, rejected=True)  # rate 0.5: 0.5 * 0.8 + 0.5 * 0.5 = 0.65, below 0.8
    assert state.acceptance == pytest.approx(0.65)
    assert state.gamma == pytest.approx(0.75 * 0.6 + 0.25 * 0.7)  # 0.625
    state.observe(4, rejected=False)  # rate 1: 0.825, above
    assert state.acceptance == pytest.approx(0.825)
    assert state.gamma == pytest.approx(0.75 * 0.625 + 0.25 * 0.525)  # 0.6
    state.observe(0, rejected=True)  # rate 0: 0.4125
    assert state.acceptance == pytest.approx(0.4125)
    assert state.gamma == pytest.approx(0.625)
    state.observe(0, rejected=False)  # a round without tests
    assert (state.gamma, state.acceptance) == (pytest.approx(0.625), pytest.approx(0.4125))


@given(
    st.builds(
        DraftExitParams,
        gamma=st.floats(0, 1),
        target_acceptance=st.floats(0.01, 1),
        epsilon=st.floats(0, 1),
        beta1=st.floats(0, 0.99),
        beta2=st.floats(0, 0.99),
    ),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=30),
)
def test_threshold_and_rate_stay_probabilities(params, rounds):
    state = DraftExit(params)
    for accepted, rejected in rounds:
        before = state.gamma
        state.observe(accepted, rejected)
        assert 0 <= state.gamma <= 1
        assert 0 <= state.acceptance <= 1
        assert abs(state.gamma - before) <= params.epsilon * (1 - params.beta2) + 1e-12
        if accepted + rejected and state.acceptance > params.target_acceptance:
            assert state.gamma <= before + 1e-12
        elif accepted + rejected:
            assert state.gamma >= before - 1e-12


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("gamma", -0.1, "[0, 1]"),
        ("gamma", math.nan, "[0, 1]"),
        ("gamma", "low", "[0, 1]"),
        ("gamma", True, "[0, 1]"),
        ("target_acceptance", 0, "(0, 1]"),
        ("target_acceptance", 1.5, "(0, 1]"),
        ("epsilon", math.inf, "[0, 1]"),
        ("beta1", 1, "[0, 1)"),
        ("beta2", 1.0, "[0, 1)"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value, hint):
    with pytest.raises(InvalidRequestError, match=f"{name} is ") as refusal:
        DraftExitParams(**{name: value})
    assert hint in refusal.value.hint


def propose(executor, sequences, limits):
    """What a draft model proposes for sequences that have one generated token each."""
    drafter = ModelDrafter(ModelRunner(executor), vocab_size=VOCAB, max_backlog=20)
    for row, seq in enumerate(sequences):
        seq.row = row
        if not seq.num_generated:
            seq.commit([4])
    return drafter.propose(sequences, limits)


def likeliest(executor, seq, drafted, temperature=1.0):
    logits = executor.logits_after(seq.tokens + drafted).astype(np.float64) / temperature
    probs = np.exp(logits - logits.max())
    return float(probs.max() / probs.sum())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("gamma", [0.4, 0.5, 0.6])
def test_a_draft_ends_behind_the_first_step_that_is_not_sure(gamma, temperature):
    ends = set()
    for first in range(VOCAB):
        executor = make_draft("random")
        params = SamplingParams(max_tokens=40, temperature=temperature)
        seq = make_sequence(0, [first, 2], params, seed=first, draft_exit=DraftExit(DraftExitParams(gamma=gamma)))
        plain = make_sequence(0, [first, 2], params, seed=first)
        [proposal], [whole] = propose(executor, [seq], [6]), propose(executor, [plain], [6])
        tops = [likeliest(executor, seq, whole.tokens[:j], temperature or 1.0) for j in range(6)]
        unsure = [j for j in range(5) if tops[j] < gamma]  # behind the sixth there is nothing to leave out
        expected = unsure[0] + 1 if unsure else 6
        assert proposal.tokens == whole.tokens[:expected]
        assert proposal.end == ("exit" if unsure else "lookahead")
        assert (whole.end, proposal.drafter) == ("lookahead", "draft-model")
        if temperature:
            assert len(proposal.distributions) == expected
        ends.add(expected)
    assert len(ends) > 1


def test_extremes():
    for params, limit, drafted, end in (
        (SURE, 6, 1, "exit"), (NEVER, 6, 6, "lookahead"), (SURE, 1, 1, "lookahead"), (SURE, 0, 0, "none")
    ):  # fmt: skip
        seq = make_sequence(0, [1, 2], SamplingParams(max_tokens=40), draft_exit=DraftExit(params))
        [found] = propose(make_draft("good"), [seq], [limit])
        assert (len(found.tokens), found.end, found.drafter) == (drafted, end, "draft-model" if drafted else "")


def test_only_what_may_end_asks_for_logits():
    executor, wanted = make_draft("good"), []
    execute = executor.execute
    executor.execute = lambda want="logits": (wanted.append(want), execute(want))[1]
    seq = make_sequence(0, [1], SamplingParams(max_tokens=40), draft_exit=DraftExit(NEVER))
    propose(executor, [seq], [3])
    assert wanted == ["logits", "logits", "token_ids"]
    wanted.clear()
    propose(executor, [make_sequence(0, [1], SamplingParams(max_tokens=40))], [3])
    assert wanted == ["token_ids"] * 3


@pytest.mark.parametrize(("gamma", "lookahead"), [(0.3, 8), (0.6, 3), (1.0, 1)])
def test_greedy_text_equals_plain_greedy(gamma, lookahead):
    target, exits = make_target(), DraftExitParams(gamma=gamma, epsilon=0.1)
    sequences = make_sequences(lambda i: 5 + 7 * i)
    for seq in sequences[1::2]:
        seq.draft_exit = DraftExit(exits)
    run(make_decoder(target, make_draft("good"), lookahead), sequences)
    check_plain(target, sequences)

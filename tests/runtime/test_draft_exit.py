"""The threshold that ends drafts: how it moves, and where drafts of a model end under it."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.drafters.draft_loop import Draft
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.logit_rows import NumpyRows
from specexport_runtime.executors.row_kernels import ask_whole_row
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.sampler import Sampler
from tests.support.fakes.heads_on_fakes import check_plain, make_sequences
from tests.support.fakes.loop import VOCAB, make_decoder, make_draft, make_sequence, make_target, run
from tests.support.fakes.requests import request_of
from tests.support.references.exact import P_VALUE, PROMPT, TARGET, joint, p_value

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
        DraftExitParams, gamma=st.floats(0, 1), target_acceptance=st.floats(0.01, 1), epsilon=st.floats(0, 1),
        beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99),
    ),
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=30),
)  # fmt: skip
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
        ("gamma", -0.1, "[0, 1]"), ("gamma", math.nan, "[0, 1]"), ("gamma", "low", "[0, 1]"), ("gamma", True, "[0, 1]"),
        ("target_acceptance", 0, "(0, 1]"), ("target_acceptance", 1.5, "(0, 1]"), ("epsilon", math.inf, "[0, 1]"),
        ("beta1", 1, "[0, 1)"), ("beta2", 1.0, "[0, 1)"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name, value, hint):
    with pytest.raises(InvalidRequestError, match=f"{name} is ") as refusal:
        DraftExitParams(**{name: value})
    assert hint in refusal.value.hint


def propose(executor, sequences, limits):
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
        unsure = [j for j in range(5) if tops[j] < gamma]  # after the sixth there is nothing to leave out
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


class Rules:
    def draft(self, seq, table, lookahead):
        draft = Draft(seq, lookahead)
        while draft.is_open:
            logits = table[(seq.tokens + draft.tokens)[-1]]
            draft.draw(NumpyRows(logits[None], [ask_whole_row(len(logits))])[0], len(logits))
        return draft

    def observe(self, state, drafted, accepted):
        state.observe(accepted, rejected=accepted < drafted)


class LeavesTokensOut(Rules):
    """A token that is not likely enough itself is drawn, looked at, and left out."""

    def draft(self, seq, table, lookahead):
        draft = super().draft(seq, table, lookahead)
        for j, (token, distribution) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
            if distribution.probability(token) < seq.draft_exit.gamma:
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
    seq = request_of(
        0, PROMPT, params, vocab_size=len(TARGET), max_model_len=99, seed=seed, draft_exit=DraftExit(exits),
        acceptance=rule,
    )  # fmt: skip
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
    marginal = Counter()
    for tokens, value in counts.items():
        marginal[tokens[position]] += value
    return marginal


class TestAModelMadeToShowIt:
    """Tokens 2 … 5 are sure of what follows, 0 and 1 are not, and the draft is right but for the second position.

    The second draft token is nearly always rejected, for token 5. How many tokens were discarded after it tells
    whether the fourth was one of 2 … 5; a threshold that knows this decides by it whether the fourth position is tested
    next, which must not be with the very number that drew its draft token.
    """

    PARAMS = SamplingParams(temperature=1.0)
    EXITS = DraftExitParams(gamma=0.4, target_acceptance=0.18, epsilon=0.5, beta1=0.0, beta2=0.0)
    SURE, FLAT, FIVE = [0.1, 0.1, 0.56, 0.12, 0.07, 0.05], [1 / 6] * 6, [0.01] * 5 + [0.95]
    TABLE = np.log(np.array([FLAT, FLAT, SURE, SURE, SURE, SURE])).astype(np.float32)

    def count(self, rules, rule):
        sampler = Sampler(self.PARAMS, PROMPT, len(TARGET))
        rows = [sampler.distribution(row) for row in self.TABLE]
        five = sampler.distribution(np.log(np.array(self.FIVE)).astype(np.float32))

        def target(done):
            return five if len(done) == 1 else rows[(*PROMPT, *done)[-1]]

        options = (self.PARAMS, rules, self.EXITS, self.TABLE, target, 8, 4, rule)
        return Counter(emit(seed, *options) for seed in range(2000)), joint(target, 4)

    @pytest.mark.parametrize("rules", [Rules, CountsDiscarded])
    @pytest.mark.parametrize("rule", RULES)
    def test_what_discarded_tokens_tell_may_decide_about_the_next_draft(self, rules, rule):
        counts, exact = self.count(rules(), rule)
        assert p_value(counts, exact) > P_VALUE
        assert all(p_value(at(counts, i), at(exact, i)) > P_VALUE for i in range(4))

    def test_leaving_a_token_out_after_looking_at_it_is_noticed(self):
        counts, exact = self.count(LeavesTokensOut(), "block")
        assert p_value(at(counts, 0), at(exact, 0)) < P_VALUE

"""What a grammar forces begins drafts, goes on in them and after them: on fakes, with every way to draft."""

import numpy as np
import pytest

from specexport_runtime.drafters.base import Drafter
from specexport_runtime.requests.records import DrafterTraits, DraftStage, Proposal, Share
from specexport_runtime.requests.results import make_chunk
from specexport_runtime.sampling.distribution import HostDistribution
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.forced import DECODERS, PROMPTS, ROOM, Steps, model_decoder, plain_texts, sequences_with
from tests.support.fakes.goodput_fakes import curves
from tests.support.fakes.loop import goodput_length, make_decoder, make_sequence, make_target, run
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import least_p_value

NOISES = {"good": 0.4, "random": 30.0}


@pytest.mark.parametrize(("lookahead", "noise"), [(1, "good"), (3, "random"), (8, "good")])
@pytest.mark.parametrize("drafter", DECODERS)
def test_greedy_text_is_that_of_plain_decoding(drafter, noise, lookahead):
    decoder = DECODERS[drafter](lookahead, NOISES[noise])
    sequences = sequences_with(lambda i: SamplingParams(max_tokens=24 + i))
    events = run(decoder, sequences)
    for seq, text in zip(sequences, plain_texts(PROMPTS, 27, make_target()), strict=True):
        assert seq.output == text[: seq.max_tokens]
        names = set(seq.stats.drafters)
        assert "forced" in names
        assert sum(each.drafted for each in seq.stats.drafters.values()) == seq.stats.drafted
        assert sum(each.accepted for each in seq.stats.drafters.values()) == seq.stats.accepted
    begun = [event.proposal for event in events if event.proposal.forced[:1] == (0,)]
    assert begun
    for event in events:  # what begins a draft is sure
        places = event.proposal.forced
        sure = sum(place == j for j, place in enumerate(places))
        assert event.accepted >= min(sure, len(event.tokens))
        assert event.drafted <= ROOM
    if drafter not in ("lookup", "self"):  # after what begins them, guesses
        assert any(proposal.num_own for proposal in begun) == (lookahead > 1 or drafter in ("draft-model", "chained"))


def test_forced_tokens_cost_no_step_of_a_draft_model_and_none_of_its_lookahead():
    """A perfect draft: two guesses, and all that is forced before, between and after them."""
    decoder = model_decoder(2, 0.0, 1)
    (seq,) = sequences_with(lambda _: SamplingParams(max_tokens=49), PROMPTS[:1])
    events = run(decoder, [seq])
    own = sum(event.proposal.num_own for event in events)
    forced = sum(len(event.proposal.forced) for event in events)
    assert seq.stats.accepted == seq.stats.drafted == own + forced
    assert forced > own > 0
    draft_steps = [call for call in decoder.draft_model.runner.executor.calls if call.num_logit_rows]
    assert len(draft_steps) == own
    # Of 6 tokens 3 are forced: two guesses with what is forced between and around them, and the target's own token.
    assert seq.stats.num_generated_tokens / seq.stats.rounds > 4.5


class Liar(Drafter):
    """A user's drafter, which knows of no grammar."""

    traits = DrafterTraits(default_lookahead=4)
    asked = 0

    def propose(self, sequences, lookaheads):
        self.asked += sum(limit > 0 for limit in lookaheads)
        return [Proposal([16] * limit) for limit in lookaheads]


def test_who_is_refused_by_the_grammar_makes_way_for_the_next():
    target = make_target(1)
    decoder = model_decoder(3, 0.4, 1, target=target)
    liar = decoder.drafter.drafters["liar"] = Liar()
    decoder.plan = (DraftStage("liar", 3), *decoder.plan)
    (seq,) = sequences_with(lambda _: SamplingParams(max_tokens=40), PROMPTS[:1])
    run(decoder, [seq])
    assert seq.output == plain_texts(PROMPTS[:1], 40, target)[0]
    assert 0 < liar.asked < seq.stats.rounds  # not where tokens are forced
    assert seq.stats.drafters["draft-model"].accepted > 0
    assert "liar" not in seq.stats.drafters


class Own(Drafter):
    """A user's drafter, which samples and knows of no grammar; half of what it draws at a beginning is refused."""

    traits = DrafterTraits(default_lookahead=2)
    distribution = HostDistribution(None, np.r_[np.full(5, 0.01), 0.45, np.full(11, 0.5 / 11)])

    def propose(self, sequences, lookaheads):
        pairs = zip(sequences, lookaheads, strict=True)
        drawn = [[self.distribution.draw(seq.draws(j).draft) for j in range(k)] for seq, k in pairs]
        return [Proposal(tokens, [self.distribution] * len(tokens)) for tokens in drawn]


def test_who_samples_and_knows_of_no_grammar_leaves_the_distribution_as_it_is():
    """A refused token is tested: the residual knows that it was drawn."""
    target, prompt, params = make_target(4), [2, 4], SamplingParams(max_tokens=4, temperature=4.0)
    decoder = make_decoder(target, None, 0)
    decoder.drafter.drafters["own"] = Own()
    decoder.plan = (DraftStage("own", 2),)
    sequences = sequences_with(lambda _: params, [prompt] * 800)
    for number, seq in enumerate(sequences):
        seq.acceptance = ("block", "token")[number % 2]
    events = run(decoder, sequences)
    assert any(0 < event.accepted < event.drafted for event in events)
    assert least_p_value(target, sequences, 3, Steps) > P_VALUE


@pytest.mark.parametrize(("noise", "rows", "lookahead"), [("good", 1, 1), ("random", 4, 3), ("good", 4, 8)])
def test_sampled_text_follows_the_masked_distribution(noise, rows, lookahead):
    assert sample(noise, rows, lookahead, 400) > P_VALUE


def test_guesses_that_are_taken_as_if_they_were_forced_are_noticed(monkeypatch):
    from specexport_runtime.decoding import decoder as module

    accept = module.accept

    def credulous(seq, proposal, rows):
        sure = [
            None if place in proposal.forced else HostDistribution(np.array([token]), np.array([1e-9]))
            for place, token in enumerate(proposal.tokens)
        ]
        return accept(seq, proposal._replace(distributions=sure), rows)

    monkeypatch.setattr(module, "accept", credulous)
    assert sample("random", 4, 3, 300) < P_VALUE


LENGTH = 6


def sample(noise, rows, lookahead, samples):
    """p-value of texts of one prompt, some of them beside longer ones of others, so that batches are ragged."""
    target = make_target(rows)
    decoder = model_decoder(lookahead, NOISES[noise], rows, target=target)
    others = [[5, 6, 7, 8, 9, 1, 2]] if rows > 1 else []
    prompts = [prompt for _ in range(samples) for prompt in ([2, 4], *others)]
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0)
    sequences = sequences_with(lambda _: params, prompts)
    events = run(decoder, sequences)
    assert any(event.proposal.forced and event.proposal.num_own for event in events)
    return least_p_value(target, [seq for seq in sequences if seq.num_prompt_tokens == 2], LENGTH, Steps)


def adaptive(noise, **cost):
    target = make_target(2)
    decoder = model_decoder(4, noise, 2, target=target)
    decoder.lengths = decoder.drafter.lengths = goodput_length(curves(**cost), ROOM)
    return decoder, target


def test_forced_tokens_are_drafted_where_nothing_else_pays():
    """In plain spells too: there is nothing to weigh."""
    decoder, target = adaptive(30.0, draft=3.0)
    sequences = sequences_with(lambda _: SamplingParams(max_tokens=54), PROMPTS[:2], adaptive=True)
    run(decoder, sequences)
    for seq, text in zip(sequences, plain_texts(PROMPTS[:2], 54, target), strict=True):
        assert seq.output == text
        assert set(seq.stats.drafters) == {"forced"}
        assert seq.stats.accepted == seq.stats.drafted > 20
        assert seq.stats.rounds < 0.65 * 54


def test_what_is_learned_of_texts_with_a_grammar_or_by_another_rule_is_kept_apart():
    decoder, _ = adaptive(30.0, draft=0.01)
    sequences = sequences_with(lambda _: SamplingParams(max_tokens=50), PROMPTS[:2], adaptive=True)
    run(decoder, sequences)
    memory = decoder.lengths._drafters
    assert set(memory) == {"draft-model/True/block"}
    assert not memory["draft-model/True/block"].is_unknown
    for rule in ("block", "token"):
        free = make_sequence(5, [1, 2], SamplingParams(max_tokens=30), adaptive=True, acceptance=rule)
        run(decoder, [free])
        assert free.stats.drafted
        assert f"draft-model/False/{rule}" in memory
    assert len({id(each.shared) for each in memory.values()}) == len(memory) == 3


def test_acceptance_is_learned_from_guesses_alone():
    """Of a draft with a forced token in the middle: two guesses, the second failed."""
    proposal = Proposal([4, 5, 6, 7], None, forced=(1, 3), drafter="draft-model")
    assert [proposal.count_own_tests(accepted) for accepted in range(5)] == [
        (0, True),
        (1, False),  # the forced token failed, which tells nothing of the drafter
        (1, True),
        (2, False),
        (2, False),
    ]
    assert proposal.shares(2, 2) == [Share("draft-model", 2, 1), Share("forced", 2, 1)]
    assert proposal.shares(0, 0) == [Share("draft-model", 2, 0), Share("forced", 2, 0)]
    assert (proposal.num_own, proposal.last_own) == (2, 2)
    assert Proposal([], None).shares(0, 0) == []


def test_pieces_and_traces_say_what_was_forced():
    decoder = model_decoder(3, 0.4, 1)
    (seq,) = sequences_with(lambda _: SamplingParams(max_tokens=40), PROMPTS[:1], trace=True)
    seq._pieces = []
    events = run(decoder, [seq])
    event = next(event for event in events if 0 < event.proposal.num_forced(event.accepted) < event.accepted)
    seq._pieces = [("", 0)] * 40
    pieces = make_chunk(event).pieces
    names = ["forced" if j in event.proposal.forced else "draft-model" for j in range(event.accepted)]
    assert [piece.drafter for piece in pieces] == [*names, ""]
    assert [each.forced for each in seq.trace] == [event.proposal.forced for event in events]
    assert sum(each.own[1] for each in seq.trace) == seq.stats.drafters["draft-model"].accepted

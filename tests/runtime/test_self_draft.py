"""Drafting with the target's own layers, on fakes: any layers, any neighbours, and nothing left behind."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.abi import kv_slack
from specexport_runtime.costs.curves import CostCurves, LayerShares, StepCost
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.self_draft import SelfDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExit, DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.drafter_kinds import LAYERS, chosen, gated, self_decoder
from tests.support.fakes.heads_on_fakes import PROMPTS, check_plain, make_sequences
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, fail_at, finish, make_sequence, make_target, run
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import LENGTH, SMALL, least_p_value, make_requests, small_model


@examples(25)
@given(
    masks=st.lists(st.integers(0, 2 ** (2 * LAYERS) - 1), min_size=6, max_size=6), lookahead=st.integers(1, 8),
    rows=st.integers(1, 4), max_chunk=st.integers(1, 10), unpad_input=st.booleans(), lookup=st.booleans(),
    gammas=st.lists(st.none() | st.floats(0.2, 1.0), min_size=6, max_size=6),
)  # fmt: skip
def test_greedy_text_equals_plain_greedy_for_any_layers_and_any_neighbours(
    masks, lookahead, rows, max_chunk, unpad_input, lookup, gammas
):
    target = gated(1.0, rows)
    sequences = [
        make_sequence(
            i,
            prompt,
            SamplingParams(max_tokens=4 + 5 * i),
            draft_exit=None if gamma is None else DraftExit(DraftExitParams(gamma=gamma)),
        )
        for i, (prompt, gamma) in enumerate(zip(PROMPTS, gammas, strict=True))
    ]
    decoder = self_decoder(target, lookahead, lookup=lookup, max_chunk=max_chunk, unpad_input=unpad_input)
    for seq, bits in zip(sequences, masks, strict=True):
        decoder.drafter.drafters["self"].choose(seq, chosen(bits))
    run(decoder, sequences)
    check_plain(target, sequences)
    for seq, bits in zip(sequences, masks, strict=True):
        assert seq.stats.layer_choice == chosen(bits)  # once a prompt
        if not lookup:
            assert bool(seq.stats.drafted) == (0 < bits < 2 ** (2 * LAYERS) - 1)


def test_sequences_with_different_layers_are_drafted_apart_and_as_alone():
    params = SamplingParams(max_tokens=25, temperature=0.8, top_k=12)
    bits = [0b11, 0b11 << 4, 0b11, 0b1]

    def make(decoder, i):
        seq = make_sequence(i, PROMPTS[i], params, seed=i + 5)
        decoder.drafter.drafters["self"].choose(seq, chosen(4095 ^ bits[i]))
        return seq

    target = gated()
    decoder = self_decoder(target, 4)
    together = [make(decoder, i) for i in range(4)]
    run(decoder, together)
    for i, seq in enumerate(together):
        decoder = self_decoder(gated(), 4)
        alone = make(decoder, i)
        run(decoder, [alone])
        assert seq.output == alone.output
        assert seq.stats.accepted == alone.stats.accepted > 0
    drafts = [(shape.first_row, shape.num_seqs, mask) for shape, mask in zip(target.calls, target.masks, strict=True)]
    masks = [tuple(chosen(4095 ^ b).mask.tolist()) for b in bits]
    # Rows 0 and 2 share a step, in which row 1 sits idle; each other choice has steps of its own.
    assert {(0, 3, masks[0]), (1, 1, masks[1]), (3, 1, masks[3])} <= set(drafts)
    assert {mask for _, _, mask in drafts} == {None, *masks}


@pytest.mark.parametrize("lookahead", [1, 8])
def test_drafts_near_the_models_length_fit_the_cache(lookahead):
    for length in (MAX_MODEL_LEN - 1, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 9):
        target = FakeExecutor(VOCAB, 2, MAX_MODEL_LEN + kv_slack(lookahead), num_gates=2 * LAYERS, gate_noise=0.0)
        sequences = make_sequences(lambda _: 50, [[i] * length for i in range(2)])
        run(self_decoder(target, lookahead), sequences)
        assert all(len(seq.tokens) == MAX_MODEL_LEN for seq in sequences)
        check_plain(target, sequences)


def test_a_draft_leaves_the_targets_bookkeeping_and_layers_as_they_were():
    decoder = self_decoder(gated(), 4)
    sequences = make_sequences(lambda _: 30, PROMPTS[:3])
    for seq in sequences:
        decoder.add(seq)
    decoder.step()
    decoder.step()
    kv = decoder.target.kv
    before = [kv.kv_len(row) for row in range(4)]
    assert [len(seq.tokens) - 1 for seq in sequences] == before[:3]
    proposals = decoder.drafter.propose(sequences, [4, 4, 4])
    assert [len(proposal.tokens) for proposal in proposals] == [4, 4, 4]
    assert {(proposal.end, proposal.drafter) for proposal in proposals} == {("lookahead", "self")}
    assert [kv.kv_len(row) for row in range(4)] == before
    again = decoder.drafter.propose(sequences, [4, 2, 0])
    assert [proposal.tokens for proposal in again] == [proposals[0].tokens, proposals[1].tokens[:2], []]
    assert (again[2].end, again[2].drafter) == ("none", "")


def test_everything_is_given_back_when_an_exception_flies():
    target = gated()
    decoder = self_decoder(target, 4)
    sequences = make_sequences(lambda _: 30, PROMPTS[:3])
    for seq in sequences:
        decoder.add(seq)
    decoder.step()
    before = [decoder.target.kv.kv_len(row) for row in range(4)]
    execute = target.execute
    fail_at(target, 3)
    with pytest.raises(RuntimeError, match="went away"):
        decoder.step()
    target.execute = execute
    assert [decoder.target.kv.kv_len(row) for row in range(4)] == before
    assert target._mask is None
    finish(decoder, [])  # nothing of the failed draft is in the way
    check_plain(target, sequences)


@pytest.mark.parametrize("max_chunk", [1, 3, 7, 512])
def test_layers_are_chosen_by_the_average_over_the_prompt_however_it_was_cut(max_chunk):
    prompts = [[(5 * i) % VOCAB for i in range(n)] for n in (13, 1, 20, 5)]
    rules = LayerRules(threshold=0.97)
    sequences = [make_sequence(i, p, SamplingParams(max_tokens=6), layer_rules=rules) for i, p in enumerate(prompts)]
    target = gated()
    run(self_decoder(target, 3, max_chunk=max_chunk, max_num_batched_tokens=16, lookup=True), sequences)
    check_plain(target, sequences)
    for seq, prompt in zip(sequences, prompts, strict=True):
        expected = target.compute_similarity(prompt).astype(np.float64).mean(axis=1)
        assert seq.stats.layer_choice.acs == tuple(expected)  # to the last bit
        above = tuple(i for i in range(LAYERS) if expected[i] > 0.97)
        assert set(above[:-2]) <= set(seq.stats.layer_choice.removed_attention) | {LAYERS - 2, LAYERS - 1}
        assert seq.stats.layer_choice.removed_mlp == (2,)
    assert len({seq.stats.layer_choice.removed_attention for seq in sequences}) > 1


def test_similarity_is_measured_for_prompts_that_need_it_and_in_no_other_step():
    target, wanted = gated(), []
    execute = target.execute
    target.execute = lambda want="logits": (wanted.append(target._wants_similarity), execute(want))[1]
    for needed, options in (
        (3, {}),
        (3, {"draft_plan": (DraftStage("lookup", 3), DraftStage("self", 3))}),
        (0, {"layer_rules": LayerRules(threshold=None)}),
        (0, {"draft_plan": (DraftStage("lookup", 3),)}),
    ):
        wanted.clear()
        seq = make_sequence(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=9), **options)
        run(self_decoder(target, 3, max_chunk=2), [seq])
        assert wanted[:needed] == [True] * needed
        assert not any(wanted[needed:])
        check_plain(target, [seq])
        found = seq.stats.layer_choice
        if "layer_rules" in options:
            assert (found.removed_attention, found.removed_mlp, found.acs) == ((2,), (2,), ())


def test_a_choice_that_removes_nothing_drafts_nothing_and_is_there_to_see():
    target = gated()
    rules = LayerRules(threshold=1.0, period=None)
    seq = make_sequence(0, [3, 4], SamplingParams(max_tokens=20), layer_rules=rules)
    run(self_decoder(target, 3), [seq])
    check_plain(target, [seq])
    assert seq.stats.drafted == 0
    assert seq.stats.layer_choice.removed_attention == seq.stats.layer_choice.removed_mlp == ()
    assert len(seq.stats.layer_choice.acs) == LAYERS
    assert target.masks == [None] * len(target.masks)


def test_time_of_draft_steps_is_the_drafters_and_not_counted_twice():
    target = gated()
    execute = target.execute

    def takes_a_second(want="logits"):
        before = target.engine_seconds
        output = execute(want)
        target.engine_seconds = before + 1.0
        return output

    target.execute = takes_a_second
    decoder = self_decoder(target, 3)
    run(decoder, make_sequences(lambda _: 12))
    drafts = sum(mask is not None for mask in target.masks)
    assert decoder.drafter.engine_seconds == drafts
    assert target.engine_seconds == len(target.masks) - drafts
    assert decoder.times.verify <= len(target.masks) - drafts
    assert decoder.times.engine <= len(target.masks)
    assert decoder.times.engine == decoder.times.verify + drafts


def test_a_prompt_that_nobody_measured_is_named():
    decoder = self_decoder(gated(), 3)
    seq = make_sequence(0, [1, 2, 3], SamplingParams(max_tokens=9), draft_plan=(DraftStage("self", 3),))
    decoder.drafter.wants_similarity = lambda sequence: False
    decoder.add(seq)
    decoder.step()
    with pytest.raises(SpecexportError, match="no similarity was measured"):
        decoder.step()


def test_engines_without_gates_and_caches_with_padding_are_refused():
    with pytest.raises(SpecexportError, match="gates"):
        SelfDrafter(ModelRunner(make_target()), vocab_size=VOCAB)
    with pytest.raises(SpecexportError, match="padding"):
        SelfDrafter(ModelRunner(gated(), unpad_kv=False), vocab_size=VOCAB)


def test_layers_that_no_prompt_changes_are_priced_before_the_first_draft():
    drafter = SelfDrafter(ModelRunner(gated()), vocab_size=VOCAB)
    rules = LayerRules(None, None, None, skip_mixers=(0, 2), skip_mlps=(1,))
    seq = make_sequence(0, [1, 2], SamplingParams(max_tokens=9), layer_rules=rules)
    assert drafter.find_choice(seq).removed_attention == (0, 2)
    assert seq.stats.layer_choice is None, "nothing was drafted yet"
    curves = CostCurves(StepCost(1.0, 0.0), shares=LayerShares(LAYERS, 0.1, 0.2))
    assert drafter.cost(curves).seconds([seq], 1, 0) == pytest.approx(1 - 2 * 0.1 - 0.2)
    assert drafter.find_choice(make_sequence(1, [1, 2], SamplingParams(max_tokens=9))) is None


def test_sampled_text_follows_the_targets_distribution():
    target = small_model(num_gates=8, gate_noise=1.5)
    runner = ModelRunner(target, max_chunk=2)
    decoder = Decoder(runner, ChainDrafter({"self": SelfDrafter(runner, vocab_size=SMALL)}))
    exits = DraftExitParams(gamma=0.4, target_acceptance=0.6, epsilon=0.3, beta1=0.2, beta2=0.2)
    requests = make_requests(
        800, SamplingParams(max_tokens=LENGTH + 1, temperature=0.9, frequency_penalty=0.4),
        draft_plan=(DraftStage("self", 4),), draft_exit=lambda i: DraftExit(exits),
        layer_rules=LayerRules(threshold=0.97, keep_last=1),
    )  # fmt: skip
    finish(decoder, requests)
    assert sum(seq.stats.accepted for seq in requests) > len(requests)
    assert sum(seq.stats.drafted - seq.stats.accepted for seq in requests) > 100
    assert len({seq.stats.layer_choice.mask.tobytes() for seq in requests}) > 1
    assert least_p_value(target, requests) > P_VALUE


def test_entries_written_with_other_layers_are_noticed():
    target = gated()
    runner = ModelRunner(target)
    runner.prefill(0, [1, 2, 3])
    target.set_layers(chosen(4094).mask)
    runner.prefill(0, [4])
    target.set_layers(None)
    with pytest.raises(SpecexportError, match="written with other parts on"):
        runner.prefill(0, [5])

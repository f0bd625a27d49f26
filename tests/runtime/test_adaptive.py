"""Adaptive lengths, self-drafting, draft exits and traces through the whole engine, on fakes."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime import SamplingParams
from specexport_runtime.costs.curves import CostCurves, LayerShares
from specexport_runtime.costs.learned import LearnedCosts
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.drafters.suffix import SuffixDrafter
from specexport_runtime.drafters.suffix_store import SuffixStore
from specexport_runtime.engine_parts import find_self_draft_obstacle
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.intake.drafting import DraftDefaults
from specexport_runtime.lookahead import rules
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.draft_exit import DraftExitParams
from specexport_runtime.requests.layer_choice import LayerRules
from specexport_runtime.requests.records import DraftStage
from tests.support.cases.chance import examples
from tests.support.cases.entries import make_entry
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.goodput_fakes import GATES, LOOKAHEAD, curves, gated_curves, make_decoder
from tests.support.fakes.heads_on_fakes import check_plain, make_sequences
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, finish, goodput_length
from tests.support.references.exact import P_VALUE
from tests.support.references.exact_texts import LENGTH, SMALL, least_p_value, make_requests, small_model

RULES = LayerRules(threshold=0.97)
NAMES = [(), ("lookup",), ("draft-model",), ("self",), ("lookup", "draft-model"), ("lookup", "self")]


@examples(25)
@given(
    plans=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), min_size=1, max_size=7),
    rows=st.integers(1, 4),
    budget=st.integers(8, 60),
    noise=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_greedy_text_is_plain_greedy_text_whatever_is_chosen(plans, rows, budget, noise):
    target = FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 20, context=2, num_gates=GATES, gate_noise=noise)
    draft = FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 20, context=2, noise=noise)
    sequences = make_sequences(lambda i: 8 + 5 * i, [[(5 * i + j) % VOCAB for j in range(1 + 4 * i)] for i in range(7)])
    for seq, (names, adaptive) in zip(sequences, plans, strict=False):
        seq.draft_plan, seq.adaptive = [DraftStage(name, LOOKAHEAD) for name in names], adaptive
        seq.layer_rules, seq.trace = RULES, []
    sequences = sequences[: len(plans)]
    finish(make_decoder(target, draft, rows, max_num_batched_tokens=budget), sequences)
    check_plain(target, sequences)
    for seq in sequences:
        assert [token for each in seq.trace for token in each.emitted] == seq.output
        assert sum(len(each.drafted) for each in seq.trace) == seq.stats.drafted


@pytest.mark.parametrize("names", [("lookup", "draft-model"), ("lookup", "self")], ids="-".join)
def test_sampled_text_follows_the_targets_distribution(names, monkeypatch):
    """Lengths depend on what was tested, of all sequences: that must not show in the text of any."""
    monkeypatch.setattr(rules, "_WORTH_READING", -1.0)  # texts are too short for probes
    target, draft = small_model(num_gates=GATES, gate_noise=0.1), small_model(noise=1.0)
    requests = make_requests(
        800, SamplingParams(max_tokens=LENGTH + 2, temperature=0.9, frequency_penalty=0.4), adaptive=True,
        draft_plan=[DraftStage(name, LOOKAHEAD) for name in names], trace=True,
        layer_rules=LayerRules(threshold=0.01),  # a third of the layers is left
        acceptance=lambda i: ("block", "token")[i // 2 % 2],
    )  # fmt: skip
    # Drafting costs so little that it pays after a bad start too: these texts are too short for a second try.
    cheap = curves(0.02)
    costs = CostCurves(cheap.target, cheap.drafters, LayerShares(GATES // 2, 0.166, 0.0003))
    finish(make_decoder(target, draft, 8, cost_curves=costs), requests)
    assert len({len(each.drafted) for req in requests for each in req.trace}) > 2, "it did choose"
    assert least_p_value(target, requests) > P_VALUE


# ---- the engine ----


def make_engine(*, draft=True, gated=True, adaptive=True, **options):
    return engine_of(
        FakeExecutor(VOCAB, 4, 90, context=3, num_gates=GATES if gated else 0, gate_noise=0.3),
        make_tokenizer(),
        draft=FakeExecutor(VOCAB, 4, 90, context=3, noise=0.4) if draft else None,
        max_model_len=MAX_MODEL_LEN,
        cost_curves=gated_curves() if adaptive else None,
        **options,
    )


LONG = SamplingParams(max_tokens=40)


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "self", "chained"])
def test_every_drafter_and_length_gives_the_same_text(drafter):
    engine = make_engine()
    plain = engine.generate("w1 w2", LONG, speculation=False)[0]
    assert plain.trace is None
    options = {"drafter": drafter, "layer_rules": None, "draft_exit": False, "trace": True}
    for lookahead in (None, 2, "auto"):
        result = engine.generate("w1 w2", LONG, num_speculative_tokens=lookahead, **options)[0]
        assert result.token_ids == plain.token_ids
        reasons = {stage.reason for each in result.trace for stage in each.asked}
        assert reasons <= ({"goodput", "bypass", "probe", "room"} if lookahead == "auto" else {"fixed", "room"})
        if lookahead == 2 and drafter != "chained":
            assert max(len(each.drafted) for each in result.trace) == 2


def test_self_drafting_shows_its_layers_and_its_exits():
    engine = make_engine()
    options = {"drafter": "self", "layer_rules": LayerRules(threshold=None, period=2, keep_last=0)}
    result = engine.generate(
        "w1 w2 w3", LONG, **options, draft_exit=DraftExitParams(gamma=0.9, epsilon=0.0), trace=True
    )[0]
    stats = result.stats.to_json()
    assert stats["layer_choice"]["removed_mlp"] == [1, 3, 5]
    assert stats["draft_exits"] == sum(each.end == "exit" for each in result.trace) > 0
    assert {each.gamma for each in result.trace} == {0.9}
    without = engine.generate("w1 w2 w3", LONG, **options)[0].stats.to_json()
    assert without["draft_exits"] == 0


@pytest.mark.parametrize(("noise", "pays"), [(0.0, True), (6.0, False)])
def test_auto_leaves_the_kept_layers_where_they_lose(noise, pays):
    target = FakeExecutor(VOCAB, 4, 900, context=3, num_gates=GATES, gate_noise=noise)
    kept = LayerRules(None, None, None, skip_mixers=(0, 1, 2, 4), skip_mlps=(3,))
    engine = engine_of(
        target, make_tokenizer(), max_model_len=850, cost_curves=gated_curves(),
        draft_defaults=DraftDefaults(layer_rules=kept),
    )  # fmt: skip
    # A stream of one word each repeats itself soon; suffix copies what self would draft, so that it is asked by name.
    options = {"drafter": "self", "num_speculative_tokens": "auto", "trace": True}
    (result,) = engine.generate([[1, 2]], SamplingParams(max_tokens=800, ignore_eos=True), **options)
    drafted = sum(bool(each.drafted) for each in result.trace) / len(result.trace)
    assert drafted > 0.9 if pays else drafted < 0.1
    assert result.stats.layer_choice.removed_mlp == (3,)


def test_chained_uses_the_own_layers_where_there_is_no_draft_model():
    result = make_engine(draft=False).generate("w1 w2", LONG, drafter="chained", trace=True, layer_rules=RULES)[0]
    drafters = {each.drafter for each in result.trace}
    assert {"lookup", "self"} <= drafters
    for each in result.trace:
        assert [stage.drafter for stage in each.asked] in ([], ["lookup"], ["lookup", "self"])


def test_a_copy_does_not_move_the_threshold_of_a_model():
    """Copies pass or fail for reasons of their own."""
    engine = make_engine(draft=False)
    options = {"drafter": "chained", "draft_exit": DraftExitParams(gamma=0.5, epsilon=0.2, beta2=0.0)}
    trace = engine.generate("w1 w2 w1 w2 w1", LONG, **options, trace=True)[0].trace
    moved = [before.drafter for before, after in itertools.pairwise(trace) if before.gamma != after.gamma]
    assert moved
    assert set(moved) == {"self"}


def test_a_trace_says_what_happened_and_what_it_saved():
    engine = make_engine()
    chunks = list(engine.stream("w1 w2", LONG, num_speculative_tokens="auto", trace=True))
    trace = [chunk.trace for chunk in chunks]
    for chunk, each in zip(chunks, trace, strict=True):
        assert list(each.emitted) == [piece.token_id for piece in chunk.pieces]
        assert each.accepted <= len(each.drafted) <= (each.allowed.lookahead if each.allowed else 0)
        assert each.milliseconds > 0
        plain = engine.cost_curves.target.seconds(1, 1) * 1000 * len(each.emitted)
        assert each.plain_milliseconds == pytest.approx(plain, rel=0.01)
        assert each.saved_milliseconds == each.plain_milliseconds - each.milliseconds
    assert [each.round for each in trace] == list(range(trace[0].round, trace[0].round + len(trace)))
    assert trace[0].prompt_tokens == 1  # two tokens of a prompt, one of which any round has
    assert all(each.prompt_tokens == 0 for each in trace[1:])
    parsed = json.loads(json.dumps([each.to_json() for each in trace]))
    assert parsed[-1]["asked"][-1]["drafter"] == "draft-model"
    assert "accepted" in "\n".join(each.describe() for each in trace)
    assert next(iter(engine.stream("w1", LONG))).trace is None


# ---- refusals ----


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ({"gated": False}, {"drafter": "self"}, "layers can be switched off"),
        ({"unpad_input": False}, {"drafter": "self"}, "unpadded KV"),
        ({"adaptive": False}, {"num_speculative_tokens": "auto"}, "adaptive=False"),
        ({}, {"drafter": "self", "num_speculative_tokens": 9}, "1 to 8"),
        ({}, {"drafter": "lookup", "num_speculative_tokens": 9}, "1 to 8"),
        ({}, {"num_speculative_tokens": 3, "speculation": False}, "speculation is off"),
        ({}, {"drafter": "none", "num_speculative_tokens": 2}, "drop one"),
        ({}, {"drafter": "lookup", "draft_exit": True}, "draft exit ends drafts of models"),
        ({}, {"drafter": "self", "layer_rules": LayerRules(keep_last=6)}, "none may be removed"),
        ({"draft": False, "gated": False}, {"drafter": "chained"}, "no draft model"),
        ({}, {"acceptance": ["block"]}, "choose one of block, token"),
    ],
)
def test_what_cannot_be_done_is_refused(engine, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        make_engine(**engine).generate("w1", LONG, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"obstacle": "the blocks run side by side"}, "the blocks run side by side"),
        ({"backend": "tensorrt"}, "needs backend ort-cpu, ort-cuda; this target was built for tensorrt"),
        ({}, "without layers that can be left out. Fix: build it again with --self-draft"),
    ],
)
def test_the_obstacle_of_a_bundles_target_is_named(changes, words):
    obstacle = find_self_draft_obstacle(ModelRunner(FakeExecutor(VOCAB, 1, 9)), make_entry(**changes))
    with pytest.raises(InvalidRequestError, match=words):
        make_engine(gated=False, self_obstacle=obstacle).generate("w1", LONG, drafter="self")
    assert find_self_draft_obstacle(ModelRunner(FakeExecutor(VOCAB, 1, 9, num_gates=4))) is None


def test_measuring_similarity_ends_with_the_step_even_if_that_fails():
    engine = make_engine()
    target, wanted = engine.target, []
    measure, execute = target.measure_similarity, target.execute
    target.measure_similarity = lambda flag: (wanted.append(flag), measure(flag))[1]

    def broken(*args):
        raise RuntimeError("device lost")

    target.execute = broken
    with pytest.raises(Exception, match="device lost"):
        engine.generate("w1 w2", LONG, drafter="self")
    target.execute = execute
    engine.generate("w1 w2", LONG, drafter="self")
    engine.generate("w1 w2", LONG, drafter="draft-model")
    assert wanted == [True, False, True, False]
    assert np.isfinite(engine.generate("w1 w2", LONG, drafter="self")[0].stats.layer_choice.acs).all()


def test_auto_with_its_memory_and_learned_costs_follows_the_targets_distribution():
    """All of the default at once: copies of what was sampled before, a draft model, costs learned from times."""
    target = small_model()
    drafters = {
        "suffix": SuffixDrafter(SuffixStore(1 << 16), match_length=1),
        "draft-model": ModelDrafter(ModelRunner(small_model(noise=1.0)), vocab_size=SMALL, max_backlog=9),
    }
    learned = LearnedCosts()
    lengths = goodput_length(curves(0.02), LOOKAHEAD, learned=learned, **drafters)
    runner = ModelRunner(target, max_chunk=7)
    decoder = Decoder(runner, ChainDrafter(drafters, lengths), lengths=lengths, max_num_seqs=8)
    options = {"draft_plan": [DraftStage(name, LOOKAHEAD) for name in drafters], "adaptive": True, "scope": ""}
    sampled = make_requests(
        800, SamplingParams(max_tokens=LENGTH + 2, temperature=0.8), **options,
        acceptance=lambda i: ("block", "token")[i // 2 % 2],
    )  # fmt: skip
    greedy = make_requests(20, SamplingParams(max_tokens=20), **options)
    for number, last in enumerate(greedy):  # it ends alone
        finish(decoder, [*sampled[40 * number : 40 * number + 40], last])
    used = Counter()
    for seq in sampled:
        used.update({name: counts.drafted for name, counts in seq.stats.drafters.items()})
    assert min(used["suffix"], used["draft-model"]) > 90
    assert learned.version  # fakes take other times than the curves say
    assert least_p_value(target, sampled) > P_VALUE

"""Drafting with a head, on fakes whose features hold the tokens that they are of: a wrong feature is a wrong guess."""

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import MaskInput
from specexport_runtime.drafters.head import HeadDrafter
from specexport_runtime.drafters.head_kind import head_obstacle
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.fakes.drafter_kinds import head_decoder
from tests.support.fakes.heads_on_fakes import (
    PROMPTS,
    check_plain,
    make_sequences,
    totals,
)
from tests.support.fakes.loop import VOCAB, make_sequence, make_target, run


def test_features_are_asked_for_only_where_a_head_may_draft():
    decoder, target, _ = head_decoder(3)
    wanted = []
    want = target.want_features
    target.want_features = lambda on: (wanted.append(on), want(on))
    plain = make_sequence(0, [1, 2, 3], SamplingParams(max_tokens=6), draft_plan=(DraftStage("lookup", 3),))
    run(decoder, [plain])
    assert True not in wanted
    run(decoder, [make_sequence(1, [1, 2, 3], SamplingParams(max_tokens=6))])
    assert wanted[0] is True
    assert wanted[-1] is False


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_parallel_head_drafts_all_tokens_in_one_step(rows, temperature):
    decoder, target, drafter = head_decoder(5, 0.0, rows)
    mask = MaskInput(9, np.full(drafter.runner.executor.feature_size, -1, np.float32))
    parallel = decoder.drafter.drafters["head"] = HeadDrafter(drafter.runner, vocab_size=VOCAB, mask=mask)
    params = SamplingParams(max_tokens=24, temperature=temperature)
    sequences = [make_sequence(i, prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    events = run(decoder, sequences)
    if not temperature:
        check_plain(target, sequences)
        # The first guess sees true features and is right; those behind the mask are a fixed function of it.
        assert all(event.accepted for event in events if event.drafted and len(event.tokens) > 1)
    drafting = [event for event in events if event.drafted]
    assert max(event.drafted for event in drafting) == 5
    assert totals(sequences)[1] >= len(drafting) / 2
    steps = [shape for shape in drafter.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert steps, "several places of a row get logits"
    assert len(drafter.runner.executor.calls) <= len(decoder.target.executor.calls)
    assert not parallel.runner.kv.num_committed


def test_why_a_head_cannot_draft_is_said():
    target = make_target(gives_features=True)
    assert head_obstacle(ModelRunner(target), has_head=True) is None
    assert "no draft head" in head_obstacle(ModelRunner(target), has_head=False).message
    assert "gives features" in head_obstacle(ModelRunner(make_target()), has_head=True).message
    assert "unpadded" in head_obstacle(ModelRunner(target, unpad_input=False), has_head=True).message
    with pytest.raises(SpecexportError, match="needs the engine of a draft head"):
        HeadDrafter(ModelRunner(target), vocab_size=VOCAB)


@pytest.mark.parametrize("fixed", [24, 40])
def test_no_step_of_a_parallel_head_is_wider_than_its_engine_takes(fixed):
    """Rows that all have much to read, and stand-ins behind it: an engine with fixed sizes takes so many tokens."""
    decoder, target, drafter = head_decoder(5, 0.0, 4)
    executor = drafter.runner.executor
    executor.max_num_tokens = fixed
    mask = MaskInput(9, np.full(executor.feature_size, -1, np.float32))
    parallel = decoder.drafter.drafters["head"] = HeadDrafter(ModelRunner(executor), vocab_size=VOCAB, mask=mask)
    sequences = make_sequences(lambda i: 12 + i, [[3, 4, 5] * 2, [1] * 6, [16] * 6, [7, 0] * 3])
    run(decoder, sequences)
    check_plain(target, sequences)
    assert totals(sequences)[0] > 0
    widest = max(shape.num_tokens for shape in executor.calls)
    assert fixed / 2 < widest <= fixed
    assert not parallel.runner.kv.num_committed

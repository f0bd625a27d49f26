"""Drafting with heads, on fakes whose features hold the tokens that they are of: a wrong feature is a wrong guess."""

from pathlib import Path

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import MaskInput, load_mask
from specexport_runtime.drafters.base import DrafterParts
from specexport_runtime.drafters.head import HeadDrafter, HydraDrafter
from specexport_runtime.drafters.head_kind import KIND, head_obstacle
from specexport_runtime.drafters.last_feature import AssistantDrafter, MedusaDrafter
from specexport_runtime.errors import BundleError, SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.packing.kv import BorrowedKv, KvArena
from specexport_runtime.requests.records import DraftStage
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.entries import changed, make_entry
from tests.support.fakes import drafter_kinds
from tests.support.fakes.heads_on_fakes import PROMPTS, check_plain, make_sequences, totals
from tests.support.fakes.loop import CAPACITY, VOCAB, make_sequence, make_target, run


def test_features_are_asked_for_only_where_a_head_may_draft():
    decoder, target, _ = drafter_kinds.head_decoder(3)
    wanted = []
    want = target.want_features
    target.want_features = lambda on: (wanted.append(on), want(on))
    plain = make_sequence(0, [1, 2, 3], SamplingParams(max_tokens=6), draft_plan=(DraftStage("lookup", 3),))
    run(decoder, [plain])
    assert True not in wanted
    run(decoder, [make_sequence(1, [1, 2, 3], SamplingParams(max_tokens=6))])
    assert wanted[0] is True
    assert wanted[-1] is False


def parallel_head(decoder, drafter):
    executor = drafter.runner.executor
    mask = MaskInput(9, np.full(executor.feature_size, -1, np.float32))
    made = decoder.drafter.drafters["head"] = HeadDrafter(ModelRunner(executor), vocab_size=VOCAB, mask=mask)
    return made


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (4, 0.0), (4, 0.8)])
def test_a_parallel_head_drafts_all_tokens_in_one_step(rows, temperature):
    decoder, target, drafter = drafter_kinds.head_decoder(5, 0.0, rows)
    parallel = parallel_head(decoder, drafter)
    params = SamplingParams(max_tokens=24, temperature=temperature)
    sequences = [make_sequence(i, prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    events = run(decoder, sequences)
    if not temperature:
        check_plain(target, sequences)
        # The first guess sees true features and is right; those after the mask are a fixed function of it.
        assert all(event.accepted for event in events if event.drafted and len(event.tokens) > 1)
    drafting = [event for event in events if event.drafted]
    assert max(event.drafted for event in drafting) == 5
    assert totals(sequences)[1] >= len(drafting) / 2
    steps = [shape for shape in parallel.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert steps, "several places of a row get logits"
    assert len(parallel.runner.executor.calls) <= len(target.calls)
    assert not parallel.runner.kv.num_committed


@pytest.mark.parametrize("fixed", [24, 40])
def test_no_step_of_a_parallel_head_is_wider_than_its_engine_takes(fixed):
    """Rows that all have much to read, and stand-ins after it: an engine with fixed sizes takes so many tokens."""
    decoder, target, drafter = drafter_kinds.head_decoder(5, 0.0, 4)
    drafter.runner.executor.max_num_tokens = fixed
    parallel = parallel_head(decoder, drafter)
    sequences = make_sequences(lambda i: 12 + i, [[3, 4, 5] * 2, [1] * 6, [16] * 6, [7, 0] * 3])
    run(decoder, sequences)
    check_plain(target, sequences)
    assert totals(sequences)[0] > 0
    widest = max(shape.num_tokens for shape in parallel.runner.executor.calls)
    assert fixed / 2 < widest <= fixed
    assert not parallel.runner.kv.num_committed


def test_one_step_of_a_head_that_fills_blocks_a_round():
    decoder, target, drafter = drafter_kinds.block_decoder(5, 0.0)
    run(decoder, make_sequences(lambda _: 24, PROMPTS[:4]))
    assert len(drafter.runner.executor.calls) <= len(target.calls)
    wide = [shape for shape in drafter.runner.executor.calls if shape.num_logit_rows > shape.num_seqs]
    assert wide, "several places of a row get logits"
    assert all(shape.num_tokens >= shape.num_logit_rows + 2 for shape in wide), "context, the newest token, and masks"


def test_what_a_manifest_says_of_a_block():
    entry = make_entry(vocab_size=VOCAB, feature_size=6, kind="dflash", mask_token_id=4, block_size=8)
    found = load_mask(Path("b"), entry)
    assert (found.token, found.block_size, found.most, found.feature.tolist()) == (4, 8, 7, [0.0] * 6)
    assert load_mask(Path("b"), changed(entry, mask_token_id=None)) is None
    for wrong in ({"block_size": None}, {"mask_token_id": entry.vocab_size}):
        with pytest.raises(BundleError, match="stands for unknown ones"):
            load_mask(Path("b"), changed(entry, **wrong))


def test_a_hydra_head_that_is_fed_another_draft_guesses_worse(monkeypatch):
    rates, pending = [], HydraDrafter._pending

    def alone(self, draft):  # as if each head read the newest token alone
        work = pending(self, draft)
        return work._replace(tokens=[work.tokens[0]] * len(work.tokens)) if draft.tokens else work

    for method in (pending, alone):
        monkeypatch.setattr(HydraDrafter, "_pending", method)
        decoder, target, _ = drafter_kinds.hydra_decoder()
        sequences = make_sequences(lambda _: 30)
        run(decoder, sequences)
        check_plain(target, sequences)
        drafted, accepted = totals(sequences)
        rates.append(accepted / drafted)
    assert rates[0] == 1.0
    assert rates[1] < 0.7


def test_why_a_head_cannot_draft_is_said():
    target = make_target(gives_features=True)
    assert head_obstacle(ModelRunner(target), has_head=True) is None
    assert "no draft head" in head_obstacle(ModelRunner(target), has_head=False).message
    assert "gives features" in head_obstacle(ModelRunner(make_target()), has_head=True).message
    assert "unpadded" in head_obstacle(ModelRunner(target, unpad_input=False), has_head=True).message


@pytest.mark.parametrize(
    ("options", "kind", "most", "name"),
    [
        ({}, HeadDrafter, None, "a draft head"),
        ({"num_draft_heads": 1}, MedusaDrafter, 1, "Medusa heads"),
        (drafter_kinds.HYDRA_HEADS, HydraDrafter, drafter_kinds.HEADS, "Hydra heads"),
        ({"lender": True}, AssistantDrafter, None, "an assistant"),
    ],
)
def test_the_kind_of_an_engine_decides_who_drafts(options, kind, most, name):
    target = make_target()
    options = {"lender": target} if "lender" in options else options
    head = ModelRunner(FakeExecutor(VOCAB, 4, CAPACITY, reads_features=True, **options))
    drafter = KIND.make(DrafterParts(ModelRunner(target), None, VOCAB, 3, head=head))
    assert type(drafter) is kind
    if most is not None:
        assert drafter.traits.max_lookahead == drafter.traits.default_lookahead == most
    other = target if kind is HeadDrafter else FakeExecutor(VOCAB, 4, CAPACITY, reads_features=True)
    with pytest.raises(SpecexportError, match=f"needs the engine of {name}"):
        kind(ModelRunner(other), vocab_size=VOCAB)


def test_one_entry_too_many_of_an_assistant_is_refused():
    class Longer(BorrowedKv):
        def kv_len(self, row):
            return super().kv_len(row) + 1

    decoder, _, drafter = drafter_kinds.assistant_decoder(3)
    drafter.runner.kv = Longer(decoder.target.kv)
    with pytest.raises(SpecexportError, match="2 entries of a request of 2 tokens"):
        run(decoder, make_sequences(lambda _: 20, PROMPTS[:1]))


def test_borrowed_rows_are_as_long_as_the_lenders_and_never_grow():
    arena = KvArena(2, 10)
    borrowed = BorrowedKv(arena)
    arena.write(1, [4])
    arena.commit(1, 3)
    borrowed.write(0, [1, 1])
    borrowed.commit(1, 9)
    borrowed.move(1, 0)
    borrowed.release(1)
    assert (borrowed.kv_len(0), borrowed.kv_len(1), borrowed.entries(1), borrowed.num_committed) == (0, 3, 3, 0)
    assert arena.kv_len(1) == 3
    borrowed.check()

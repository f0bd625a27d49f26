"""The chain of drafters: who is asked, who wins, and a draft model that is asked only now and then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.base import Drafter
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.drafters.lookup import LookupDrafter
from specexport_runtime.drafters.model import ModelDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.records import DrafterTraits, DraftStage, Proposal
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.loop import VOCAB, greedy_reference, make_draft, make_sequence, make_target

LOOKUP, MODEL = DraftStage("lookup", 7), DraftStage("draft-model", 4)
PLANS = [(), (LOOKUP,), (MODEL,), (LOOKUP, MODEL), (MODEL, LOOKUP)]


class Recorder(Drafter):
    """Proposes ``token`` for sequences whose last token is in ``knows``; writes down every call."""

    traits = DrafterTraits(default_lookahead=4)
    engine_seconds = 0.0

    def __init__(self, token, knows=range(VOCAB), seconds=0.0):
        self.token, self.knows, self.engine_seconds = token, knows, seconds
        self.calls = []

    def propose(self, sequences, lookaheads):
        self.calls.append(("propose", [seq.index for seq in sequences], list(lookaheads)))
        return [
            Proposal([self.token] * limit if seq.tokens[-1] in self.knows else [])
            for seq, limit in zip(sequences, lookaheads, strict=True)
        ]

    def commit(self, sequences):
        self.calls.append(("commit", [seq.index for seq in sequences]))

    def move_row(self, source, destination):
        self.calls.append(("move_row", source, destination))

    def release_row(self, row):
        self.calls.append(("release_row", row))


def sequence(index, plan, prompt=(1, 2), **options):
    return make_sequence(index, list(prompt), SamplingParams(**{"max_tokens": 30, **options}), draft_plan=plan)


def ask(drafters, sequences, rooms):
    return [proposal.tokens for proposal in ChainDrafter(drafters).propose(sequences, rooms)]


def test_the_first_stage_that_finds_something_drafts():
    lookup, model = Recorder(8, knows=[2]), Recorder(9)
    sequences = [sequence(0, (LOOKUP, MODEL)), sequence(1, (LOOKUP, MODEL), [1, 5])]
    assert ask({"lookup": lookup, "draft-model": model}, sequences, [20, 20]) == [[8] * 7, [9] * 4]
    assert lookup.calls == [("propose", [0, 1], [7, 7])]
    assert model.calls == [("propose", [0, 1], [0, 4])]


def test_each_sequence_has_its_own_plan_and_one_call_serves_all_that_wait():
    lookup, model = Recorder(8, knows=[2]), Recorder(9)
    sequences = [sequence(i, plan, [1, 5]) for i, plan in enumerate(PLANS[:4])]
    assert ask({"lookup": lookup, "draft-model": model}, sequences, [20] * 4) == [[], [], [9] * 4, [9] * 4]
    assert lookup.calls == [("propose", [0, 1, 2, 3], [0, 7, 0, 7])]
    assert model.calls == [("propose", [0, 1, 2, 3], [0, 0, 4, 4])]


def test_plans_may_name_drafters_in_any_order():
    lookup, model = Recorder(8), Recorder(9, knows=[])
    sequences = [sequence(0, (LOOKUP, MODEL)), sequence(1, (MODEL, LOOKUP))]
    assert ask({"lookup": lookup, "draft-model": model}, sequences, [20, 20]) == [[8] * 7, [8] * 7]


def test_room_bounds_every_stage():
    lookup, model = Recorder(8, knows=[2]), Recorder(9)
    sequences = [sequence(i, (LOOKUP, MODEL), [1, last]) for i, last in enumerate([2, 5, 2])]
    assert ask({"lookup": lookup, "draft-model": model}, sequences, [3, 2, 0]) == [[8] * 3, [9] * 2, []]


def test_a_drafter_that_none_waits_for_is_not_called():
    lookup, model = Recorder(8), Recorder(9)
    drafters = {"lookup": lookup, "draft-model": model}
    assert ask(drafters, [sequence(0, (LOOKUP, MODEL))], [20]) == [[8] * 7]
    assert ask(drafters, [sequence(0, ())], [20]) == [[]]
    assert ask(drafters, [sequence(0, (MODEL,))], [0]) == [[]]
    assert ask(drafters, [sequence(0, (DraftStage("draft-model", 0),))], [9]) == [[]]
    assert len(lookup.calls) == 1
    assert model.calls == []


def test_no_drafters_is_plain_decoding():
    chain = ChainDrafter()
    assert chain.engine_seconds == 0
    assert [p.tokens for p in chain.propose([sequence(0, ())], [5])] == [[]]
    chain.commit([])
    chain.move_row(1, 0)
    chain.release_row(0)


def test_proposals_are_independent_lists():
    first, second = ChainDrafter().propose([sequence(0, ()), sequence(1, ())], [5, 5])
    assert first.tokens is not second.tokens


def test_an_unknown_drafter_is_an_error_that_names_it():
    with pytest.raises(SpecexportError, match="draft-model"):
        ask({"lookup": Recorder(8, knows=[])}, [sequence(0, (LOOKUP, MODEL))], [5])


def test_every_drafter_hears_of_commits_and_rows():
    drafters = {"a": Recorder(1, seconds=0.5), "b": Recorder(2, seconds=0.25)}
    chain = ChainDrafter(drafters)
    chain.commit([sequence(4, ())])
    chain.move_row(3, 1)
    chain.release_row(2)
    for drafter in drafters.values():
        assert drafter.calls == [("commit", [4]), ("move_row", 3, 1), ("release_row", 2)]
    assert chain.engine_seconds == 0.75


def model_drafter(rows, **options):
    return ModelDrafter(ModelRunner(make_draft("same", rows)), vocab_size=VOCAB, max_backlog=5, **options)


def place(seq, row):
    """Put a sequence into a row as if its prompt's last token were its first generated one."""
    seq.row, seq.num_prompt_tokens = row, len(seq.tokens) - 1
    return seq


def test_the_draft_model_serves_any_rows_and_leaves_the_others_alone():
    drafter = model_drafter(6)
    prompts = [[1, 2], [3], [4, 5, 6], [7, 8]]
    sequences = [
        place(sequence(i, (MODEL,), p), row) for i, (p, row) in enumerate(zip(prompts, [1, 2, 4, 5], strict=True))
    ]
    proposals = drafter.propose(sequences, [2, 0, 3, 0])
    target = make_target(1)
    assert [p.tokens for p in proposals] == [
        greedy_reference(target, [1, 2], 2),
        [],
        greedy_reference(target, [4, 5, 6], 3),
        [],
    ]
    # Rows 1 to 4 at first, then row 4 alone.
    calls = drafter.runner.executor.calls
    assert [(shape.first_row, shape.num_seqs, shape.num_tokens) for shape in calls] == [(1, 4, 5), (1, 4, 2), (4, 1, 1)]
    assert [drafter.runner.kv.kv_len(row) for row in range(6)] == [0, 3, 0, 0, 5, 0]


def test_the_draft_model_catches_up_after_rounds_without_it():
    drafter = model_drafter(2)
    target = make_target(1)
    fresh = sequence(0, (MODEL,), [1, 2, 3])
    fresh.row = 1
    assert drafter.propose([fresh], [2])[0].tokens == []  # a new prompt's first token does not wait for the draft
    seq = place(sequence(0, (MODEL,), [1, 2, 3]), 1)
    for added in (1, 4, 5, 6, 12):  # up to five tokens join the step, more are prefilled before it
        known = drafter.runner.kv.kv_len(1)
        before = len(drafter.runner.executor.calls)
        drafted = drafter.propose([seq], [2])[0].tokens
        assert drafted == greedy_reference(target, seq.tokens, 2)
        pending = len(seq.tokens) - known
        expected = [pending] if pending <= 5 else [pending - 1, 1]
        assert [shape.num_tokens for shape in drafter.runner.executor.calls[before:]] == [*expected, 1]
        seq.tokens += [(7 * added + j) % VOCAB for j in range(added)]  # none of which was drafted
        drafter.runner.kv.commit(1, known + pending)


def decode(target, draft, sequences, *, rows, chunk=512, budget=512, backlog=5):
    drafters = {"lookup": LookupDrafter()}
    if draft is not None:
        runner = ModelRunner(draft, max_chunk=chunk)
        drafters["draft-model"] = ModelDrafter(runner, vocab_size=VOCAB, max_backlog=backlog)
    decoder = Decoder(
        ModelRunner(target, max_chunk=chunk), ChainDrafter(drafters), max_num_seqs=rows, max_num_batched_tokens=budget
    )
    for seq in sequences:
        decoder.add(seq)
    while decoder.has_work:
        decoder.step()
        decoder.check()
        if draft is not None:
            runner.kv.check()
    assert draft is None or all(runner.kv.kv_len(row) == 0 for row in range(draft.num_rows))


@examples(60)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=7),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 9),
    budget=st.integers(1, 30),
    backlog=st.integers(1, 9),
    kind=st.sampled_from(["same", "good", "random", "adversarial"]),
    data=st.data(),
)
def test_any_mix_of_plans_decodes_as_if_alone(prompts, rows, chunk, budget, backlog, kind, data):
    sequences = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 25)))
        plan = data.draw(st.sampled_from(PLANS))
        reference = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))
        sequences.append(make_sequence(i, prompt, params, draft_plan=plan, reference=reference))
    target = make_target(rows, context=2)
    decode(target, make_draft(kind, rows), sequences, rows=rows, chunk=chunk, budget=budget, backlog=backlog)
    for seq, prompt in zip(sequences, prompts, strict=True):
        assert seq.output == greedy_reference(target, prompt, seq.params.max_tokens)
        assert seq.finish_reason == "length"


def test_chained_drafting_uses_both():
    """The target loops (lookup finds that), the draft model is right before it does."""
    target = make_target(1, context=2)
    results = {}
    for name, plan in {"plain": (), "lookup": (LOOKUP,), "model": (MODEL,), "chained": (LOOKUP, MODEL)}.items():
        seq = sequence(0, plan, [3], max_tokens=50)
        draft = make_draft("same", 1)
        draft._context = 2
        decode(target, draft, [seq], rows=1)
        results[name] = (seq.output, seq.stats.rounds, len(draft.calls))
    assert len({tuple(output) for output, _, _ in results.values()}) == 1
    rounds = {name: count for name, (_, count, _) in results.items()}
    assert rounds["chained"] < min(rounds["lookup"], rounds["model"])
    assert 0 < results["chained"][2] < results["model"][2]


def test_sampled_sequences_do_not_depend_on_the_batch_in_any_plan():
    def make(i, plan, seed):
        params = SamplingParams(max_tokens=25, temperature=0.7)
        return make_sequence(i, [5, 6], params, draft_plan=plan, seed=seed)

    for plan in PLANS:
        alone, shared = make(0, plan, 11), make(0, plan, 11)
        decode(make_target(1, context=1), make_draft("good", 1), [alone], rows=1)
        crowd = [make(i, PLANS[i % len(PLANS)], i) for i in range(1, 6)]
        decode(make_target(3, context=1), make_draft("good", 3), [*crowd[:3], shared, *crowd[3:]], rows=3)
        assert shared.output == alone.output

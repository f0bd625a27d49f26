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
from tests.support.fakes.heads_on_fakes import check_plain
from tests.support.fakes.loop import VOCAB, finish, greedy_reference, make_draft, make_sequence, make_target

LOOKUP, MODEL = DraftStage("lookup", 7), DraftStage("draft-model", 4)
PLANS = [(), (LOOKUP,), (MODEL,), (LOOKUP, MODEL), (MODEL, LOOKUP)]


class Recorder(Drafter):
    """Proposes ``token`` for sequences whose last token is in ``knows``; writes down every call."""

    traits = DrafterTraits(default_lookahead=4)
    engine_seconds = 0.0

    def __init__(self, token, knows=range(VOCAB), seconds=0.0):
        self.token, self.knows, self.engine_seconds = token, knows, seconds
        self.limits, self.calls = [], []

    def propose(self, sequences, lookaheads):
        self.limits.append(list(lookaheads))
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


def ask(rooms, *prompts_and_plans, lookup_knows=(2,), model_knows=range(VOCAB)):
    """What a lookup that says 8 and a model that says 9 draft, and how they were asked."""
    lookup, model = Recorder(8, lookup_knows), Recorder(9, model_knows)
    sequences = [sequence(i, plan, prompt) for i, (prompt, plan) in enumerate(prompts_and_plans)]
    found = ChainDrafter({"lookup": lookup, "draft-model": model}).propose(sequences, rooms)
    return [proposal.tokens for proposal in found], lookup.limits, model.limits


BOTH, KNOWN, UNKNOWN = (LOOKUP, MODEL), [1, 2], [1, 5]


@pytest.mark.parametrize(
    ("rooms", "asked", "options", "found"),
    [
        # The first stage that finds something drafts.
        ([20, 20], [(KNOWN, BOTH), (UNKNOWN, BOTH)], {}, ([[8] * 7, [9] * 4], [[7, 7]], [[0, 4]])),
        # Each sequence has its own plan, and one call serves all that wait.
        (
            [20] * 4,
            [(UNKNOWN, plan) for plan in PLANS[:4]],
            {},
            ([[], [], [9] * 4, [9] * 4], [[0, 7, 0, 7]], [[0, 0, 4, 4]]),
        ),
        # Plans may name drafters in any order.
        (
            [20, 20],
            [(KNOWN, BOTH), (KNOWN, BOTH[::-1])],
            {"model_knows": ()},
            ([[8] * 7, [8] * 7], [[7, 0], [0, 7]], [[0, 4]]),
        ),
        # Room bounds every stage.
        (
            [3, 2, 0],
            [(KNOWN, BOTH), (UNKNOWN, BOTH), (KNOWN, BOTH)],
            {},
            ([[8] * 3, [9] * 2, []], [[3, 2, 0]], [[0, 2, 0]]),
        ),
        # A drafter that none waits for is not called.
        ([20], [(KNOWN, BOTH)], {}, ([[8] * 7], [[7]], [])),
        ([20], [(KNOWN, ())], {}, ([[]], [], [])),
        ([0], [(KNOWN, (MODEL,))], {}, ([[]], [], [])),
        ([9], [(KNOWN, (DraftStage("draft-model", 0),))], {}, ([[]], [], [])),
    ],
)
def test_who_drafts_and_who_is_asked(rooms, asked, options, found):
    assert ask(rooms, *asked, **options) == found


def test_an_unknown_drafter_is_an_error_that_names_it():
    with pytest.raises(SpecexportError, match="draft-model"):
        ChainDrafter({"lookup": Recorder(8, knows=[])}).propose([sequence(0, (LOOKUP, MODEL))], [5])


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
    drafter, target, prompts = model_drafter(6), make_target(1), [[1, 2], [3], [4, 5, 6], [7, 8]]
    sequences = [place(sequence(i, (MODEL,), prompts[i]), row) for i, row in enumerate((1, 2, 4, 5))]
    limits = [2, 0, 3, 0]
    proposals = drafter.propose(sequences, limits)
    assert [p.tokens for p in proposals] == [
        greedy_reference(target, *each) for each in zip(prompts, limits, strict=True)
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
    runner = ModelRunner(draft, max_chunk=chunk)
    model = ModelDrafter(runner, vocab_size=VOCAB, max_backlog=backlog)
    drafters = {"lookup": LookupDrafter(), "draft-model": model}
    decoder = Decoder(
        ModelRunner(target, max_chunk=chunk), ChainDrafter(drafters), max_num_seqs=rows, max_num_batched_tokens=budget
    )
    finish(decoder, sequences)
    runner.kv.check()
    assert all(runner.kv.kv_len(row) == 0 for row in range(draft.num_rows))


@examples(60)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=7),
    rows=st.integers(1, 4), chunk=st.integers(1, 9), budget=st.integers(1, 30), backlog=st.integers(1, 9),
    kind=st.sampled_from(["same", "good", "random", "adversarial"]), data=st.data(),
)  # fmt: skip
def test_any_mix_of_plans_decodes_as_if_alone(prompts, rows, chunk, budget, backlog, kind, data):
    sequences = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 25)))
        plan = [DraftStage(each.drafter, data.draw(st.integers(1, 8))) for each in data.draw(st.sampled_from(PLANS))]
        reference = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))
        sequences.append(make_sequence(i, prompt, params, draft_plan=plan, reference=reference))
    target = make_target(rows, context=2)
    decode(target, make_draft(kind, rows), sequences, rows=rows, chunk=chunk, budget=budget, backlog=backlog)
    check_plain(target, sequences)
    assert {seq.finish_reason for seq in sequences} == {"length"}


def test_chained_drafting_uses_both():
    """The target loops (lookup finds that), the draft model is right before it does."""
    target, outputs, rounds, steps = make_target(1, context=2), set(), {}, {}
    for name, plan in {"plain": (), "lookup": (LOOKUP,), "model": (MODEL,), "chained": (LOOKUP, MODEL)}.items():
        seq, draft = sequence(0, plan, [3], max_tokens=50), make_draft("same", 1)
        draft._context = 2
        decode(target, draft, [seq], rows=1)
        outputs.add(tuple(seq.output))
        rounds[name], steps[name] = seq.stats.rounds, len(draft.calls)
    assert len(outputs) == 1
    assert rounds["chained"] < min(rounds["lookup"], rounds["model"])
    assert 0 < steps["chained"] < steps["model"]

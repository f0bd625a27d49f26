"""Who runs, where, and with how many tokens: admission, the token budget, rows taken over and closed up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.decoding.rows import Slots
from specexport_runtime.decoding.schedule import Scheduler
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.requests.request import NO_ROW
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.chance import examples
from tests.support.fakes.loop import make_decoder, make_sequence, make_target

SHORT = SamplingParams(max_tokens=3)


class Moves(ChainDrafter):
    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[int, int]] = []

    def move_row(self, source: int, destination: int) -> None:
        self.moves.append((source, destination))


class World:
    def __init__(self, num_rows: int, budget: int, max_chunk: int = 100) -> None:
        self.drafter = Moves()
        self.slots = Slots(ModelRunner(make_target(num_rows), max_chunk=max_chunk), self.drafter)
        self.scheduler = Scheduler(self.slots, max_num_batched_tokens=budget, min_prefill_tokens=4)

    def add(self, index: int, length: int):
        seq = make_sequence(index, [1] * length, SHORT)
        self.scheduler.waiting.append(seq)
        return seq

    def round(self, busy: int = 0) -> dict[int, int]:
        self.scheduler.admit_waiting(busy)
        chunks, kv = self.scheduler.share(busy), self.slots.target.kv
        for row, chunk in chunks.items():
            kv.write(row, [chunk])
            kv.commit(row, kv.kv_len(row) + chunk)
        for seq in self.slots.running:
            if not self.slots.num_unread(seq):
                seq.commit([2])
        return chunks


def test_sequences_are_admitted_in_order_while_rows_and_budget_last():
    world = World(3, 20)
    seqs = [world.add(i, 12) for i in range(5)]
    assert world.round() == {0: 12, 1: 8}
    assert [seq.row for seq in seqs] == [0, 1, NO_ROW, NO_ROW, NO_ROW]  # the third would have got no token
    assert world.round(busy=1) == {1: 4, 2: 12}
    assert seqs[3].row == NO_ROW  # no free row


def test_a_prompt_never_starves_behind_decoding_sequences():
    world = World(4, 10)
    seq = world.add(0, 13)
    assert world.round(busy=10) == {0: 4}
    assert world.round(busy=50) == {0: 4}
    assert world.round(busy=9) == {0: 4}
    assert world.round(busy=9) == {0: 1}
    assert seq.num_generated == 1


def test_a_waiting_sequence_takes_over_the_row_of_a_finished_one_without_any_move():
    world = World(3, 100)
    seqs = [world.add(i, 5) for i in range(4)]
    world.round()
    world.scheduler.retire(seqs[0])
    world.round()
    assert seqs[3].row == 0
    assert world.drafter.moves == []


def test_holes_that_nobody_takes_are_closed():
    world = World(5, 100)
    seqs = [world.add(i, 5) for i in range(5)]
    world.round()
    for i in (0, 2, 4):
        world.scheduler.retire(seqs[i])
    world.round()
    assert world.drafter.moves == [(3, 0)]
    assert [seq.index for seq in world.slots.placed] == [3, 1]
    assert [seqs[3].row, seqs[1].row] == [0, 1]


def test_one_row_gets_no_more_than_the_largest_chunk():
    world = World(2, 100, max_chunk=8)
    world.add(0, 30)
    world.add(1, 3)
    assert world.round() == {0: 8, 1: 3}


def test_check_finds_a_broken_state():
    world = World(2, 100)
    seq = world.add(0, 3)
    world.round()
    world.slots.check()
    world.slots.target.kv.restore(1, 1)
    with pytest.raises(SpecexportError, match="row 1 has no request but 1 committed entries"):
        world.slots.check()
    world.slots.target.kv.release(1)
    seq.row = 1
    with pytest.raises(SpecexportError, match="row 0 holds request 0"):
        world.slots.check()


def test_a_step_mixes_prompt_chunks_with_rounds_within_the_budget():
    target = make_target(3)
    decoder = make_decoder(target, None, 0, max_num_batched_tokens=24)
    decoder.add(make_sequence(0, [1, 2], SamplingParams(max_tokens=30)))
    decoder.step()
    for i in (1, 2):
        decoder.add(make_sequence(i, [3] * 20, SamplingParams(max_tokens=30)))
    before = len(target.calls)
    while any(not seq.num_generated for seq in decoder.running) or decoder.scheduler.waiting:
        decoder.step()
        decoder.check()
    sizes = [shape.num_tokens for shape in target.calls[before:]]
    assert sizes == [24, 19]  # one decodes, the oldest prompt, 3 of the next; then two decode, and its other 17


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_rows=st.integers(1, 4),
    budget=st.integers(1, 30),
    busy=st.integers(0, 40),
)
def test_everybody_gets_a_turn_in_order(lengths, num_rows, budget, busy):
    world = World(num_rows, budget)
    seqs = [world.add(i, length) for i, length in enumerate(lengths)]
    started = []
    for _ in range(sum(lengths) + len(lengths) + 1):
        chunks = world.round(busy)
        assert sum(chunks.values()) <= max(budget - busy, 4)
        started += [seq.index for seq in seqs if seq.row != NO_ROW and seq.index not in started]
        for seq in world.slots.running:
            if seq.num_generated:
                world.scheduler.retire(seq)
    assert not world.scheduler.has_work
    assert started == sorted(started)
    assert all(seq.num_generated == 1 for seq in seqs)

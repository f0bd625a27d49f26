"""Who runs, where, and with how many tokens: admission, the token budget, rows taken over and closed up."""

import pytest
from chance import examples
from hypothesis import given
from hypothesis import strategies as st
from loop import make_decoder, make_sequence, make_target

from specexport_runtime.decoding.scheduler import Scheduler
from specexport_runtime.errors import SpecexportError
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.sequence import NO_ROW

SHORT = SamplingParams(max_tokens=3)


class Rows:
    """A scheduler with the lengths that a target's cache would have."""

    def __init__(self, num_rows: int, budget: int) -> None:
        self.scheduler = Scheduler(num_rows, max_num_batched_tokens=budget, min_prefill_tokens=4)
        self.fed: dict[int, int] = {}
        self.moves: list[tuple[int, int]] = []

    def add(self, index: int, length: int):
        seq = make_sequence(index, [1] * length, SHORT)
        self.scheduler.waiting.append(seq)
        return seq

    def pending(self, seq) -> int:
        return len(seq.tokens) - self.fed.get(seq.index, 0)

    def round(self, busy: int = 0, max_chunk: int = 100) -> dict[int, int]:
        self.scheduler.place(busy, self.pending, lambda *rows: self.moves.append(rows))
        chunks = self.scheduler.share(busy, self.pending, max_chunk)
        for row, chunk in chunks.items():
            self.fed[self.scheduler.rows[row].index] = self.fed.get(self.scheduler.rows[row].index, 0) + chunk
        for seq in self.scheduler.running:
            if not self.pending(seq):
                seq.commit([2])
        return chunks


def test_sequences_are_admitted_in_order_while_rows_and_budget_last():
    rows = Rows(3, 20)
    seqs = [rows.add(i, 12) for i in range(5)]
    assert rows.round() == {0: 12, 1: 8}
    assert [seq.row for seq in seqs] == [0, 1, NO_ROW, NO_ROW, NO_ROW]  # the third would have got no token
    assert rows.round(busy=1) == {1: 4, 2: 12}
    assert seqs[3].row == NO_ROW  # no free row


def test_a_prompt_never_starves_behind_decoding_sequences():
    rows = Rows(4, 10)
    seq = rows.add(0, 13)
    assert rows.round(busy=10) == {0: 4}
    assert rows.round(busy=50) == {0: 4}
    assert rows.round(busy=9) == {0: 4}
    assert rows.round(busy=9) == {0: 1}
    assert seq.num_generated == 1


def test_a_waiting_sequence_takes_over_the_row_of_a_finished_one_without_any_move():
    rows = Rows(3, 100)
    seqs = [rows.add(i, 5) for i in range(4)]
    rows.round()
    rows.scheduler.retire(seqs[0])
    rows.round()
    assert seqs[3].row == 0
    assert rows.moves == []


def test_holes_that_nobody_takes_are_closed():
    rows = Rows(5, 100)
    seqs = [rows.add(i, 5) for i in range(5)]
    rows.round()
    for i in (0, 2, 4):
        rows.scheduler.retire(seqs[i])
    rows.round()
    assert rows.moves == [(3, 0)]
    assert [seq.index for seq in rows.scheduler.rows] == [3, 1]
    assert [seqs[3].row, seqs[1].row] == [0, 1]


def test_one_row_gets_no_more_than_the_largest_chunk():
    rows = Rows(2, 100)
    rows.add(0, 30)
    rows.add(1, 3)
    assert rows.round(max_chunk=8) == {0: 8, 1: 3}


def test_a_waiting_sequence_can_leave_the_queue():
    rows = Rows(1, 100)
    first, second = rows.add(0, 3), rows.add(1, 3)
    rows.round()
    rows.scheduler.retire(second)
    assert not rows.scheduler.waiting
    rows.scheduler.retire(first)
    assert not rows.scheduler.has_work


def test_check_finds_a_broken_state():
    rows = Rows(2, 100)
    seq = rows.add(0, 3)
    rows.round()
    rows.scheduler.check([3, 0])
    with pytest.raises(SpecexportError, match="no sequence"):
        rows.scheduler.check([3, 1])
    seq.row = 1
    with pytest.raises(SpecexportError, match="row 0 holds sequence 0"):
        rows.scheduler.check([3, 0])


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
    rows = Rows(num_rows, budget)
    seqs = [rows.add(i, length) for i, length in enumerate(lengths)]
    started = []
    for _ in range(sum(lengths) + len(lengths) + 1):
        chunks = rows.round(busy)
        assert sum(chunks.values()) <= max(budget - busy, 4)
        started += [seq.index for seq in seqs if seq.row != NO_ROW and seq.index not in started]
        for seq in rows.scheduler.running:
            if seq.num_generated:
                rows.scheduler.retire(seq)
    assert not rows.scheduler.has_work
    assert started == sorted(started)
    assert all(seq.num_generated == 1 for seq in seqs)

"""KV bookkeeping: commit, rollback and moves keep their invariants, and wrong use raises."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.kv import KvArena, PaddedKvArena


def test_overflow_and_commits_of_unwritten_entries_raise():
    arena = KvArena(1, 10)
    with pytest.raises(SpecexportError, match="holds 10"):
        arena.write(0, [11])
    arena.write(0, [3])
    with pytest.raises(SpecexportError, match="cannot commit 4"):
        arena.commit(0, 4)
    with pytest.raises(SpecexportError):
        arena.commit(0, -1)
    arena.commit(0, 2)
    with pytest.raises(SpecexportError, match="cannot commit 3"):  # rolled back entries are gone
        arena.commit(0, 3)


def test_check_finds_a_broken_state():
    arena = KvArena(1, 10)
    arena.check()
    arena._kv_lens[0] = 3
    with pytest.raises(SpecexportError):
        arena.check()


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls agrees with a model that keeps the entries themselves."""

    ROWS, CAPACITY = 3, 12
    make_arena = KvArena

    def __init__(self):
        super().__init__()
        self.arena = self.make_arena(self.ROWS, self.CAPACITY)
        self.committed = [[] for _ in range(self.ROWS)]
        self.written = [[] for _ in range(self.ROWS)]
        self.clock = 0

    @rule(row=st.integers(0, 2), count=st.integers(1, 6))
    def write(self, row, count):
        entries = list(range(self.clock, self.clock + count))
        self.clock += count
        if len(self.committed[row]) + count > self.CAPACITY:
            with pytest.raises(SpecexportError):
                self.arena.write(row, [count])
        else:
            self.arena.write(row, [count])
            self.written[row] = self.committed[row] + entries

    @rule(row=st.integers(0, 2), data=st.data())
    def commit(self, row, data):
        kv_len = data.draw(st.integers(0, len(self.written[row])))
        self.arena.commit(row, kv_len)
        self.committed[row] = self.written[row] = self.written[row][:kv_len]

    @rule(pair=st.permutations(range(3)))
    def move(self, pair):
        source, destination, _ = pair
        self.arena.move(source, destination)
        self.committed[destination] = self.written[destination] = self.committed[source]
        self.committed[source] = self.written[source] = []

    @precondition(lambda self: self.clock)
    @rule(row=st.integers(0, 2))
    def release(self, row):
        self.arena.release(row)
        self.committed[row] = self.written[row] = []

    @invariant()
    def agrees(self):
        self.arena.check()
        assert [self.arena.kv_len(row) for row in range(self.ROWS)] == [len(entries) for entries in self.committed]


TestArena = ArenaMachine.TestCase


class PaddedArenaMachine(ArenaMachine):
    """The same rules hold with padding between the entries; rows grow together and padding can be squeezed out."""

    make_arena = PaddedKvArena

    @rule(row=st.integers(0, 2), count=st.integers(1, 6))
    def write(self, row, count):
        if not self.arena.fits(row, [count]):
            self.arena.squeeze(row)
        super().write(row, count)

    @rule(first=st.integers(0, 1), count=st.integers(1, 2))
    def align(self, first, count):
        self.arena.align(first, count)
        for row in range(first, first + count):
            self.written[row] = self.committed[row]
        assert len({self.arena.entries(row) for row in range(first, first + count)}) == 1

    @invariant()
    def positions_count_up(self):
        for row in range(self.ROWS):
            held = self.arena.kv_positions[row, : self.arena.entries(row)]
            assert held[held >= 0].tolist() == list(range(self.arena.kv_len(row)))


TestPaddedArena = PaddedArenaMachine.TestCase

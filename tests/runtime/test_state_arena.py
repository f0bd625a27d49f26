"""What steps do with states: drafts stay out of them, and draft steps of the target itself let nothing in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime.abi import kv_slack, num_pending
from specexport_runtime.errors import SpecexportError
from specexport_runtime.packing.kv import StateArena
from tests.support.cases.chance import examples

K = 4


def arena(*, drafts_itself: bool = True) -> StateArena:
    """Two rows, of which the first has read nine tokens and has three drafts that were accepted."""
    kv = StateArena(2, 200, num_pending(K, drafts_itself=drafts_itself))
    feed(kv, 0, 8, 0, 8)
    feed(kv, 0, 1 + K, K, 4)
    return kv


def feed(kv: StateArena, row: int, count: int, drafts: int | None, kept: int) -> list[int]:
    """A step of ``count`` tokens, of which ``kept`` are committed; returns what the row's state does in it."""
    steps = kv.step(row, [(count, drafts)])
    kv.write(row, [count])
    kv.commit(row, kv.kv_len(row) + kept)
    kv.check()
    return steps[0].tolist()


def test_a_draft_step_lets_nothing_in_and_the_verify_step_settles_what_was_accepted() -> None:
    kv = arena()
    assert (kv.kv_len(0), kv.state_len(0)) == (12, 9)
    found = [feed(kv, 0, 1, None, 1) for _ in range(K)]
    assert found == [[0, 3 + j, 0, 1] for j in range(K)]
    assert (kv.kv_len(0), kv.state_len(0)) == (16, 9)
    kv.commit(0, 12)  # the draft is rolled back
    assert feed(kv, 0, 1 + K, K, 1) == [3, 0, 1, K]
    assert (kv.kv_len(0), kv.state_len(0)) == (13, 13)
    assert feed(kv, 0, 3, None, 3) == [0, 0, 0, 3]  # a grammar had forced two more
    assert kv.step(0, [(0, None), (0, 0)]).tolist() == [[0] * 4] * 2  # an idle row


def test_a_draft_that_settles_could_not_be_rolled_back() -> None:
    kv = arena()
    assert feed(kv, 0, 1, 0, 1) == [3, 0, 1, 0]
    with pytest.raises(SpecexportError, match="cannot go back to 12 tokens, its state has more"):
        kv.commit(0, 12)


def test_a_target_that_drafts_itself_has_room_for_a_draft_behind_all_that_was_accepted() -> None:
    assert num_pending(K, drafts_itself=False) == kv_slack(K) == K + 1
    assert num_pending(K, drafts_itself=True) == 2 * K + 1
    kv = arena(drafts_itself=False)
    for _ in range(2):
        feed(kv, 0, 1, None, 1)
    with pytest.raises(SpecexportError, match="would leave 6 drafts, and 5 can wait"):
        kv.step(0, [(1, None)])


@examples(50)
@given(rounds=st.lists(st.tuples(st.integers(0, K), st.integers(0, K), st.integers(0, K)), max_size=12))
def test_any_rounds_fit_and_the_state_never_passes_what_is_committed(rounds: list[tuple[int, int, int]]) -> None:
    """Rounds of draft steps, drafts that are tested, and how many of them are accepted."""
    kv = arena()
    for fed, drafts, accepted in rounds:
        known, at = kv.kv_len(0), kv.state_len(0)
        for j in range(fed):
            assert feed(kv, 0, 1, None, 1) == [0, known - at + j, 0, 1]
        kv.commit(0, known)
        assert feed(kv, 0, 1 + drafts, drafts, 1 + min(drafts, accepted)) == [known - at, 0, 1, drafts]
        assert kv.state_len(0) == known + 1

"""Who is next, who gives way, how prompts share a step, by which clock: pure rules, and a decoder that follows them."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport_runtime import SamplingParams
from specexport_runtime.decoding.pace import Pace
from specexport_runtime.decoding.queue import MIN_TURN, NEARLY_DONE, WHOLE_TURN, WaitingQueue, find_request_to_pause
from specexport_runtime.decoding.rows import Slots
from specexport_runtime.decoding.schedule import (
    REREAD_CHUNK,
    PromptReading,
    Scheduler,
    select_to_go_alone,
    share_tokens,
)
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from tests.support.cases.chance import examples
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import VOCAB, finish, make_decoder, make_draft, make_sequence, make_target
from tests.support.fakes.requests import request_of
from tests.support.fakes.submitted import Watcher

LONG = SamplingParams(max_tokens=400)


def sequence(index=0, owner="a", priority=0, length=4, generated=0, **options):
    options = {"vocab_size": VOCAB, "max_model_len": 2000, "owner": owner, "priority": priority} | options
    seq = request_of(index, [1] * length, options.pop("params", LONG), **options)
    if generated:
        seq.commit([2] * generated)
    return seq


def slots_of(*running, num_rows=1):
    slots = Slots(ModelRunner(FakeExecutor(VOCAB, max(num_rows, len(running)), 2000)), ChainDrafter())
    for row, seq in enumerate(running):
        slots.admit(seq, row)
    return slots


def order(queue, held=None):
    rows, taken = Counter(held), []
    while (seq := queue.next(rows)) is not None:
        queue.take(seq)
        rows[seq.owner] += 1
        taken.append(seq.index)
    return taken


def queue_of(*owners):
    queue = WaitingQueue()
    for index, owner in enumerate(owners):
        queue.append(sequence(index, owner))
    return queue


def test_an_owner_that_comes_again_and_again_starves_nobody():
    """One row: whoever had a turn goes after those that wait, also if nothing of it was left in the queue."""
    queue, taken = queue_of(*"aaab"), []
    while (seq := queue.next({})) is not None and len(taken) < 6:
        queue.take(seq)
        taken.append(seq.owner)
        if seq.owner == "b":
            queue.append(sequence(9, "b"))
    assert "".join(taken) == "ababab"


def test_who_was_paused_goes_on_before_those_that_have_not_begun():
    queue = queue_of(*"aa")
    queue.put_back(sequence(7, "a"))
    assert order(queue) == [7, 0, 1]


def test_owners_can_be_passed_over_but_not_a_priority():
    queue = queue_of(*"ab")
    queue.append(sequence(5, "c", 1))
    assert queue.next({}, {"a"}).index == 1
    assert queue.next({}, {"a", "b"}) is None


def test_a_queue_keeps_nothing_of_those_that_left():
    queue = queue_of(*"abab")
    everybody = list(queue)
    assert [seq.index for seq in everybody] == [0, 2, 1, 3]
    assert not queue.has_only_peers_of(everybody[0])
    for seq in everybody[1:]:
        queue.remove(seq)
    assert len(queue) == 1
    assert queue.has_only_peers_of(everybody[0])
    queue.take(everybody[0])
    assert not queue
    assert not queue._levels


@examples(60)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 1)), max_size=30))
def test_every_queue_is_fair(arrivals):
    """Of equal priority nobody is two rows ahead of one who waits; within an owner arrival counts."""
    queue = WaitingQueue()
    for index, (owner, priority) in enumerate(arrivals):
        queue.append(sequence(index, owner, priority))
    rows, taken = Counter(), []
    while (seq := queue.next(rows)) is not None:
        level = [each for each in queue if each.priority == seq.priority]
        assert seq.priority == min(each.priority for each in queue)
        assert rows[seq.owner] == min(rows[each.owner] for each in level)
        assert seq.index == min(each.index for each in level if each.owner == seq.owner)
        queue.take(seq)
        rows[seq.owner] += 1
        taken.append(seq)
    assert len(taken) == len(arrivals)


def victim(newcomer, *running, can_resume=True):
    slots = slots_of(*running)
    for row, seq in enumerate(running):
        slots.target.kv.restore(row, len(seq.tokens) - 1)
    slots.can_resume = lambda _: can_resume
    return find_request_to_pause(newcomer, slots)


def test_the_owner_with_the_most_rows_gives_way_with_the_least_to_read_again():
    running = [sequence(0, "a", generated=90), sequence(1, "a", generated=40), sequence(2, "b", generated=20)]
    running += [sequence(3, "a", generated=60)]
    assert victim(sequence(9, "c"), *running).index == 1


def test_an_owner_is_paused_down_to_what_the_other_has():
    mine = [sequence(i, "a", generated=50) for i in range(2)]
    others = [sequence(2 + i, "b", generated=50) for i in range(2)]
    assert victim(sequence(9, "b"), *mine, *others) is None
    assert victim(sequence(9, "b"), *mine, sequence(4, "a", generated=50), others[0]).owner == "a"
    assert victim(sequence(9, "b"), *mine, others[0]) is None  # two and one: nothing would be gained


def test_the_last_row_of_an_owner_goes_to_another_after_a_whole_turn():
    assert victim(sequence(9, "b"), sequence(0, "a", generated=WHOLE_TURN - 1)) is None
    assert victim(sequence(9, "b"), sequence(0, "a", generated=WHOLE_TURN)) is None  # and as much as it is long
    assert victim(sequence(9, "b"), sequence(0, "a", generated=WHOLE_TURN, length=1)) is not None
    running = [sequence(0, "a", generated=300, length=1), sequence(1, "b", generated=300, length=1)]
    assert victim(sequence(9, "b"), *running) is None  # who has a row waits
    assert victim(sequence(9, "c"), *running).owner == "a"


def test_a_lower_number_has_others_paused_whoever_owns_them():
    running = [sequence(0, priority=3), sequence(1, priority=5, generated=40), sequence(2, priority=5, generated=20)]
    assert victim(sequence(9, priority=0), *running).index == 2
    assert victim(sequence(9, priority=4), *running).index == 2
    assert victim(sequence(9, priority=5), *running) is None
    assert victim(sequence(9, "b", 6), *running) is None  # fairness does not go over priority


def test_nobody_is_paused_again_before_it_got_on():
    seq, newcomer = sequence(length=8), sequence(9, priority=-1)
    seq.pause(5)
    assert not seq.reads_again  # nothing was generated: its prompt is a prompt
    assert victim(newcomer, seq) is None
    seq.commit([2] * MIN_TURN)
    assert victim(newcomer, seq) is seq
    seq.pause(len(seq.tokens) - 1)
    assert seq.reads_again
    assert victim(newcomer, seq) is None
    seq.reads_again = False
    seq.commit([2] * 60)
    seq.pause(len(seq.tokens) - 1)
    seq.reads_again = False
    seq.commit([2] * MIN_TURN)
    assert victim(newcomer, seq) is None  # it would have to read 100 tokens again
    seq.commit([2] * 20)
    assert victim(newcomer, seq) is seq


def test_some_are_never_paused():
    assert victim(sequence(9), *(sequence(i, generated=50) for i in range(4))) is None  # one owner, one priority
    newcomer = sequence(9, priority=-1)
    ending = SamplingParams(max_tokens=20)
    assert victim(newcomer, sequence(params=ending, generated=20 - NEARLY_DONE)) is None
    assert victim(newcomer, sequence(params=ending, generated=19 - NEARLY_DONE)) is not None
    assert victim(newcomer, sequence(params=SamplingParams(max_tokens=1))) is not None  # a prompt that is being read
    assert victim(newcomer, sequence(params=SamplingParams(max_tokens=50, prompt_logprobs=1))) is None
    assert victim(newcomer, sequence(is_pinned=True)) is None
    assert victim(newcomer, sequence(), can_resume=False) is None


def reading(index, unread, owner="a", priority=0, *, late=False):
    seq = sequence(index, owner, priority, length=unread)
    seq.row = index
    return PromptReading(seq, unread, unread, late)


def test_owners_share_a_step_equally_and_each_reads_one_prompt_after_the_other():
    assert share_tokens([reading(0, 12), reading(1, 30), reading(2, 5)], 20) == {0: 12, 1: 8}
    assert share_tokens([], 16) == {}
    assert share_tokens([reading(0, 500), reading(1, 500, "b")], 100) == {0: 50, 1: 50}
    assert share_tokens([reading(0, 500), reading(1, 20, "b")], 100) == {0: 80, 1: 20}
    assert share_tokens([reading(0, 500), reading(1, 500), reading(2, 500), reading(3, 40, "b")], 100) == {0: 60, 3: 40}
    three = [reading(0, 500), reading(1, 10, "b"), reading(2, 500, "c")]
    assert share_tokens(three, 100) == {0: 45, 1: 10, 2: 45}


def test_what_is_more_urgent_is_read_first_and_the_oldest_gets_a_quarter():
    assert share_tokens([reading(0, 500), reading(1, 500, "b", -1)], 100) == {0: 25, 1: 75}
    assert share_tokens([reading(0, 500), reading(1, 30, priority=-1)], 100) == {0: 70, 1: 30}
    assert share_tokens([reading(0, 500, late=True), reading(1, 500)], 100) == {0: 25, 1: 75}
    assert share_tokens([reading(0, 500, late=True), reading(1, 30), reading(2, 40, "b")], 100) == {0: 30, 1: 30, 2: 40}


@examples(80)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from("abc"), st.integers(0, 1), st.booleans()), min_size=1, max_size=8
    ),
    tokens=st.integers(1, 120),
)
def test_every_step_is_full_and_no_prompt_starves(prompts, tokens):
    readings = [
        reading(i, unread, owner, priority, late=late) for i, (unread, owner, priority, late) in enumerate(prompts)
    ]
    given_tokens = share_tokens(readings, tokens)
    oldest = readings[0]
    assert given_tokens[0] >= max(1, min(oldest.unread, tokens // 4))
    assert all(1 <= count <= readings[row].most for row, count in given_tokens.items())
    assert sum(given_tokens.values()) == min(tokens, sum(each.unread for each in readings))


def test_first_tokens_that_nobody_else_has_a_claim_on_have_a_step_for_themselves():
    decoding = [sequence(0, "a", generated=5), sequence(1, "b", 1, generated=5)]
    mine, others, urgent, later = (
        sequence(2, "a"), sequence(3, "c"), sequence(4, "a", -1), sequence(5, "c", 1),
    )  # fmt: skip
    assert select_to_go_alone(decoding, [mine, others, urgent, later]) == [others, urgent]
    assert select_to_go_alone([], [mine, others]) == []
    assert select_to_go_alone(decoding, []) == []


def test_a_newcomer_has_a_step_for_itself_and_no_two_in_a_row():
    """Who decodes sits it out, and draws what it would have drawn."""
    texts = {}
    for crowded in (False, True):
        decoder = make_decoder(make_target(4, context=3), make_draft("good", 4), 4)
        first = make_sequence(0, [1, 2], SamplingParams(max_tokens=30, temperature=0.9), seed=4, owner="a")
        decoder.add(first)
        newcomers = [make_sequence(i, [i, 3], SamplingParams(max_tokens=1), owner=f"b{i}") for i in range(1, 9)]
        alone = []
        while decoder.has_work:
            if crowded and newcomers and first.num_generated:
                decoder.add(newcomers.pop())
            before = first.num_generated
            decoder.step()
            alone.append(before > 0 and first.num_generated == before)
        texts[crowded] = (first.output, first.stats.accepted_lengths)
        assert any(alone) == crowded
        assert not any(one and other for one, other in pairwise(alone))
    assert texts[True] == texts[False]


def test_late_prompts_yield_and_nobody_is_late_without_a_budget():
    now = [0.0]
    pace = Pace(1.0, clock=lambda: now[0])
    seq = sequence(length=400)
    seq.stats.submit_time = 0.0
    assert not pace.is_late(seq, 400)  # nobody knows yet what a token takes
    pace.record_step(0.1, 100, 0)
    assert not pace.is_late(seq, 400)
    assert pace.is_late(seq, 1100)  # a prompt that takes more than the budget never could
    now[0] = 0.7
    assert pace.is_late(seq, 400)
    assert not pace.is_late(seq, 200)
    assert not Pace().is_late(seq, 10**9)
    seq.commit([1])
    assert not pace.is_late(seq, 10**9)  # its first token is there


def test_chunks_shrink_to_the_time_beside_a_round():
    pace = Pace(itl_budget_s=0.05)
    assert pace.most(500, 3) == 500
    pace.record_step(0.02, 0, 3)
    pace.record_step(0.12, 100, 3)  # a millisecond a token, beside the round
    assert pace.most(500, 3) == 30
    assert pace.most(20, 3) == 20
    assert pace.most(500, 0) == 500  # nobody would be kept waiting
    pace.record_step(1.0, 0, 3)
    assert pace.most(500, 3) == 1
    assert not Pace().is_on
    with pytest.raises(InvalidRequestError, match="itl_budget_ms is 0"):
        EngineOptions(itl_budget_ms=0.0)


def test_what_is_read_again_comes_in_small_pieces_and_smaller_ones_beside_a_first_token():
    paused, newcomer = sequence(0, length=90, generated=10), sequence(1, length=60)
    paused.pause(99)
    slots = slots_of(paused, newcomer, num_rows=3)
    scheduler = Scheduler(slots, max_num_batched_tokens=200, min_prefill_tokens=4)
    assert scheduler.share(0) == {0: 4, 1: 60}
    scheduler.retire(newcomer)
    assert scheduler.share(0) == {0: REREAD_CHUNK}
    slots.target.kv.restore(0, 90)
    assert scheduler.share(0) == {0: 9}  # the newest token begins the next round


def test_the_scheduler_keeps_the_pace():
    now = [0.0]
    pace = Pace(1.0, 0.05, clock=lambda: now[0])
    pace.record_step(0.01, 0, 1)
    pace.record_step(0.1, 100, 0)
    long, short, decoding = sequence(0, length=3000 // 2), sequence(1, length=30), sequence(2, length=3, generated=1)
    for seq in (long, short, decoding):
        seq.stats.submit_time = 0.0
    slots = slots_of(long, short, decoding)
    slots.target.kv.restore(2, 3)
    scheduler = Scheduler(slots, max_num_batched_tokens=200, min_prefill_tokens=4, pace=pace)
    # 40 ms beside the round, of which the long prompt, which is late, gets a quarter.
    assert scheduler.share(1) == {0: 10, 1: 30}
    scheduler.retire(decoding)
    assert scheduler.share(0) == {0: 170, 1: 30}


def test_a_newcomer_gets_a_row_at_once_and_the_paused_come_back():
    decoder = make_decoder(make_target(4), None, 0)
    many = [make_sequence(i, [i % VOCAB, 3], SamplingParams(max_tokens=40), owner="a") for i in range(20)]
    for seq in many:
        decoder.add(seq)
    for _ in range(5):
        decoder.step()
    other = make_sequence(99, [5, 6], SamplingParams(max_tokens=10), owner="b")
    decoder.add(other)
    decoder.step()
    assert other.num_generated == 1  # its prompt was read in this very step
    assert Counter(seq.owner for seq in decoder.running) == {"a": 3, "b": 1}
    assert sum(seq.stats.preemptions for seq in many) == 1
    again = [make_sequence(100 + i, [5, 6], SamplingParams(max_tokens=30), owner="b") for i in range(3)]
    for seq in again:
        decoder.add(seq)
    decoder.step()
    assert Counter(seq.owner for seq in decoder.running) == {"a": 2, "b": 2}  # half of the rows, and no more
    finish(decoder, [])
    ends = [seq.stats.end_time for seq in (*many, other, *again)]
    assert ends.index(min(ends)) == 20
    assert max(ends[20:]) < sorted(ends[:20])[10]
    assert [seq.stats.start_time for seq in many] == sorted(seq.stats.start_time for seq in many)


def test_owners_outnumber_rows():
    """One row, three owners with long texts: turns as long as their texts, and no end to nobody."""
    from specexport_runtime.decoding import queue

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "WHOLE_TURN", 20)
        decoder = make_decoder(make_target(1), None, 0)
        sequences = [make_sequence(i, [i], SamplingParams(max_tokens=60), owner=str(i)) for i in range(3)]
        finish(decoder, sequences)
    assert all(1 <= seq.stats.preemptions <= 3 for seq in sequences[:2])
    firsts = [seq.stats.first_token_time for seq in sequences]
    assert max(firsts) < min(seq.stats.end_time for seq in sequences)


def test_requests_say_whose_they_are_and_how_urgent():
    engine, watcher = make_engine(max_num_seqs=1), Watcher()
    engine.add_observer(watcher)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    alone = engine.generate(["w1 w2"], params)[0]
    first = engine.submit("w1 w2", params, owner="a", priority=2)
    for _ in zip(range(2), first, strict=False):
        pass
    engine.submit("w3", SamplingParams(max_tokens=2), owner="b", priority=-1).result()
    assert ("b", -1) in [(seq.owner, seq.priority) for seq in watcher.ended]
    for options, said in (
        ({"owner": 5}, "owner is 5"),
        ({"priority": True}, "priority is True"),
        ({"priority": 2**63}, "priority is 9223372036854775808"),
        ({"priority": 1.0}, "priority is 1.0"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            engine.submit("w1", params, **options)
    whole = engine.submit("w1 w2", params, owner="a").result()
    assert whole.token_ids == alone.token_ids
    assert whole.stats.to_json()["preemptions"] == 0
    engine.close()

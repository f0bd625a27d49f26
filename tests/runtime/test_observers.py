"""Those who watch an engine hear of every step and every end, once, and change nothing."""

import logging
import threading

import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.errors import RequestFailedError, SpecexportError
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.requests.records import DraftStage, Proposal
from specexport_runtime.requests.request import RoundEvent
from specexport_runtime.telemetry.observers import RoundRecord
from tests.support.fakes.engine import make_engine
from tests.support.fakes.goodput_fakes import gated_curves, make_decoder
from tests.support.fakes.loop import finish, make_sequence
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import LONG, Watcher, expected, slow_down, wait_for_rest


@pytest.fixture
def watched():
    engine, watcher = make_engine(), Watcher()
    check_every_round(engine)
    engine.add_observer(watcher)
    return engine, watcher


def test_every_token_and_every_prompt_token_is_in_one_record(watched):
    engine, watcher = watched
    prompts = [[i] * (1 + 3 * i) for i in range(7)]
    results = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert sum(record.prompt_tokens for record in watcher.rounds) == sum(map(len, prompts))
    got = {id(seq): [] for seq in watcher.ended}
    for record in watcher.rounds:
        assert record.seconds > 0
        for event in record.events:
            got[id(event.request)] += event.tokens
    assert sorted(got.values()) == sorted(result.token_ids for result in results)
    drafted = sum(event.drafted for record in watcher.rounds for event in record.events)
    assert drafted == sum(result.stats.drafted for result in results) > 0
    assert watcher.reasons() == {"length": 7}


def test_they_have_heard_of_it_before_the_caller_has_the_result(watched):
    engine, watcher = watched
    handles, done_before = [], []

    class Late(Watcher):
        def on_finish(self, sequence):
            handle = next(each for each in handles if each.request is sequence)
            done_before.append(handle.done)

    engine.add_observer(Late())
    _, go = slow_down(engine)
    handles += [engine.submit([i], SamplingParams(max_tokens=9)) for i in range(5)]
    go.set()
    for handle in handles:
        handle.result(30)
        assert handle.request in watcher.ended
    assert done_before == [False] * 5
    assert watcher.order[-2:] == ["round", "finish"]


def test_a_step_that_fails_after_some_have_ended_leaves_nobody_waiting(watched, monkeypatch):
    """A row that cannot be given back: the others of that round have ended already, and their rows are free."""
    engine, watcher = watched
    release, calls = engine._loop.decoder.target.release_row, []

    def failing(row):
        calls.append(row)
        if len(calls) == 2:
            raise RuntimeError("the device went away")
        release(row)

    monkeypatch.setattr(engine._loop.decoder.target, "release_row", failing)
    from specexport_runtime.intake.drafting import RequestSpec

    handles = engine.submit_all([RequestSpec([i], SamplingParams(max_tokens=1)) for i in range(4)])
    for handle in handles:
        with pytest.raises(RequestFailedError, match="the device went away"):
            handle.result(30)
    assert sum(watcher.reasons().values()) == 4
    wait_for_rest(engine)
    engine.check()
    assert engine.generate([7], LONG)[0].token_ids == expected([7], 40)


@pytest.mark.parametrize("method", ["on_round", "on_finish"])
def test_one_that_raises_is_dropped_and_logged_once(watched, caplog, method):
    engine, watcher = watched
    calls = []

    class Broken(Watcher):
        pass

    def raising(self, news):
        calls.append(news)
        raise ZeroDivisionError("no metrics today")

    setattr(Broken, method, raising)
    engine.add_observer(Broken())
    engine.add_observer(object())  # which has no such method
    other = Watcher()
    engine.add_observer(other)
    with caplog.at_level(logging.ERROR, logger="specexport_runtime"):
        results = engine.generate([[i] for i in range(6)], LONG)
    assert [result.token_ids for result in results] == [expected([i], 40) for i in range(6)]
    assert len(calls) == 1
    assert engine.observers_dropped == 2
    assert sorted(record.getMessage().count("Broken") for record in caplog.records) == [0, 1]
    assert "no metrics today" in caplog.text
    assert "has no attribute 'on_round'" in caplog.text
    assert watcher.reasons() == other.reasons() == {"length": 6}
    assert len(watcher.rounds) == len(other.rounds)


def test_nothing_is_computed_for_nobody(monkeypatch):
    import specexport_runtime.decoding.decoder as module

    monkeypatch.setattr(module, "step_load", lambda *_: pytest.fail("computed"))
    monkeypatch.setattr(module, "RoundRecord", lambda *_: pytest.fail("made"))
    assert make_engine().generate([1], LONG)[0].token_ids == expected([1], 40)


def test_what_plain_decoding_takes_is_measured_or_known():
    engine, watcher = make_engine(), Watcher()
    engine.add_observer(watcher)
    engine.generate([1, 2], SamplingParams(max_tokens=10))
    fast = [record for record in watcher.rounds if not record.prompt_tokens]
    assert {record.plain_seconds for record in fast if record.events[0].drafted} == {None}
    assert all(record.saved_seconds is None for record in fast if record.plain_seconds is None)
    engine.generate([2], SamplingParams(max_tokens=10), speculation=False)
    watcher.rounds.clear()
    engine.generate([3], SamplingParams(max_tokens=10))
    for record in watcher.rounds:
        assert 0 < record.plain_seconds < 10
        assert (record.saved_seconds is None) == (record.prompt_tokens > 0)
    curves = gated_curves()
    engine, watcher = make_engine(cost_curves=curves), Watcher()
    engine.add_observer(watcher)
    engine.generate([4, 5], SamplingParams(max_tokens=10))
    known = [record for record in watcher.rounds if not record.prompt_tokens]
    for record in known:
        seconds = curves.target.seconds(1, 1, 2)
        assert record.plain_seconds == pytest.approx(seconds, rel=0.5)
        tokens = len(record.events[0].tokens)
        assert record.saved_seconds == pytest.approx(tokens * record.plain_seconds - record.seconds)


def test_saved_seconds_are_per_row():
    events = [RoundEvent(None, tokens, 0, 0, False, Proposal([])) for tokens in ([1, 2, 3], [4])]
    assert RoundRecord(events, 0, 0.5, plain_seconds=0.4).saved_seconds == pytest.approx(0.4 * 2 - 0.5)


def drafts(watched):
    """What adaptive sequences drafted, and drew, in company of others that are not adaptive."""
    target = FakeExecutor(17, 3, 200, context=2, num_gates=12)
    decoder = make_decoder(target, FakeExecutor(17, 3, 200, context=2, noise=1.5), 3)
    if watched:
        decoder.observers.add(Watcher())
    begin_round, loads, params = decoder.lengths.begin_round, [], SamplingParams(max_tokens=30, temperature=0.9)
    decoder.lengths.begin_round = lambda load: (loads.append(load), begin_round(load))
    plans = [(DraftStage("draft-model", 3),), (DraftStage("draft-model", 8),)]
    sequences = [
        make_sequence(i, [i, i + 1], params, seed=100 + i, draft_plan=plans[i > 5], adaptive=i > 5) for i in range(9)
    ]
    finish(decoder, sequences)
    assert loads
    return loads, [(seq.output, seq.stats.drafted, seq.stats.accepted_lengths) for seq in sequences]


def test_being_watched_changes_no_length_and_no_draw():
    assert drafts(watched=True) == drafts(watched=False)


def test_the_load_is_told_to_any_thread_at_any_time(watched):
    engine, _ = watched
    idle = engine.current_load()
    assert idle[:5] == (0, 0, 4, 0, 4 * engine.target.kv_capacity)
    assert idle[5:] == (0, 0, 0, 0, None)  # kept prefixes, their entries, memory
    assert idle.kv_usage == 0.0
    inside_step, go = threading.Event(), threading.Event()
    execute = engine.target.execute
    engine.target.execute = lambda *args: (inside_step.set(), go.wait(60), execute(*args))[2]
    handles = [engine.submit([0], LONG)]
    assert inside_step.wait(60)
    handles += [engine.submit([i], LONG) for i in range(1, 6)]
    assert engine.current_load()[:2] == (1, 5)
    go.set()
    inside = []
    late = engine.submit([1, 2, 3], LONG, callback=lambda _: inside.append(engine.current_load()))
    for handle in [*handles, late]:
        handle.result(30)
    assert all(1 <= load.num_running <= 4 and load.num_waiting <= 6 for load in inside[:-1])
    assert all(load.kv_entries >= 3 and 0 < load.kv_usage < 1 for load in inside[:-1])
    left = engine.current_load()
    assert left[:5] == idle[:5]
    assert 0 < left.num_prefixes <= 4
    assert left.prefix_entries >= 16 * left.num_prefixes
    engine.close()
    assert engine.current_load() == left


def test_check_refuses_while_busy_and_finds_what_was_left_behind(watched):
    engine, _ = watched
    engine.check()
    _, go = slow_down(engine)
    handle = engine.submit([1], LONG)
    with pytest.raises(SpecexportError, match="1 requests have not ended"):
        engine.check()
    go.set()
    handle.result(30)
    engine.check()
    decoder = engine._loop.decoder
    for kv in (decoder.target.kv, decoder.drafter.drafters["draft-model"].runner.kv):
        kv.write(2, [3])
        kv.commit(2, 3)
        with pytest.raises(SpecexportError):
            engine.check()
        kv.release(2)
        engine.check()
    decoder.add(make_sequence(0, [1], LONG))
    with pytest.raises(SpecexportError):
        engine.check()

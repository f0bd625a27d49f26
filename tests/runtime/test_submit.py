"""Requests that come and go, alone or several at once, and those who listen: queueing, cancelling, failures."""

import logging
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specexport_runtime import SamplingParams, errors
from specexport_runtime.errors import InvalidRequestError, RequestFailedError
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import fail_at
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import LONG, Listener, Watcher, expected, slow_down, wait_for_rest


@pytest.fixture
def engine():
    engine = make_engine()
    check_every_round(engine)
    return engine


@pytest.fixture
def watcher(engine):
    watcher = Watcher()
    engine.add_observer(watcher)
    return watcher


def listen(engine, specs):
    listeners = [Listener() for _ in specs]
    return engine.submit_all(specs, listeners), listeners


def test_a_handle_streams_its_callback_gets_every_chunk_and_it_has_a_result(engine):
    heard = []
    handle = engine.submit("w1 w2", LONG, callback=heard.append)
    chunks = list(handle)
    assert heard == chunks
    assert [piece.token_id for chunk in chunks for piece in chunk.pieces] == expected([1, 2], 40)
    assert chunks[-1].finish_reason == "length"
    assert handle.result().token_ids == expected([1, 2], 40)
    assert handle.done


def test_more_requests_than_rows_run_in_order_of_arrival(engine):
    handles = [engine.submit([i], SamplingParams(max_tokens=5 + i)) for i in range(12)]
    results = [handle.result(120) for handle in handles]
    for i, result in enumerate(results):
        assert result.token_ids == expected([i], 5 + i)
    starts = [handle.request.stats.start_time for handle in handles]
    assert starts == sorted(starts)
    ends = [handle.request.stats.end_time for handle in handles]
    assert starts[4] > min(ends[:4])  # four rows
    assert all(0 < result.stats.queued_s < max(ends) - result.stats.submit_time for result in results)


def test_cancel_before_during_and_after(engine, watcher):
    started, go = slow_down(engine)
    running = [engine.submit([i], LONG) for i in range(3)]  # a row is left
    assert started.wait(60)
    waiting = engine.submit([9], LONG)
    (unheard,), (listener,) = listen(engine, [RequestSpec([8], LONG)])
    for handle in (waiting, unheard):  # before its first round, which finds both orders at once
        handle.cancel()
    for _ in range(2):
        running[0].cancel()  # in the middle
    go.set()
    for handle in (waiting, unheard):
        assert handle.result(30).finish_reason == "cancelled"
        assert handle.result().token_ids == []
    assert listener.ended.wait(30)
    assert (listener.done, listener.chunks) == ([unheard], [])
    cut = running[0].result(30)
    assert cut.finish_reason == "cancelled"
    assert cut.token_ids == expected([0], 40)[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40
    for i in (1, 2):
        assert running[i].result(30).token_ids == expected([i], 40)
    running[1].cancel()  # afterwards
    assert running[1].result().finish_reason == "length"
    assert list(waiting)[-1].finish_reason == "cancelled"
    wait_for_rest(engine)
    assert watcher.reasons() == {"cancelled": 3, "length": 2}


@pytest.mark.parametrize("where", ["target", "draft"])
def test_an_engine_failure_ends_the_requests_in_flight_and_spares_later_ones(engine, watcher, where):
    fail_at(getattr(engine, where), 6)
    handles = [engine.submit([i], LONG) for i in range(6)]  # two of them wait
    failed = 0
    for i, handle in enumerate(handles):
        try:
            assert handle.result(120).token_ids == expected([i], 40)
        except RequestFailedError:
            failed += 1
            with pytest.raises(RequestFailedError, match="the device went away") as caught:
                list(handle)
            assert isinstance(caught.value.__cause__, RuntimeError)
    assert 1 <= failed <= 4
    wait_for_rest(engine)
    assert watcher.reasons() == {"error": failed, "length": 6 - failed}
    assert engine.generate([7], LONG)[0].token_ids == expected([7], 40)


def test_counters_start_anew_when_the_engine_was_idle(engine):
    for count in (20, 5):
        engine.generate("w1", SamplingParams(max_tokens=count), speculation=False)
        assert engine.times.rounds == engine.padding.accepted == count - 1  # the prompt's step gives the first token


def test_result_waits_no_longer_than_asked(engine):
    _, go = slow_down(engine)
    handle = engine.submit([1], LONG)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        handle.result(0.01)
    go.set()
    assert handle.result(120).token_ids == expected([1], 40)


def test_a_reference_that_holds_the_answer_is_copied_from(engine):
    answer = expected([1, 2], 40)
    with_it = engine.submit([1, 2], LONG, drafter="lookup", reference=[1, 2, *answer]).result(30)
    for empty in (None, "", []):
        without = engine.submit([1, 2], LONG, drafter="lookup", reference=empty).result(30)
        assert with_it.token_ids == without.token_ids == answer
        assert with_it.stats.rounds < without.stats.rounds


def test_references_are_checked(engine):
    with pytest.raises(InvalidRequestError, match="999 of the reference"):
        engine.submit([1], drafter="lookup", reference=[999])
    with pytest.raises(InvalidRequestError, match="does not copy"):
        engine.submit([1], reference=[1])
    with pytest.raises(InvalidRequestError, match="2 references"):
        engine.generate(["w1"], drafter="lookup", references=["w2", "w3"])


@pytest.mark.parametrize("drafter", ["draft-model", "chained"])
def test_a_bundle_without_a_draft_can_only_look_up(drafter):
    engine = make_engine(None)
    with pytest.raises(InvalidRequestError, match="use drafter 'lookup'"):
        engine.submit("w1", drafter=drafter)
    with pytest.raises(InvalidRequestError, match="no draft"):
        engine.generate("w1", num_speculative_tokens=4)
    assert engine.generate("w1", LONG)[0].stats.drafted == 0
    assert engine.submit("w1", LONG, drafter="lookup").result(30).token_ids == expected([1], 40)


def test_an_exception_while_text_is_made_ends_one_request(engine, monkeypatch):
    from specexport_runtime.requests.text import TextStream

    append = TextStream.append

    def broken(self, token):
        if token == expected([3], 40)[5]:
            raise LookupError("no such piece")
        return append(self, token)

    good = engine.submit([1], SamplingParams(max_tokens=1))
    good.result(30)
    monkeypatch.setattr(TextStream, "append", broken)
    with pytest.raises(RequestFailedError, match="no such piece") as caught:
        engine.submit([3], LONG).result(30)
    assert isinstance(caught.value.__cause__, LookupError)
    monkeypatch.undo()
    assert engine.generate([3], LONG)[0].token_ids == expected([3], 40)


def test_a_program_that_ends_does_not_wait_for_its_requests():
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.support.fakes.engine import make_engine
from specexport_runtime import SamplingParams
engine = make_engine()
execute = engine.target.execute
engine.target.execute = lambda *args: (time.sleep(0.05), execute(*args))[1]
handle = engine.submit([1], SamplingParams(max_tokens=60), speculation=False)
stream = iter(handle)
next(stream)
import atexit
atexit._run_exitfuncs()
assert handle.result(0).finish_reason == "cancelled", handle.result(0)
print("ended")
"""
    command = [sys.executable, "-c", script, Path(__file__).parents[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


# ---- several at once, all or none, and those who listen to them ----


def test_each_listener_hears_of_its_own_request_and_of_its_end_once(engine):
    specs = [
        RequestSpec([i], SamplingParams(max_tokens=10 + i), options={"num_speculative_tokens": 3}) for i in range(9)
    ]
    handles, listeners = listen(engine, specs)
    for i, (handle, listener) in enumerate(zip(handles, listeners, strict=True)):
        assert listener.ended.wait(30)
        assert listener.done == [handle]
        assert handle.result(0).token_ids == listener.tokens == expected([i], 10 + i)
        assert handle.prompt == [i]
        assert listener.chunks[-1].finish_reason == "length"
        assert "".join(chunk.text for chunk in listener.chunks) == handle.result(0).text
        assert listener.threads == {"specexport-decode"}
        with pytest.raises(errors.SpecexportError, match="does not stream"):
            next(iter(handle))


def test_they_join_before_the_same_round_and_stream_without_listeners(engine):
    handles = engine.submit_all([RequestSpec([i], LONG, options={"speculation": False}) for i in range(4)])
    for i, handle in enumerate(handles):
        assert [piece.token_id for chunk in handle for piece in chunk.pieces] == expected([i], 40)
    lengths = {len(handle.result().stats.accepted_lengths) for handle in handles}
    starts = [handle.request.stats.start_time for handle in handles]
    first = [handle.request.stats.first_token_time for handle in handles]
    assert lengths == {40}
    assert max(starts) < min(first)  # all four had a row before anybody had a token


@pytest.mark.parametrize("bad", [RequestSpec([]), RequestSpec([999]), RequestSpec([1], options={"drafter": "lokup"})])
@pytest.mark.parametrize("at", [0, 2])
def test_one_that_can_never_be_served_keeps_all_of_them_out(engine, bad, at):
    specs = [RequestSpec([1], LONG), RequestSpec([2], LONG)]
    specs.insert(at, bad)
    listeners = [Listener() for _ in specs]
    with pytest.raises(InvalidRequestError):
        engine.submit_all(specs, listeners)
    with pytest.raises(InvalidRequestError, match="2 listeners"):
        engine.submit_all(specs, listeners[:2])
    assert engine.current_load()[:2] == (0, 0)
    assert engine._loop._thread is None
    assert not any(listener.done or listener.chunks for listener in listeners)
    engine.check()


def test_none_at_all_is_fine_until_the_engine_is_closed(engine):
    assert engine.submit_all([]) == []
    engine.close()
    for specs in ([], [RequestSpec([1])]):
        with pytest.raises(errors.EngineClosedError):
            engine.submit_all(specs)


def test_listeners_and_observers_hear_of_every_kind_of_end_once(engine):
    watcher = Watcher()
    engine.add_observer(watcher)
    engine.target.logits_after([1, 2])[3] = float("nan")

    class Broken(Listener):
        def on_chunk(self, chunk):
            super().on_chunk(chunk)
            raise KeyError("boom")

    started, go = slow_down(engine)
    specs = [RequestSpec([i], LONG) for i in range(5)] + [RequestSpec([1, 2], LONG)]
    listeners = [Broken(), *(Listener() for _ in specs[1:])]
    handles = engine.submit_all(specs, listeners)
    assert started.wait(60)
    for handle in (handles[1], handles[1], handles[4]):  # running, twice; waiting
        handle.cancel()
    go.set()
    for listener in listeners:
        assert listener.ended.wait(30)
    engine.generate([7], LONG)
    assert all(len(listener.done) == 1 for listener in listeners)
    with pytest.raises(RequestFailedError, match="boom"):
        handles[0].result(0)
    assert handles[0].request.finish_reason == "error"
    assert [handles[i].result(0).finish_reason for i in (1, 2, 3, 4)] == ["cancelled", "length", "length", "cancelled"]
    with pytest.raises(errors.SpecexportError, match="NaN"):
        handles[5].result(0)
    assert len(listeners[0].chunks) == 1
    wait_for_rest(engine)
    assert watcher.reasons() == {"error": 2, "cancelled": 2, "length": 3}
    assert {type(seq.error).__name__ for seq in watcher.ended} == {"CheckFailedError", "KeyError", "NoneType"}
    engine.check()


def test_an_engine_failure_and_a_defect_tell_every_listener_once(engine):
    def broken(*_):
        raise RuntimeError("gone")

    execute, engine.target.execute = engine.target.execute, broken
    handles, listeners = listen(engine, [RequestSpec([i], LONG) for i in range(6)])
    for handle, listener in zip(handles, listeners, strict=True):
        assert listener.ended.wait(30)
        with pytest.raises(RequestFailedError, match="gone"):
            handle.result(0)
    engine.target.execute = execute
    engine._loop.decoder.step = broken
    engine._loop.decoder.fail = broken
    defective, others = listen(engine, [RequestSpec([i], LONG) for i in range(6)])
    for handle, listener in zip(defective, others, strict=True):
        assert listener.ended.wait(30)
        with pytest.raises(errors.EngineDeadError, match="ended by a defect"):
            handle.result(0)
    with pytest.raises(errors.EngineDeadError, match="ended by a defect"):
        engine.submit([2], LONG)
    assert {len(listener.done) for listener in [*listeners, *others]} == {1}


def test_an_on_done_that_raises_is_logged_and_harms_nobody(engine, caplog):
    class Rude(Listener):
        def on_done(self, handle):
            super().on_done(handle)
            raise RuntimeError("Event loop is closed")

    listeners = [Rude(), Rude(), Listener(), Listener(), Listener()]
    with caplog.at_level(logging.ERROR, logger="specexport_runtime"):
        handles = engine.submit_all([RequestSpec([i], LONG) for i in range(5)], listeners)
        handles[1].cancel()
        for i, handle in enumerate(handles):
            result = handle.result(30)
            assert result.token_ids == expected([i], 40)[: len(result.token_ids)]
        assert all(listener.ended.wait(30) for listener in listeners)
        engine.generate([1], LONG)
    assert len(caplog.records) == 2
    assert "Event loop is closed" in caplog.text
    assert {len(listener.done) for listener in listeners} == {1}


def test_a_listener_may_submit_cancel_ask_and_close_from_within(engine):
    seen, later = [], []

    class Busy(Listener):
        def on_chunk(self, chunk):
            super().on_chunk(chunk)
            seen.append(engine.current_load())
            if len(self.chunks) == 2:
                later.append(engine.submit([5], LONG))
                handles[1].cancel()

        def on_done(self, handle):
            super().on_done(handle)
            engine.close()

    listeners = [Busy(), Listener()]
    handles = engine.submit_all([RequestSpec([1], SamplingParams(max_tokens=12)), RequestSpec([2], LONG)], listeners)
    assert listeners[0].ended.wait(30)
    assert handles[1].result(30).finish_reason == "cancelled"
    assert later[0].result(30).finish_reason == "cancelled"  # the engine was closed before it could end
    with pytest.raises(errors.EngineClosedError):
        engine.submit([1])
    engine.close()
    assert not engine._loop._thread.is_alive()


def test_closing_from_within_frees_the_engines_after_the_last_step(engine):
    order = []
    engine.target.close = lambda: order.append(("close", threading.current_thread().name))
    clear = engine.target.clear_row
    engine.target.clear_row = lambda row: (order.append(("clear", "")), clear(row))
    handle = engine.submit([1], LONG, callback=lambda _: engine.close())
    assert handle.result(30).finish_reason == "cancelled"
    engine.close()
    assert order[-1] == ("close", "specexport-decode")
    assert [name for name, _ in order].count("close") == 1


def test_who_has_read_a_stream_to_its_end_finds_the_result(engine, monkeypatch):
    class Dawdling(queue.Queue):
        def put(self, item):
            super().put(item)
            time.sleep(0.002 if item is None else 0)

    monkeypatch.setattr("specexport_runtime.decoding.handle.SimpleQueue", Dawdling)
    for i in range(5):
        handle = engine.submit([i % 17], SamplingParams(max_tokens=2))
        list(handle)
        assert handle.result(0).finish_reason == "length"

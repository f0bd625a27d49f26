"""Several requests at once, all or none, and those who listen to them."""

import logging
import queue
import threading
import time

import pytest

from specexport_runtime import SamplingParams, errors
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.fakes.engine import make_engine
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import LONG, expected, slow_down
from tests.support.fakes.watcher import Listener, Watcher, wait_for_rest


@pytest.fixture
def engine():
    engine = make_engine()
    check_every_round(engine)
    return engine


def submit(engine, specs):
    listeners = [Listener() for _ in specs]
    return engine.submit_all(specs, listeners), listeners


def test_each_listener_hears_of_its_own_request_and_of_its_end_once(engine):
    specs = [
        RequestSpec([i], SamplingParams(max_tokens=10 + i), options={"num_speculative_tokens": 3}) for i in range(9)
    ]
    handles, listeners = submit(engine, specs)
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


def test_they_join_before_the_same_round(engine):
    handles, listeners = submit(engine, [RequestSpec([i], LONG, options={"speculation": False}) for i in range(4)])
    for listener in listeners:
        assert listener.ended.wait(30)
    lengths = {len(handle.result().stats.accepted_lengths) for handle in handles}
    starts = [handle.request.stats.start_time for handle in handles]
    first = [handle.request.stats.first_token_time for handle in handles]
    assert lengths == {40}
    assert max(starts) < min(first)  # all four had a row before anybody had a token


def test_without_listeners_they_stream(engine):
    handles = engine.submit_all([RequestSpec("w1 w2", LONG), RequestSpec([3], LONG)])
    assert [p.token_id for chunk in handles[0] for p in chunk.pieces] == expected([1, 2], 40)
    assert [p.token_id for chunk in handles[1] for p in chunk.pieces] == expected([3], 40)


@pytest.mark.parametrize("bad", [RequestSpec([]), RequestSpec([999]), RequestSpec([1], options={"drafter": "lokup"})])
@pytest.mark.parametrize("at", [0, 2])
def test_one_that_can_never_be_served_keeps_all_of_them_out(engine, bad, at):
    specs = [RequestSpec([1], LONG), RequestSpec([2], LONG)]
    specs.insert(at, bad)
    listeners = [Listener() for _ in specs]
    with pytest.raises(errors.InvalidRequestError):
        engine.submit_all(specs, listeners)
    with pytest.raises(errors.InvalidRequestError, match="2 listeners"):
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
    with pytest.raises(errors.RequestFailedError, match="boom"):
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


def test_cancelled_before_the_first_round(engine):
    """The decoding thread finds it in both orders at once."""
    inside, go = threading.Event(), threading.Event()
    execute = engine.target.execute
    engine.target.execute = lambda *args: (inside.set(), go.wait(60), execute(*args))[2]
    busy = engine.submit([1], LONG)
    assert inside.wait(60)
    (handle,), (listener,) = submit(engine, [RequestSpec([2], LONG)])
    handle.cancel()
    go.set()
    assert listener.ended.wait(30)
    assert (listener.done, listener.chunks) == ([handle], [])
    assert handle.result(0).token_ids == []
    assert handle.result(0).finish_reason == "cancelled"
    assert busy.result(30).token_ids == expected([1], 40)


def test_an_engine_failure_and_a_defect_tell_every_listener_once(engine):
    def broken(*_):
        raise RuntimeError("gone")

    execute, engine.target.execute = engine.target.execute, broken
    handles, listeners = submit(engine, [RequestSpec([i], LONG) for i in range(6)])
    for handle, listener in zip(handles, listeners, strict=True):
        assert listener.ended.wait(30)
        with pytest.raises(errors.RequestFailedError, match="gone"):
            handle.result(0)
    engine.target.execute = execute
    engine._loop.decoder.step = broken
    engine._loop.decoder.fail = broken
    defective, others = submit(engine, [RequestSpec([i], LONG) for i in range(6)])
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

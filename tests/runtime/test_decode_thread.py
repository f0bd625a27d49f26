"""The decoding thread: one for an engine's life, which no fault of a part ends without a word."""

import gc
import logging
import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from specexport_runtime import SamplingParams
from specexport_runtime.decoding import loop as loop_module
from specexport_runtime.errors import EngineClosedError, EngineDeadError, RequestFailedError
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.fakes.engine import make_engine
from tests.support.fakes.submitted import LONG, Watcher, expected, raising, slow_down, wait_for_rest

WAIT_S = 30


def once(function, error):
    errors = [error]

    def call(*args, **options):
        if errors:
            raise errors.pop()
        return function(*args, **options)

    return call


def check_goes_on(engine):
    assert engine.submit([5], LONG).result(WAIT_S).token_ids == expected([5], 40)
    wait_for_rest(engine)
    engine.check()
    assert engine.trouble is None


def check_and_close(engine):
    check_goes_on(engine)
    engine.close()


def test_lonely_requests_of_many_threads_share_one_decoding_thread():
    engine, seen = make_engine(), set()
    execute, wanted = engine.target.execute, [expected([i], 1) for i in range(17)]
    engine.target.execute = lambda *args: (seen.add(threading.current_thread()), execute(*args))[1]

    def use_it(thread):
        for i in range(75):
            number = (thread + i) % 17
            assert engine.submit([number], SamplingParams(max_tokens=1)).result(60).token_ids == wanted[number]
            if i % 3 == thread:
                wait_for_rest(engine)

    with ThreadPoolExecutor(4) as pool:
        for user in [pool.submit(use_it, thread) for thread in range(4)]:
            user.result(HANG_S)
    assert len(seen) == 1
    engine.check()
    engine.close()  # which wakes it
    assert not seen.pop().is_alive()


def test_an_engine_that_nobody_has_any_more_is_freed_and_its_thread_ends():
    engine = make_engine()
    engine.generate([1], LONG)
    loop, thread = weakref.ref(engine._loop), engine._loop._thread
    wait_for_rest(engine)
    del engine
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert loop() is None


def test_a_stream_that_a_garbage_collection_ends_takes_no_lock():
    """Where a collection runs is chance: also under the loop's lock."""
    engine, collected = make_engine(), threading.Event()
    _, go = slow_down(engine)
    watcher = Watcher()
    engine.add_observer(watcher)
    stream = iter(engine.submit([1], LONG))
    next(stream)
    gc.collect()
    cycle = [stream]
    cycle.append(cycle)

    def collect():
        with engine._loop._lock:
            gc.collect()
        collected.set()

    gc.disable()
    try:
        del stream, cycle
        threading.Thread(target=collect, daemon=True).start()
        assert collected.wait(WAIT_S)
    finally:
        gc.enable()
    go.set()
    wait_until(lambda: watcher.ended)
    assert watcher.reasons() == {"cancelled": 1}
    check_and_close(engine)


def test_an_engine_that_is_closed_as_its_last_request_ends_closes():
    """The thread takes the order to look around, and must not wait for another one."""
    engine, closed = make_engine(), []

    class Orders(queue.SimpleQueue):
        def empty(self):
            if not engine._loop._handles and not closed:
                closed.append(True)
                engine._loop._closed = True
                self.put(None)
            return super().empty()

    engine._loop._orders = Orders()
    engine.submit([1], LONG).result(WAIT_S)
    engine._loop._thread.join(WAIT_S)
    assert not engine._loop._thread.is_alive()


def test_a_destructor_may_close_the_engine_while_a_request_is_submitted():
    engine = make_engine()

    class Closing(dict):
        def update(self, *args):
            engine.close()
            super().update(*args)

    engine._loop._handles = Closing()
    assert engine.submit([1], LONG).result(WAIT_S).finish_reason == "cancelled"
    with pytest.raises(EngineClosedError):
        engine.submit([1])


def test_a_step_that_fails_is_logged_once_and_one_after_the_other_is_trouble(caplog):
    engine = make_engine()
    execute, engine.target.execute = engine.target.execute, raising(ValueError("words of a prompt"))
    for _ in range(loop_module.MAX_FAILURES):
        assert engine.trouble is None
        with pytest.raises(RequestFailedError, match="words"):
            engine.submit([1]).result(WAIT_S)
    assert isinstance(engine.trouble, EngineDeadError)
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.name.startswith("specexport_runtime.")
    assert record.exc_info[0] is ValueError
    assert "words" not in record.getMessage()
    engine.target.execute = execute
    check_goes_on(engine)  # it is not refused meanwhile
    engine.target.execute = raising(MemoryError())
    with pytest.raises(RequestFailedError, match="MemoryError"):
        engine.submit([1]).result(WAIT_S)
    assert len(caplog.records) == 2
    engine.target.execute = execute
    check_and_close(engine)


@pytest.mark.parametrize("error", [RuntimeError("no plan"), MemoryError()])
def test_steps_that_fail_before_they_begin_end_the_requests_that_wait_one_by_one(error):
    engine = make_engine()
    plan = engine._loop.decoder.scheduler.plan
    engine._loop.decoder.scheduler.plan = raising(error)
    for handle in engine.submit_all([RequestSpec([i], LONG) for i in range(3)]):
        with pytest.raises(RequestFailedError, match=type(error).__name__):
            handle.result(WAIT_S)
    engine._loop.decoder.scheduler.plan = plan
    check_and_close(engine)


@pytest.mark.parametrize("name", ["fits", "should_wait"])
def test_a_plan_that_fails_for_one_request_ends_that_one_alone(name):
    engine = make_engine()
    started, go = slow_down(engine)
    running = engine.submit([1], LONG)
    assert started.wait(WAIT_S)
    slots = engine._loop.decoder.slots
    asked = getattr(slots, name)
    setattr(slots, name, lambda req: raising(MemoryError())() if req.tokens == [2] else asked(req))
    bad, good = engine.submit_all([RequestSpec([2], LONG), RequestSpec([3], LONG)])
    go.set()
    with pytest.raises(RequestFailedError, match="MemoryError"):
        bad.result(WAIT_S)
    assert [handle.result(WAIT_S).token_ids for handle in (running, good)] == [expected([i], 40) for i in (1, 3)]
    check_and_close(engine)


def test_a_request_whose_drafter_cannot_begin_it_again_is_not_lost():
    engine = make_engine(max_num_seqs=1)
    started, go = slow_down(engine)
    paused = engine.submit([1], SamplingParams(max_tokens=60))
    assert started.wait(WAIT_S)
    drafter = engine._loop.decoder.drafter
    restart, drafter.restart = drafter.restart, raising(RuntimeError("cannot"))
    urgent = engine.submit([2], LONG, priority=-1)
    go.set()
    with pytest.raises(RequestFailedError, match="cannot"):
        paused.result(WAIT_S)
    assert urgent.result(WAIT_S).token_ids == expected([2], 40)
    drafter.restart = restart
    check_and_close(engine)


def test_a_row_that_cannot_be_given_back_ends_what_ran_and_a_cancelled_request_stays_cancelled():
    engine = make_engine()
    started, go = slow_down(engine)
    cancelled, other = engine.submit_all([RequestSpec([1], LONG), RequestSpec([2], LONG)])
    assert started.wait(WAIT_S)
    target = engine._loop.decoder.target
    target.release_row = once(target.release_row, RuntimeError("lost"))
    cancelled.cancel()
    go.set()
    assert cancelled.result(WAIT_S).finish_reason == "cancelled"
    with pytest.raises(RequestFailedError, match="lost"):
        other.result(WAIT_S)
    check_and_close(engine)


@pytest.mark.parametrize("error", [SystemExit(), GeneratorExit()])
def test_what_is_no_exception_of_a_program_ends_no_engine_either(error):
    engine = make_engine()
    other = engine.submit([2], LONG)
    with pytest.raises(RequestFailedError, match=type(error).__name__):
        engine.submit([1], LONG, callback=raising(error)).result(WAIT_S)
    assert other.result(WAIT_S).token_ids == expected([2], 40)
    engine.target.execute = once(engine.target.execute, error)
    with pytest.raises(RequestFailedError, match=type(error).__name__):
        engine.submit([1], LONG).result(WAIT_S)
    check_and_close(engine)


def test_a_device_that_is_lost_ends_the_engine_and_all_hear_of_it_once(caplog, monkeypatch):
    """Even rows cannot be cleared any more. Nothing is printed by Python's own hook."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    engine, watcher = make_engine(max_num_seqs=1), Watcher()
    engine.add_observer(watcher)
    started, go = slow_down(engine)
    ran, *waited = engine.submit_all([RequestSpec([i], LONG) for i in range(3)])
    assert started.wait(WAIT_S)
    engine.target.execute = engine.target.clear_row = raising(RuntimeError("cudaErrorIllegalAddress"))
    go.set()
    with pytest.raises(RequestFailedError, match="Illegal"):
        ran.result(WAIT_S)
    for handle in waited:
        with pytest.raises(EngineDeadError, match=r"defect \(RuntimeError\)"):
            handle.result(WAIT_S)
    assert watcher.reasons() == {"error": 3}
    with pytest.raises(EngineDeadError):
        engine.submit([1])
    assert isinstance(engine.trouble, EngineDeadError)
    assert [record.levelname for record in caplog.records] == ["ERROR", "CRITICAL"]
    engine.close()
    assert not printed


def test_an_engine_is_stuck_only_while_requests_are_active_and_no_round_ends(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop_module, "monotonic", lambda: now[0])
    engine = make_engine()
    started, go = slow_down(engine)
    now[0] = 1e6
    assert engine.trouble is None
    handle = engine.submit([1], LONG)
    assert started.wait(WAIT_S)
    wait_until(lambda: handle.request.num_generated)
    now[0] += 59
    assert engine.trouble is None
    now[0] += 2
    assert "1 requests are active" in str(engine.trouble)
    go.set()
    handle.result(WAIT_S)
    assert engine.trouble is None
    engine.close()
    assert not isinstance(engine.trouble, EngineDeadError)
    assert isinstance(engine.trouble, EngineClosedError)

"""What would wait for ever says so: an engine call in the decoding thread, which alone could answer it."""

import asyncio
import logging
import threading

import pytest

from specexport_runtime import AsyncSpecEngine, SamplingParams
from specexport_runtime.errors import EndlessWaitError
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.fakes.engine import make_engine
from tests.support.fakes.submitted import expected

PARAMS = SamplingParams(max_tokens=12)
WAIT_S = 60


async def generate_async(engine):
    return await AsyncSpecEngine(engine).generate("w1", PARAMS)


WAITS = {
    "SpecEngine.generate()": lambda engine: engine.generate("w1", PARAMS),
    "SpecEngine.stream()": lambda engine: list(engine.stream("w1", PARAMS)),
    "RequestHandle.result()": lambda engine: engine.submit("w1", PARAMS).result(),
    "iterating over a RequestHandle": lambda engine: list(engine.submit("w1", PARAMS)),
    "AsyncSpecEngine.submit()": lambda engine: asyncio.run(generate_async(engine)),
}


@pytest.fixture
def engine():
    """An engine that leaves nobody waiting: not even the test of a runtime that waits for ever."""
    engine = make_engine()
    yield engine
    engine._loop._thread = None  # it may hang; it is a daemon


def once(action):
    """A callback that acts the first time only, and keeps what was raised."""
    raised = []

    def callback(*_):
        if raised:
            return
        raised.append(None)
        try:
            action()
        except Exception as error:
            raised[0] = error
            raise

    return callback, raised


@pytest.mark.parametrize("what", WAITS)
def test_waiting_in_a_callback_ends_that_request_alone(engine, what):
    callback, _ = once(lambda: WAITS[what](engine))
    other = engine.submit([5], PARAMS)
    handle = engine.submit([2], PARAMS, callback=callback)
    with pytest.raises(EndlessWaitError, match="in another thread") as caught:
        handle.result(WAIT_S)
    assert caught.value.message.startswith(what)
    assert "specexport-decode" in caught.value.message
    assert "submit()" in caught.value.hint
    assert other.result(WAIT_S).token_ids == expected([5], 12)
    assert engine.submit([7], PARAMS).result(WAIT_S).token_ids == expected([7], 12)
    engine.close()


class Listener:
    def __init__(self, on_chunk=lambda *_: None, on_done=lambda *_: None):
        self.on_chunk, self._on_done = on_chunk, on_done
        self.ended = threading.Event()

    def on_done(self, handle):
        try:
            self._on_done(handle)
        finally:
            self.ended.set()


def test_a_listener_that_waits_at_the_end_is_logged_and_the_result_stays(engine, caplog):
    listener = Listener(on_done=lambda _: engine.generate("w1"))
    (handle,) = engine.submit_all([RequestSpec([2], PARAMS, None, {})], [listener])
    assert listener.ended.wait(WAIT_S)
    assert handle.result(WAIT_S).token_ids == expected([2], 12)
    engine.close()  # the thread has ended: the record is there
    assert "specexport-decode" in caplog.text


def test_an_observer_that_waits_is_dropped_and_logged(engine, caplog):
    class Observer:
        def on_round(self, _):
            engine.generate("w1")

        def on_finish(self, _):
            pass

    engine.add_observer(Observer())
    with caplog.at_level(logging.WARNING):
        assert engine.submit([2], PARAMS).result(WAIT_S).token_ids == expected([2], 12)
    assert "specexport-decode" in caplog.text


def test_what_does_not_wait_may_be_called_in_a_callback(engine):
    seen, later = [], []

    def act():
        later.append(engine.submit([3], PARAMS))
        engine.current_load()
        with pytest.raises(TimeoutError):
            later[0].result(0)  # asks, and does not wait
        later.append(engine.submit([4], PARAMS))
        later[1].cancel()
        seen.append(next(iter(own[0])).pieces[0].token_id)  # this round's chunk is there

    own, queued = [], threading.Event()
    callback, raised = once(lambda: (queued.wait(WAIT_S), act()))
    own.append(engine.submit([2], PARAMS, callback=callback))
    queued.set()
    own[0].result(WAIT_S)
    assert raised == [None]
    assert seen == expected([2], 12)[:1]
    assert later[0].result(WAIT_S).token_ids == expected([3], 12)
    assert later[1].result(WAIT_S).finish_reason == "cancelled"


def test_a_finished_request_can_be_read_when_its_listener_hears_of_the_end(engine):
    results = []
    first = engine.submit([2], PARAMS)
    first.result(WAIT_S)
    listener = Listener(on_done=lambda handle: results.extend([handle.result().token_ids, len(list(first))]))
    engine.submit_all([RequestSpec([3], PARAMS, None, {})], [listener])
    assert listener.ended.wait(WAIT_S)
    assert results[0] == expected([3], 12)
    assert results[1] > 0

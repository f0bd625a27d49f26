"""The engine in an event loop: how it drains and closes, and what the end of a loop or a program takes along."""

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import pytest

from specexport_runtime import AsyncSpecEngine, SpecEngine, SpecexportError
from specexport_runtime.errors import EngineClosedError, RequestFailedError
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.fakes.async_engines import (
    ENDLESS,
    LONG,
    Gate,
    assert_at_rest,
    collect,
    engine_at_rest,
    expected,
    ids_of,
    until,
)
from tests.support.fakes.engine import make_engine


@pytest.fixture
def engine():
    with engine_at_rest() as engine:
        yield engine


def test_drain_waits_for_what_was_taken_and_refuses_the_rest(engine):
    async def main():
        service = AsyncSpecEngine(engine)
        requests = await service.submit_all([RequestSpec([i], LONG) for i in range(6)])
        draining = asyncio.ensure_future(service.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError):
            await service.submit([1])
        assert await draining
        assert [request.handle.result(0).finish_reason for request in requests] == ["length"] * 6
        assert [len(ids_of(await collect(request))) for request in requests] == [40] * 6  # still there to read
        assert await service.drain(0)

    asyncio.run(main())


def test_a_drain_that_takes_too_long_cancels_what_is_left(engine):
    gate = Gate(engine)

    async def main():
        service = AsyncSpecEngine(engine)
        gate.shut()
        requests = await service.submit_all([RequestSpec([i], ENDLESS) for i in range(6)])
        await gate.holds()
        draining = asyncio.ensure_future(service.drain(0.01))
        await asyncio.sleep(0.03)
        assert not draining.done()
        gate.open()
        assert not await draining
        assert [(await request.result()).finish_reason for request in requests] == ["cancelled"] * 6
        assert service.num_active == 0

    asyncio.run(main())


def test_closing_finishes_what_was_taken_and_may_be_repeated():
    closes = []

    async def main():
        engine = make_engine()
        engine.target.close = lambda: closes.append(None)
        service = AsyncSpecEngine(engine)
        request = await service.submit([5], LONG)
        await asyncio.gather(service.aclose(), service.aclose())
        await service.aclose()
        assert (await request.result()).token_ids == expected([5], 40)
        with pytest.raises(EngineClosedError):
            await service.submit([5])
        with pytest.raises(EngineClosedError):
            engine.submit([5])

    asyncio.run(main())
    assert len(closes) == 1


def test_a_close_that_is_cancelled_cancels_what_is_left_and_closes():
    async def main():
        engine = make_engine()
        gate = Gate(engine)
        service = AsyncSpecEngine(engine)
        gate.shut()
        requests = await service.submit_all([RequestSpec([i], ENDLESS) for i in range(6)])
        await gate.holds()
        closing = asyncio.ensure_future(service.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.sleep(0.01)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert [(await request.result()).finish_reason for request in requests] == ["cancelled"] * 6
        with pytest.raises(EngineClosedError):
            engine.submit([5])
        assert_at_rest(engine)

    asyncio.run(main())


def test_a_block_finishes_its_requests_and_one_that_fails_cancels_them():
    async def main():
        engines = [make_engine(), make_engine()]
        async with AsyncSpecEngine(engines[0]) as service:
            request = await service.submit([5], LONG)
        assert (await request.result()).token_ids == expected([5], 40)
        gate = Gate(engines[1])
        with suppress(KeyError):
            async with AsyncSpecEngine(engines[1]) as service:
                gate.shut()
                request = await service.submit([5], ENDLESS)
                asyncio.get_running_loop().call_later(0.05, gate.open)
                raise KeyError
        assert (await request.result()).finish_reason == "cancelled"
        for engine in engines:
            with pytest.raises(EngineClosedError):
                engine.submit([1])

    asyncio.run(main())


def test_closing_while_reading_does_not_lock_up():
    async def main():
        service = AsyncSpecEngine(make_engine())
        tokens = []
        request = await service.submit([5], LONG)
        async for chunk in request:
            tokens += ids_of([chunk])
            await service.aclose()
        assert tokens == expected([5], 40)

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_an_event_loop_that_is_closed_takes_only_its_own_requests_along(engine, reads):
    gate = Gate(engine)
    loop = asyncio.new_event_loop()

    async def begin():
        service = AsyncSpecEngine(engine)
        gate.shut()
        request = await service.submit([1], ENDLESS)
        request.keeps = reads
        await gate.holds()
        return request

    lost = loop.run_until_complete(begin())
    mine = engine.submit([2], LONG)
    loop.close()
    gate.open()

    async def others():
        service = AsyncSpecEngine(engine)
        return await asyncio.gather(*(service.generate([i], LONG) for i in (3, 4)))

    assert [result.token_ids for result in asyncio.run(others())] == [expected([3], 40), expected([4], 40)]
    assert mine.result(60).token_ids == expected([2], 40)
    with pytest.raises(RequestFailedError, match="event loop of this request was closed"):
        lost.handle.result(60)


def test_the_end_of_the_program_cancels_what_its_tasks_wait_for(engine):
    gate = Gate(engine)

    async def main():
        service = AsyncSpecEngine(engine)
        gate.shut()
        tasks = [asyncio.ensure_future(service.generate([i], ENDLESS)) for i in range(6)]
        await gate.holds()
        threading.Timer(0.05, gate.open).start()
        return tasks

    assert all(task.cancelled() for task in asyncio.run(main()))
    assert_at_rest(engine)
    assert engine.generate([3], LONG)[0].token_ids == expected([3], 40)


def test_an_engine_belongs_to_its_event_loop(engine):
    async def make():
        return AsyncSpecEngine(engine)

    async def use(service):
        with pytest.raises(SpecexportError, match="another event loop"):
            await service.submit([1])
        assert service.num_active == 0

    asyncio.run(use(asyncio.run(make())))
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncSpecEngine(engine)


def test_threads_tasks_and_event_loops_share_an_engine(engine):
    found: dict[int, list[int]] = {}

    def use_thread(start: int) -> None:
        for i in range(start, start + 5):
            found[i] = ids_of(engine.submit([i % 17, 1], LONG))

    async def use_loop(start: int) -> None:
        service = AsyncSpecEngine(engine)

        async def one(i: int) -> None:
            request = await service.submit([i % 17, 1], LONG)
            if i % 2:
                found[i] = (await request.result()).token_ids
            else:
                found[i] = ids_of(await collect(request))

        await asyncio.gather(*map(one, range(start, start + 5)))

    threads = [threading.Thread(target=use_thread, args=(start,)) for start in (0, 5)]
    threads += [threading.Thread(target=lambda start=start: asyncio.run(use_loop(start))) for start in (10, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {i: expected([i % 17, 1], 40) for i in range(20)}


def test_a_request_is_freed_without_the_garbage_collector(engine):
    async def main():
        service = AsyncSpecEngine(engine)
        request = await service.submit([5], LONG)
        await collect(request)
        handle = weakref.ref(request.handle)
        request = weakref.ref(request)
        await asyncio.sleep(0)
        return handle, request

    gc.disable()
    try:
        handle, request = asyncio.run(main())
        assert_at_rest(engine)
        assert request() is None
        assert handle() is None
    finally:
        gc.enable()


def test_a_load_that_is_cancelled_closes_what_it_loaded(monkeypatch):
    go, closed = threading.Event(), threading.Event()
    engine = make_engine()
    monkeypatch.setattr(engine, "close", closed.set)
    monkeypatch.setattr(SpecEngine, "load", lambda path, options: go.wait(60) and engine)

    async def main():
        task = asyncio.ensure_future(AsyncSpecEngine.load("engines/any"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await until(closed)

    asyncio.run(main())

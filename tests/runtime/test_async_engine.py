"""The engine in an event loop: what is asked for, what cancelled tasks leave behind, how it drains and closes."""

import asyncio
import gc
import math
import threading
import weakref
from contextlib import aclosing, suppress

import pytest

from specexport_runtime import (
    AsyncRequest,
    AsyncSpecEngine,
    SamplingParams,
    SpecEngine,
    SpecexportError,
    StructuredOutputs,
    errors,
)
from specexport_runtime.async_engine import EventLoopQueue
from specexport_runtime.intake.drafting import RequestSpec
from tests.support.fakes.engine import make_engine
from tests.support.fakes.loop import MAX_MODEL_LEN
from tests.support.fakes.rounds import check_every_round
from tests.support.fakes.submitted import LONG, expected, wait_for_rest

ENDLESS = SamplingParams(max_tokens=60)
LONG_TEXT = " ".join(["w1"] * 900)  # tokenized on another thread


def ids_of(chunks) -> list[int]:
    return [piece.token_id for chunk in chunks for piece in chunk.pieces]


class Gate:
    def __init__(self, engine: SpecEngine) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._allowed = math.inf
        execute = engine.target.execute

        def held(*args):
            with self._changed:
                self._begun += 1
                assert self._changed.wait_for(lambda: self._begun <= self._allowed, 60)
            return execute(*args)

        engine.target.execute = held

    def shut(self) -> None:
        self._allowed = self._begun

    def open(self, steps: float = math.inf) -> None:
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    async def holds(self) -> None:
        async with asyncio.timeout(60):
            while self._begun <= self._allowed:
                await asyncio.sleep(0.001)


@pytest.fixture
def engine():
    """An engine that checks itself, and has nothing running or waiting in the end."""
    engine = make_engine()
    check_every_round(engine)
    yield engine
    assert_at_rest(engine)
    engine.close()


def assert_at_rest(engine: SpecEngine) -> None:
    wait_for_rest(engine)
    decoder = engine._loop.decoder
    assert not decoder.has_work
    decoder.check()
    assert all(row is None for row in decoder.slots.placed)


async def ends(request: AsyncRequest) -> str:
    """How a request that nobody may wait for ended."""
    async with asyncio.timeout(60):
        while not request.done:
            await asyncio.sleep(0.001)
    return request.handle.result(0).finish_reason


async def collect(chunks) -> list:
    return [chunk async for chunk in chunks]


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def test_submit_iterate_and_ask_for_the_result(engine):
    service = AsyncSpecEngine(engine)
    requests = await asyncio.gather(*(service.submit([i], LONG) for i in range(9)))
    assert service.num_active == 9

    async def read(request):
        return [chunk async for chunk in request]

    streams = await asyncio.gather(*map(read, requests))
    for i, (request, chunks) in enumerate(zip(requests, streams, strict=True)):
        assert ids_of(chunks) == expected([i], 40)
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        for _ in range(2):
            assert (await request.result()).token_ids == expected([i], 40)
        assert request.done
    assert service.num_active == 0
    results = await service.generate("w1 w2", LONG, drafter="lookup")
    assert [result.token_ids for result in results] == [expected([1, 2], 40)]
    assert repr(service) == f"Async{engine!r}"


async def test_verbs_and_shapes_are_those_of_the_other_engine(engine):
    params = [SamplingParams(max_tokens=5 + i) for i in range(6)]
    prompts = ["w1 w2", [3], "w4", "w5", [6], "w7"]
    wanted = [(each.prompt, each.text, each.drafters) for each in engine.generate(prompts, params)]
    chunks = [(each.token_ids, each.drafters) for each in engine.stream("w1 w2", params[0], drafter="lookup")]
    service = AsyncSpecEngine(engine)
    found = await service.generate(prompts, params, references=[None] * 6)
    assert [(each.prompt, each.text, each.drafters) for each in found] == wanted
    assert await service.generate([]) == []
    stream = service.stream("w1 w2", params[0], drafter="lookup")
    assert [(each.token_ids, each.drafters) async for each in stream] == chunks
    async for _ in service.stream("w1 w2", ENDLESS):
        break
    for wrong in (service.generate(prompts, params[:2]), anext(service.stream([999]))):
        with pytest.raises(errors.InvalidRequestError):
            await wrong
    assert await service.drain(60)


async def test_the_event_loop_is_not_woken_for_chunks_that_nobody_reads(engine, monkeypatch):
    wakes = []
    deliver = EventLoopQueue._deliver
    monkeypatch.setattr(EventLoopQueue, "_deliver", lambda self: wakes.append(None) or deliver(self))
    gate = Gate(engine)
    service = AsyncSpecEngine(engine)
    gate.shut()
    request = await service.submit([5], LONG)
    await gate.holds()
    waiting = asyncio.ensure_future(request.result())
    await asyncio.sleep(0)
    gate.open()
    assert (await waiting).token_ids == expected([5], 40)
    assert len(wakes) == 1


async def test_results_may_be_awaited_by_many_beside_an_iteration_over_batches(engine):
    request = await AsyncSpecEngine(engine).submit([5], LONG)
    batches = request.batches()
    waiting = [asyncio.ensure_future(request.result()) for _ in range(3)]
    await asyncio.sleep(0)
    read = [batch async for batch in batches]
    assert all(read)
    assert ids_of(chunk for batch in read for chunk in batch) == expected([5], 40)
    assert all(result.token_ids == expected([5], 40) for result in await asyncio.gather(*waiting))


async def test_chunks_are_read_once(engine):
    service = AsyncSpecEngine(engine)
    request = await service.submit([5], LONG)
    assert [chunk async for chunk in request]
    for again in (request.__aiter__, request.batches):
        with pytest.raises(SpecexportError, match="iterate over it once"):
            again()
    unread = await service.submit([5], LONG)
    await unread.result()
    with pytest.raises(SpecexportError, match="its result was awaited"):
        aiter(unread)


@pytest.mark.parametrize("how", ["result", "iterate", "batches", "generate", "stream"])
@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting for a row"])
async def test_cancelling_the_task_cancels_the_request(engine, how, waits):
    gate = Gate(engine)

    async def read(service, seen):
        if how == "generate":
            return await service.generate([7], ENDLESS)
        if how == "stream":
            return await collect(service.stream([7], ENDLESS))
        seen.append(await service.submit([7], ENDLESS))
        if how == "result":
            return await seen[0].result()
        return await collect(seen[0] if how == "iterate" else seen[0].batches())

    service = AsyncSpecEngine(engine)
    gate.shut()
    others = [await service.submit([i], LONG) for i in range(4 if waits else 3)]
    await gate.holds()
    seen = []
    task = asyncio.ensure_future(read(service, seen))
    while service.num_active == len(others) or not (seen or how in ("generate", "stream")):
        await asyncio.sleep(0.001)
    if not waits:  # let it have a row
        gate.open(3)
        await gate.holds()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.num_active == len(others) + 1  # until the decoding thread has let go of it
    gate.open()
    for request in seen:
        assert await ends(request) == "cancelled"
        assert len(request.handle.result(0).token_ids) < (1 if waits else 40)
    for i, request in enumerate(others):
        assert (await request.result()).token_ids == expected([i], 40)
    assert await service.drain(60)


def hold_tokenizing(engine, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Hold ``submit_all`` before it queues: an event that it has begun, and one that lets it go on."""
    begun, go = threading.Event(), threading.Event()
    submit_all = engine.submit_all

    def held(*args):
        begun.set()
        assert go.wait(60)
        return submit_all(*args)

    monkeypatch.setattr(engine, "submit_all", held)
    return begun, go


async def test_a_submit_that_is_cancelled_while_it_tokenizes_leaves_nothing_running(engine, monkeypatch):
    begun, go = hold_tokenizing(engine, monkeypatch)
    gate = Gate(engine)
    handles = []
    make = engine._loop.submit
    monkeypatch.setattr(engine._loop, "submit", lambda new: handles.extend(new) or make(new))
    service = AsyncSpecEngine(engine, max_waiting=0)
    specs = [RequestSpec([1], ENDLESS, LONG_TEXT, {"drafter": "lookup"}) for _ in range(4)]
    task = asyncio.ensure_future(service.submit_all(specs))
    await until(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.num_active == 4
    with pytest.raises(errors.QueueFullError):  # they may still get a row
        await service.submit([1])
    gate.shut()
    go.set()
    while not handles:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    gate.open()
    assert await service.drain(60)
    assert service.num_active == 0
    assert [handle.request.finish_reason for handle in handles] == ["cancelled"] * 4


async def test_a_submit_that_is_cancelled_and_then_refused_is_forgotten(engine, monkeypatch):
    begun, go = hold_tokenizing(engine, monkeypatch)
    service = AsyncSpecEngine(engine)
    task = asyncio.ensure_future(service.submit(LONG_TEXT))  # longer than the engine takes
    await until(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await service.drain(60)


@pytest.mark.parametrize("how", ["break", "raise", "dropped", "closed", "not begun"])
def test_leaving_an_iteration_cancels_the_request(engine, how):
    gate = Gate(engine)
    kept = []

    async def leave(request):
        if how == "closed":
            async with aclosing(request.batches()) as batches:
                kept.append(batches)  # it is closed, not dropped
                await anext(batches)
        elif how == "dropped":
            await anext(aiter(request))
        elif how == "not begun":  # a response that is never sent
            (chunk.text async for chunk in request)
        else:
            async for _ in request:
                gate.shut()
                if how == "break":
                    break
                raise KeyError

    async def main():
        request = await AsyncSpecEngine(engine).submit([5], ENDLESS)
        try:
            await leave(request)
        except KeyError:
            assert how == "raise"
        await asyncio.sleep(0)
        gate.open()
        return await ends(request)

    gc.disable()  # no cycle may hold it
    try:
        reasons = [asyncio.run(main()) for _ in range(4)]
    finally:
        gc.enable()
    assert "cancelled" in reasons  # a fast one may have ended before


async def test_a_cancelled_request_ends_its_stream_and_says_so(engine):
    gate = Gate(engine)
    gate.shut()
    service = AsyncSpecEngine(engine)
    read, unread = await service.submit_all([RequestSpec([5], ENDLESS), RequestSpec([6], ENDLESS)])
    chunks = asyncio.ensure_future(anext(aiter(read)))
    await gate.holds()
    read.cancel()
    threading.Thread(target=unread.cancel).start()
    gate.open()
    assert (await chunks).pieces
    assert (await read.result()).finish_reason == "cancelled"
    result = await unread.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == expected([6], 60)[: len(result.token_ids)]
    third = await service.submit([5], ENDLESS)
    third.cancel()
    seen = [chunk async for chunk in third]
    assert [chunk.finish_reason for chunk in seen] == [None] * (len(seen) - 1) + ["cancelled"]
    third.cancel()  # no effect


async def test_a_request_that_fails_says_so_everywhere(engine):
    engine.target.logits_after([1, 2])[3] = float("nan")
    service = AsyncSpecEngine(engine)
    good = await service.submit([3], LONG)
    for read in (lambda request: request.result(), collect):
        with pytest.raises(SpecexportError, match="NaN"):
            await read(await service.submit([1, 2], LONG))
    bad = await service.submit([1, 2], LONG)
    with pytest.raises(SpecexportError, match="NaN"):
        await collect(bad.batches())
    with pytest.raises(SpecexportError, match="NaN"):
        await bad.result()
    assert (await good.result()).token_ids == expected([3], 40)
    assert service.num_active == 0


async def test_refusals_leave_no_trace(engine):
    service = AsyncSpecEngine(engine, max_waiting=1)
    with pytest.raises(errors.InvalidRequestError, match="tokens"):
        await service.submit([1] * MAX_MODEL_LEN)
    with pytest.raises(errors.InvalidRequestError, match="tokens"):  # from the other thread
        await service.submit(LONG_TEXT)
    with pytest.raises(errors.InvalidRequestError, match="999"):  # all or none
        await service.submit_all([RequestSpec([1], LONG), RequestSpec([999], LONG)])
    with pytest.raises(TypeError):
        await service.submit([1], nonsense=True)
    assert await service.submit_all([]) == []
    assert service.num_active == 0
    assert await service.drain(0)


async def test_a_full_queue_refuses_all_or_nothing(engine):
    gate = Gate(engine)
    service = AsyncSpecEngine(engine, max_waiting=2)  # and four rows
    gate.shut()
    requests = await service.submit_all([RequestSpec([i], LONG) for i in range(4)])
    with pytest.raises(errors.QueueFullError, match="4 requests are being served or wait"):
        await service.submit_all([RequestSpec([i], LONG) for i in range(3)])
    assert service.num_active == 4
    requests += await service.submit_all([RequestSpec([i], LONG) for i in (4, 5)])
    with pytest.raises(errors.QueueFullError, match="6 requests"):
        await service.submit([9], LONG)
    with pytest.raises(errors.InvalidRequestError, match="at most 6"):  # that many never
        await service.submit_all([RequestSpec([i], LONG) for i in range(7)])
    requests[5].cancel()
    gate.open()
    assert await ends(requests[5]) == "cancelled"
    gate.shut()
    requests[5] = await service.submit([5], LONG)
    gate.open()
    for i, request in enumerate(requests):
        assert (await request.result()).token_ids == expected([i], 40)
    with pytest.raises(errors.InvalidRequestError, match="max_waiting is -1"):
        AsyncSpecEngine(engine, max_waiting=-1)


async def test_the_demo_bundle_in_an_event_loop(demo_bundle):
    specs = [RequestSpec(prompt, SamplingParams(max_tokens=12)) for prompt in ("def f(", "import os")]
    options = {"max_num_seqs": 1, "num_threads": 1, "spin": False}
    async with await AsyncSpecEngine.load(demo_bundle, max_waiting=1, **options) as service:
        texts = [(await request.result()).text for request in await service.submit_all(specs)]
        assert texts == [(await service.generate(spec.prompt, spec.params))[0].text for spec in specs]
        assert all(texts)


async def test_long_texts_are_tokenized_one_after_the_other_beside_the_event_loop(engine):
    service, threads = AsyncSpecEngine(engine), set()
    encode = engine.encode

    def noted(prompt):
        threads.add(threading.current_thread().name)
        return encode(prompt)

    await asyncio.gather(*[service.run_aside(lambda i=i: noted([1 + i])) for i in range(6)])
    await service.aclose()
    with pytest.raises(errors.EngineClosedError):
        await service.run_aside(lambda: noted([1]))
    (thread,) = threads
    assert thread != threading.main_thread().name


async def test_forms_that_are_not_ready_are_compiled_beside_the_event_loop(engine, monkeypatch):
    asked = []

    class Grammars:
        def has(self, form):
            return form.regex == "known"

        def compile(self, form, **_):
            asked.append((form.regex, threading.current_thread().name.partition("_")[0]))
            raise errors.InvalidRequestError("it was asked for")

        def close(self):
            pass

    monkeypatch.setitem(engine._builder.__dict__, "grammars", Grammars())
    service = AsyncSpecEngine(engine)
    for text in ("known", "new"):
        with pytest.raises(errors.InvalidRequestError, match="asked for"):
            await service.submit([3], SamplingParams(structured_outputs=StructuredOutputs(regex=text)))
    await service.aclose()
    assert asked == [("known", "MainThread"), ("new", "specexport-forms")]


async def test_owners_take_turns_beside_the_event_loop(engine):
    """What nobody waits for any more is dropped, and an owner's pieces are as many as its requests may be."""
    service = AsyncSpecEngine(engine, max_requests_per_owner=3)
    go, done = threading.Event(), []
    running = asyncio.ensure_future(service.run_aside(lambda: go.wait(60), "a"))
    await asyncio.sleep(0)
    pieces = [
        asyncio.ensure_future(service.run_aside(lambda name=name: done.append(name), name[0]))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    await asyncio.sleep(0)
    with pytest.raises(errors.OwnerLimitError):
        await service.run_aside(lambda: None, "a")
    pieces[1].cancel()
    others = [await service.run_aside(threading.current_thread, "a", lane=lane) for lane in ("brief", "forms")]
    assert len({threading.main_thread(), *others}) == 3  # which wait for none of them
    assert service.has_work_aside
    assert not done
    go.set()
    await asyncio.gather(running, *pieces, return_exceptions=True)
    assert done == ["a1", "b1", "c1", "a3", "b2"]
    with pytest.raises(ZeroDivisionError):
        await service.run_aside(lambda: 1 / 0)
    assert not service.has_work_aside


async def test_a_request_holds_a_place_while_it_is_planned(engine):
    service = AsyncSpecEngine(engine, max_waiting=0, max_requests_per_owner=2)
    rows = engine.max_num_seqs
    with service.place("a"):
        first = await service.submit([1], LONG, owner="a")
        with pytest.raises(errors.OwnerLimitError), service.place("a"):
            pass
        with pytest.raises(errors.OwnerLimitError):
            await service.submit([1], LONG, owner="a")
    others = [await service.submit([1], LONG, owner=str(number)) for number in range(rows - 2)]
    with service.place("b"), pytest.raises(errors.QueueFullError):
        await service.submit([1], LONG, owner="c")
    for request in [first, *others, await service.submit([1], LONG, owner="a")]:
        assert await ends(request) == "length"
    assert not service._held


async def test_what_waits_beside_the_event_loop_ends_when_the_engine_closes(engine):
    service, go = AsyncSpecEngine(engine), threading.Event()
    running = asyncio.ensure_future(service.run_aside(lambda: go.wait(60)))
    waiting = asyncio.ensure_future(service.run_aside(lambda: None))
    await asyncio.sleep(0)
    await service.aclose()
    with pytest.raises(errors.EngineClosedError):
        await waiting
    with pytest.raises(errors.EngineClosedError):
        await service.run_aside(lambda: None, is_taken=True)
    assert service.has_work_aside  # nothing waits for it
    go.set()
    assert await running


async def test_drain_waits_for_what_was_taken_and_refuses_the_rest(engine):
    service = AsyncSpecEngine(engine)
    requests = await service.submit_all([RequestSpec([i], LONG) for i in range(6)])
    draining = asyncio.ensure_future(service.drain())
    await asyncio.sleep(0)
    with pytest.raises(errors.EngineClosedError):
        await service.submit([1])
    assert await draining
    assert [request.handle.result(0).finish_reason for request in requests] == ["length"] * 6
    assert [len(ids_of(await collect(request))) for request in requests] == [40] * 6  # still there to read
    assert await service.drain(0)


async def test_a_drain_that_takes_too_long_cancels_what_is_left(engine):
    gate = Gate(engine)
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


async def test_closing_finishes_what_was_taken_and_may_be_repeated():
    closes = []
    engine = make_engine()
    engine.target.close = lambda: closes.append(None)
    service = AsyncSpecEngine(engine)
    request = await service.submit([5], LONG)
    await asyncio.gather(service.aclose(), service.aclose())
    await service.aclose()
    assert (await request.result()).token_ids == expected([5], 40)
    with pytest.raises(errors.EngineClosedError):
        await service.submit([5])
    with pytest.raises(errors.EngineClosedError):
        engine.submit([5])
    assert len(closes) == 1


async def test_a_close_that_is_cancelled_cancels_what_is_left_and_closes():
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
    with pytest.raises(errors.EngineClosedError):
        engine.submit([5])
    assert_at_rest(engine)


async def test_a_block_finishes_its_requests_and_one_that_fails_cancels_them():
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
        with pytest.raises(errors.EngineClosedError):
            engine.submit([1])


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

    assert [result.token_ids for (result,) in asyncio.run(others())] == [expected([3], 40), expected([4], 40)]
    assert mine.result(60).token_ids == expected([2], 40)
    with pytest.raises(errors.RequestFailedError, match="event loop of this request was closed"):
        lost.handle.result(60)


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


async def test_a_load_that_is_cancelled_closes_what_it_loaded(monkeypatch):
    go, closed = threading.Event(), threading.Event()
    engine = make_engine()
    monkeypatch.setattr(engine, "close", closed.set)
    monkeypatch.setattr(SpecEngine, "load", lambda path, options: go.wait(60) and engine)
    task = asyncio.ensure_future(AsyncSpecEngine.load("engines/any"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await until(closed)

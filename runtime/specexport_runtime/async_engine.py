"""An engine for asyncio services: await a request, iterate over its chunks, cancel it by cancelling the task.

The decoding thread hands chunks over in batches: the event loop is woken once for all that come until it is awake. With
uvloop that is once a round, however many requests stream.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, Unpack, get_args

from specexport_runtime.decoding.handle import RequestHandle
from specexport_runtime.engine import SpecEngine
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import (
    EngineClosedError,
    InvalidRequestError,
    OwnerLimitError,
    QueueFullError,
    SpecexportError,
)
from specexport_runtime.intake.drafting import RequestOptions, RequestSpec, request_specs
from specexport_runtime.requests.results import GenerationResult, Prompt, StreamChunk
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.side_work import SideWork

__all__ = ["AsyncRequest", "AsyncSpecEngine", "ChunkIterator"]

T = TypeVar("T")
P = ParamSpec("P")
Lane = Literal["long", "brief", "forms"]
"""Threads beside the event loop: of long pieces, of those that take milliseconds, and of what compiles forms."""

MAX_AT_A_TIME = 32
_LONG_PROMPT = 2000  # characters; longer texts are tokenized on another thread
_VERY_LONG = 2**15  # characters; those above do not wait for the thread that these keep


class AsyncRequest:
    """One request: iterate over it for its chunks (once), or await its :meth:`result`.

    Cancelling the task that does either cancels the request, as does leaving the iteration early: its row is free
    before the next round.

    Attributes:
        handle: its ``RequestHandle``; None until it is queued.
        keeps: its chunks are wanted.
        owner: whose it is, as ``submit`` was told.
    """

    def __init__(self, service: "AsyncSpecEngine", owner: str = "") -> None:
        self.handle: RequestHandle | None = None
        self.owner = owner
        self._service = service
        self._chunks: deque[StreamChunk] = deque()
        self._news = asyncio.Event()  # there are chunks, or the end
        self._end = asyncio.Event()
        self._cancelled = False
        self._iterated = False
        self._said_cancelled = False
        self.keeps = True

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whichever way."""
        return self._end.is_set()

    def cancel(self) -> None:
        """End the request before the next round; no effect once it is done. Any thread may call it."""
        self._cancelled = True  # first: who queues it on another thread looks here last
        if self.handle is not None:
            self.handle.cancel()

    async def result(self) -> GenerationResult:
        """Wait for the end; returns and raises what :meth:`RequestHandle.result` does.

        Chunks over which no iteration has begun are not kept from now on. Several tasks may wait; if one of them
        is cancelled, the request is.
        """
        if not self._iterated:
            self.keeps = False
            self._chunks.clear()
        try:
            await self._end.wait()
        except BaseException:
            self.cancel()
            raise
        return self._outcome()

    def __aiter__(self) -> "ChunkIterator[StreamChunk]":
        """Chunks one at a time, until the one with a ``finish_reason``; raises what :meth:`result` raises."""
        return self._iterate(deque.popleft)

    def batches(self) -> "ChunkIterator[list[StreamChunk]]":
        """Chunks as they come, up to ``MAX_AT_A_TIME`` of them at a time; otherwise as iterating over the request."""
        return self._iterate(_pop_chunks)

    def _iterate(self, take: "Callable[[deque[StreamChunk]], T]") -> "ChunkIterator[T]":
        if self._iterated:
            raise SpecexportError("the chunks of this request are being read, or were.", "iterate over it once.")
        if not self.keeps:
            raise SpecexportError(
                "the chunks of this request were not kept: its result was awaited.", "iterate first, then ask for it."
            )
        self._iterated = True
        return ChunkIterator(self, take)

    async def wait_for_chunks(self) -> "deque[StreamChunk]":
        """Wait until there are chunks, or the end; for iterators."""
        while not self._chunks and not self.done:
            self._news.clear()
            await self._news.wait()
        if not self._chunks and self._outcome().finish_reason == "cancelled" and not self._said_cancelled:
            self._said_cancelled = True
            self._chunks.append(StreamChunk([], "cancelled", self._outcome().stats))
        return self._chunks

    def _outcome(self) -> GenerationResult:
        assert self.handle is not None  # noqa: S101  # done, so it was queued
        return self.handle.result(0)

    def attach(self, handle: RequestHandle) -> None:
        """It was queued; whatever thread queued it."""
        self.handle = handle
        if self._cancelled:
            handle.cancel()

    def receive(self, item: StreamChunk | None) -> None:
        """Take in a chunk, or the end (event loop only)."""
        if item is not None:
            if self.keeps:
                self._chunks.append(item)
        else:
            self._end.set()
            self._service.forget(self)
        self._news.set()


class ChunkIterator(AsyncIterator[T], Generic[T]):
    """Iterates over a request's chunks. Closing or dropping it before the end cancels the request."""

    def __init__(self, request: AsyncRequest, take: "Callable[[deque[StreamChunk]], T]") -> None:
        self._request = request
        self._take = take

    async def __anext__(self) -> T:
        """The next chunk, or chunks."""
        try:
            chunks = await self._request.wait_for_chunks()
        except BaseException:  # of all that can come here, only the task's cancellation finds it running
            self._request.cancel()
            raise
        if not chunks:
            raise StopAsyncIteration
        return self._take(chunks)

    async def aclose(self) -> None:
        """Cancel the request, unless it is done."""
        self._request.cancel()

    def __del__(self) -> None:
        self._request.cancel()  # takes no lock: the garbage collector may run in any thread


class ChunkListener:
    """The listener of a request: all that the decoding thread knows of it.

    It forgets the request at the end, so that a request and its handle are freed as soon as no reference is left.
    """

    def __init__(self, request: AsyncRequest, queue: "EventLoopQueue") -> None:
        self._request: AsyncRequest | None = request
        self._loop_queue = queue

    def on_chunk(self, chunk: StreamChunk) -> None:
        """Hand a chunk over to the event loop; raises if that was closed, which ends the request."""
        if self._request is None or not self._request.keeps:
            self._loop_queue.check()
        else:
            self._loop_queue.put(self._request, chunk)

    def on_done(self, handle: RequestHandle) -> None:
        """Hand the end over to the event loop, if that was not closed."""
        request, self._request = self._request, None
        if request is not None:
            request.handle = handle
            with suppress(RuntimeError):
                self._loop_queue.put(request, None)


class EventLoopQueue:
    """Carries chunks from the decoding thread to the running event loop, waking it once for all that came meanwhile."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[tuple[AsyncRequest, StreamChunk | None]] = deque()
        self._scheduled = False

    def check(self) -> None:
        """Decoding thread: whether anybody will ever look.

        Raises:
            RuntimeError: the event loop was closed.
        """
        if self.loop.is_closed():
            raise RuntimeError("the event loop of this request was closed.")

    def put(self, request: AsyncRequest, item: StreamChunk | None) -> None:
        """Decoding thread: leave an item; raises as :meth:`check`."""
        self.check()
        self._items.append((request, item))
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # before the items are taken: one that comes now wakes the loop again
        while self._items:
            request, item = self._items.popleft()
            request.receive(item)


def _get_owner(options: RequestOptions) -> str:
    owner = options.get("owner", "")
    return owner if isinstance(owner, str) else ""  # which the engine refuses


def _pop_chunks(chunks: "deque[StreamChunk]") -> list[StreamChunk]:
    return [chunks.popleft() for _ in range(min(len(chunks), MAX_AT_A_TIME))]


class _Load(Protocol[P]):
    async def __call__(
        self,
        path: str | Path,
        options: EngineOptions | None = None,
        max_waiting: int | None = None,
        max_requests_per_owner: int | None = None,
        *args: P.args,
        **changes: P.kwargs,
    ) -> "AsyncSpecEngine": ...


def _with_keywords(record: Callable[P, object]) -> Callable[[Callable[..., Any]], _Load[P]]:  # noqa: ARG001
    """As ``engine_options.with_keywords``, for a loader that has limits of its own."""
    return lambda load: load


class AsyncSpecEngine:
    """A :class:`SpecEngine` for the event loop that runs when this object is made.

    Several may share a ``SpecEngine``, each in an event loop of its own, besides threads that use it directly.

    Args:
        engine: the engine; :meth:`aclose` closes it.
        max_waiting: most requests of this object that may wait for a cache row; None for no limit.
        max_requests_per_owner: most requests of this object that one owner may have, running or waiting; None for no
            limit but that of all.
    """

    def __init__(
        self, engine: SpecEngine, *, max_waiting: int | None = None, max_requests_per_owner: int | None = None
    ) -> None:
        if max_waiting is not None and max_waiting < 0:
            raise InvalidRequestError(f"max_waiting is {max_waiting}.", "give 0 or more, or None for no limit.")
        if max_requests_per_owner is not None and max_requests_per_owner < 1:
            raise InvalidRequestError(
                f"max_requests_per_owner is {max_requests_per_owner}.", "give 1 or more, or None for no limit."
            )
        self.engine = engine
        self.max_waiting = max_waiting
        self.max_requests_per_owner = max_requests_per_owner
        self._loop_queue = EventLoopQueue()
        self._active: set[AsyncRequest] = set()
        self._held: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._admits = True
        self._closing: asyncio.Future[None] | None = None
        self._planned = 0  # places that are held for requests which are being planned
        self._lanes = {lane: SideWork(f"specexport-{lane}") for lane in get_args(Lane)}

    @staticmethod
    @_with_keywords(EngineOptions)
    async def load(
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        max_waiting: int | None = None,
        max_requests_per_owner: int | None = None,
        **changes: Any,
    ) -> "AsyncSpecEngine":
        """Load a bundle without blocking the event loop; options and errors as :meth:`SpecEngine.load`."""
        loading = asyncio.get_running_loop().run_in_executor(None, partial(SpecEngine.load, path, options, **changes))
        try:
            engine = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_close_unwanted)
            raise
        return AsyncSpecEngine(engine, max_waiting=max_waiting, max_requests_per_owner=max_requests_per_owner)

    def __repr__(self) -> str:
        return f"Async{self.engine!r}"

    async def __aenter__(self) -> "AsyncSpecEngine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close: after all requests if the block was left normally, else at once."""
        await self.aclose(None if kind is None else 0)

    @property
    def num_active(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._active)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncRequest:
        """Queue one request; arguments as :meth:`SpecEngine.submit`. If the task is cancelled here, so is the request.

        Raises:
            InvalidRequestError: the request can never be served.
            QueueFullError: too many requests wait; an ``OwnerLimitError`` if too many are of this owner.
            EngineClosedError: the engine is closing.
            EndlessWaitError: the event loop runs in a callback of this very engine.
        """
        spec = RequestSpec(prompt, params or SamplingParams(), reference, options)
        return (await self.submit_all([spec]))[0]

    async def submit_all(self, requests: Sequence[RequestSpec]) -> list[AsyncRequest]:
        """Queue several requests, all or none; errors as :meth:`submit`."""
        owners = Counter(_get_owner(spec.options) for spec in requests)
        self._check_room(len(requests), owners)
        length = sum(len(spec.prompt) + len(spec.reference or ()) for spec in requests)
        forms = [spec.params.structured_outputs for spec in requests if spec.params.structured_outputs is not None]
        compiles = not all(map(self.engine.has_form, forms))
        taken = [AsyncRequest(self, _get_owner(spec.options)) for spec in requests]
        if taken:
            self._active.update(taken)
            self._held.update(owners)
            self._idle.clear()
        try:
            if length > _LONG_PROMPT or compiles:
                lane: Lane = "forms" if compiles else "brief" if length <= _VERY_LONG else "long"
                await self._queue_on_thread(requests, taken, lane)
            else:
                self._queue(requests, taken)
        except asyncio.CancelledError:
            raise  # what was queued, or will be, is cancelled and reports its end
        except BaseException:
            self.forget(*taken)
            raise
        return taken

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Prompt | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Generate for one or many prompts: always a list of results; arguments as :meth:`SpecEngine.generate`.

        All requests are cancelled if the task is, or if one of them fails; errors as :meth:`submit` and
        :meth:`AsyncRequest.result`.
        """
        requests = await self.submit_all(request_specs(prompts, params, references, options))
        try:
            return list(await asyncio.gather(*(request.result() for request in requests)))
        finally:
            for request in requests:
                request.cancel()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reference: Prompt | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[StreamChunk]:
        """Generate for one prompt, a chunk a round; it is queued, or refused as by :meth:`submit`, with the first one.

        Leaving the iteration early cancels the request, as does cancelling the task.
        """
        request = await self.submit(prompt, params, reference=reference, **options)
        try:
            async for chunk in request:
                yield chunk
        finally:
            request.cancel()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answer one conversation; arguments as :meth:`SpecEngine.chat`, errors as :meth:`generate`."""
        encode = partial(self.engine.encode_chat, messages, tools, template_arguments, continue_final_message)
        prompt = await self.run_aside(encode, _get_owner(options), lane="brief")
        return (await self.generate(prompt, params, **options))[0]

    @contextmanager
    def hold_place(self, owner: str = "") -> Iterator[None]:
        """Hold a place among the requests of an owner while one is planned; errors as :meth:`submit`."""
        self._check_room(1, {owner: 1})
        self._held[owner] += 1
        self._planned += 1
        try:
            yield
        finally:
            self._held -= Counter([owner])
            self._planned -= 1

    async def run_aside(
        self, work: Callable[[], T], owner: str = "", *, lane: Lane = "long", is_taken: bool = False
    ) -> T:
        """The result of work on a long text, such as tokenizing it, which must not hold up the event loop.

        One piece of a lane after the other is done, the owners in turns; no lane waits for others. If the task is
        cancelled, a piece that has not begun is dropped. Work for a request that was taken is never refused.

        Raises:
            QueueFullError: as many pieces wait as requests may be there; an ``OwnerLimitError`` if of this owner.
            EngineClosedError: the engine is closing.
        """
        if not is_taken:
            self._check_admits()
            limits = (OwnerLimitError, self.max_requests_per_owner, owner), (QueueFullError, self._max_held, None)
            for kind, limit, whose in limits:
                if limit is not None and self._lanes[lane].num_waiting(whose) >= limit:
                    raise kind(f"{limit} requests wait to be read.", "try again later.")
        result: T = await self._lanes[lane].put(owner, work)
        return result

    @property
    def has_work_aside(self) -> bool:
        """Whether a piece of work is going on that cannot be stopped: the interpreter would wait for it at its end."""
        return any(lane.is_busy for lane in self._lanes.values())

    def stop_admitting(self) -> None:
        """Refuse requests from now on; those that were taken go on."""
        self._admits = False

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until none is active; after ``timeout`` seconds cancel those that are left.

        Returns:
            whether all of them ended by themselves.
        """
        self.stop_admitting()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for request in list(self._active):
                request.cancel()
            await self._idle.wait()
            return False
        return True

    def limit_flush(self, seconds: float) -> None:
        """How long :meth:`aclose` may write kept prefixes to their files."""
        self.engine.flush_s = seconds

    async def aclose(self, timeout: float | None = None) -> None:
        """Finish what was taken (see :meth:`drain`), then close the engine.

        If the task is cancelled here, requests that are left are cancelled and the engine is closed all the same.
        """
        try:
            await self.drain(timeout)
        finally:
            if self._closing is None:
                for lane in self._lanes.values():
                    lane.close()
                self._closing = asyncio.get_running_loop().run_in_executor(None, self.engine.close)
            await asyncio.shield(self._closing)

    def forget(self, *requests: AsyncRequest) -> None:
        """These requests have ended; called by them."""
        ended = self._active.intersection(requests)
        self._active -= ended
        self._held -= Counter(request.owner for request in ended)  # those that have none are left out
        if not self._active:
            self._idle.set()

    @property
    def _max_held(self) -> int | None:
        return None if self.max_waiting is None else self.engine.max_num_seqs + self.max_waiting

    def _check_room(self, count: int, owners: Mapping[str, int]) -> None:
        if asyncio.get_running_loop() is not self._loop_queue.loop:
            raise SpecexportError(
                "this AsyncSpecEngine belongs to another event loop.", "make one in each; they may share a SpecEngine."
            )
        self.engine.check_may_wait("AsyncSpecEngine.submit()")
        self._check_admits()
        limit = self._max_held
        for wanted, most in [(count, limit), *((each, self.max_requests_per_owner) for each in owners.values())]:
            if most is not None and wanted > most:
                raise InvalidRequestError(f"{wanted} requests at once; at most {most} can ever be held.", "send fewer.")
        for owner, wanted in owners.items():
            if self.max_requests_per_owner is not None and wanted > self.max_requests_per_owner - self._held[owner]:
                raise OwnerLimitError(
                    f"{self._held[owner]} requests of one owner are being served or wait, and at most "
                    f"{self.max_requests_per_owner} may.",
                    "try again when one has ended.",
                )
        held = len(self._active) + self._planned
        if limit is not None and count > limit - held:
            raise QueueFullError(f"{held} requests are being served or wait.", "try again later.")

    def _check_admits(self) -> None:
        if not self._admits:
            raise EngineClosedError("the engine takes no more requests.", "send it to another one.")

    def _queue(self, requests: Sequence[RequestSpec], taken: Sequence[AsyncRequest]) -> None:
        """Check and queue; in any thread."""
        handles = self.engine.submit_all(requests, [ChunkListener(request, self._loop_queue) for request in taken])
        for request, handle in zip(taken, handles, strict=True):
            request.attach(handle)

    async def _queue_on_thread(
        self, requests: Sequence[RequestSpec], taken: Sequence[AsyncRequest], name: Lane
    ) -> None:
        """As :meth:`_queue`, on another thread. Where that has begun, cancelling the task cancels the requests."""
        lane, owner = self._lanes[name], taken[0].owner
        queueing = lane.put(owner, partial(self._queue, requests, taken))
        try:
            await asyncio.shield(queueing)
        except asyncio.CancelledError:
            for request in taken:
                request.cancel()
            queueing.add_done_callback(partial(self._forget_refused, taken))
            lane.drop(owner, queueing)
            raise

    def _forget_refused(self, taken: Sequence[AsyncRequest], queueing: "asyncio.Future[None]") -> None:
        if queueing.cancelled() or queueing.exception() is not None:
            self.forget(*taken)


def _close_unwanted(loading: "asyncio.Future[SpecEngine]") -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()

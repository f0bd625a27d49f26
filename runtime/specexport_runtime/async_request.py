"""One request of an ``AsyncSpecEngine``, and how what the decoding thread makes of it gets into the event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from specexport_runtime.errors import SpecexportError
from specexport_runtime.handle import RequestHandle
from specexport_runtime.results import GenerationResult, StreamChunk

if TYPE_CHECKING:
    from specexport_runtime.async_engine import AsyncSpecEngine

T = TypeVar("T")


class AsyncRequest:
    """One request: iterate over it for its chunks (once), or await its :meth:`result`.

    Cancelling the task that does either cancels the request, as does leaving the iteration early: its row is free
    before the next round.

    Attributes:
        handle: its ``RequestHandle``; None until it is queued.
        keeps: its chunks are wanted.
    """

    def __init__(self, owner: "AsyncSpecEngine") -> None:
        self.handle: RequestHandle | None = None
        self._owner = owner
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

        Chunks that nobody has begun to iterate over are not kept from now on. Several tasks may wait; if one of them
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
        """Chunks as they come, all that are there at a time; otherwise as iterating over the request."""
        return self._iterate(_take_all)

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
            self._owner.forget(self)
        self._news.set()


class ChunkIterator(AsyncIterator[T], Generic[T]):
    """Iterates over a request's chunks. Closing or dropping it before the end cancels the request."""

    def __init__(self, request: AsyncRequest, take: "Callable[[deque[StreamChunk]], T]") -> None:
        self._request = request
        self._take = take
        self._loop = asyncio.get_running_loop()

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
        # The garbage collector may run in the decoding thread while that holds its lock: only leave a message here.
        if not self._request.done:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._request.cancel)


class Courier:
    """The listener of a request: all that the decoding thread knows of it.

    It forgets the request at the end, so that a request and its handle are freed as soon as nobody holds them.
    """

    def __init__(self, request: AsyncRequest, mailbox: "Mailbox") -> None:
        self._request: AsyncRequest | None = request
        self._mailbox = mailbox

    def on_chunk(self, chunk: StreamChunk) -> None:
        """Hand a chunk over to the event loop; raises if that was closed, which ends the request."""
        if self._request is None or not self._request.keeps:
            self._mailbox.check()
        else:
            self._mailbox.put(self._request, chunk)

    def on_done(self, handle: RequestHandle) -> None:
        """Hand the end over to the event loop, if that was not closed."""
        request, self._request = self._request, None
        if request is not None:
            request.handle = handle
            with suppress(RuntimeError):
                self._mailbox.put(request, None)


class Mailbox:
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


def _take_all(chunks: "deque[StreamChunk]") -> list[StreamChunk]:
    taken = list(chunks)
    chunks.clear()
    return taken

"""An engine for asyncio services: await a request, iterate over its chunks, cancel it by cancelling the task.

The decoding thread hands chunks over in batches: one wake-up of the event loop a round, however many requests stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Unpack

from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import EngineClosedError, QueueFullError, SpecexportError
from specexport_runtime.handle import RequestHandle
from specexport_runtime.request_spec import RequestSpec
from specexport_runtime.requests import Drafting
from specexport_runtime.results import GenerationResult, Prompt, StreamChunk
from specexport_runtime.sampling import SamplingParams

_LONG_PROMPT = 2000  # characters; longer texts are tokenized on another thread


class AsyncSpecEngine:
    """A :class:`SpecEngine` for one event loop.

    Args:
        engine: the engine; :meth:`aclose` closes it.
        max_waiting: most requests that may wait for a cache row; None for no limit.
    """

    def __init__(self, engine: SpecEngine, *, max_waiting: int | None = None) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._mailbox = _Mailbox()
        self._active: set[AsyncRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._admits = True

    @classmethod
    async def load(cls, path: str | Path, *, max_waiting: int | None = None, **options: Any) -> "AsyncSpecEngine":
        """Load a bundle without blocking the event loop; options and errors as :meth:`SpecEngine.load`."""
        engine = await asyncio.to_thread(SpecEngine.load, path, **options)
        return cls(engine, max_waiting=max_waiting)

    async def __aenter__(self) -> "AsyncSpecEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

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
        **drafting: Unpack[Drafting],
    ) -> "AsyncRequest":
        """Queue one request; arguments as :meth:`SpecEngine.submit`.

        Raises:
            InvalidRequestError: the request can never be served.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine is closing.
        """
        spec = RequestSpec(prompt, params or SamplingParams(), reference, drafting)
        return (await self.submit_all([spec]))[0]

    async def submit_all(self, requests: Seq[RequestSpec]) -> "list[AsyncRequest]":
        """Queue several requests, all or none; errors as :meth:`submit`."""
        self._check_room(len(requests))
        taken = [AsyncRequest(self) for _ in requests]
        self._active.update(taken)
        self._idle.clear()
        try:
            if sum(len(spec.prompt) for spec in requests) > _LONG_PROMPT:
                handles = await asyncio.to_thread(self.engine.submit_all, requests, taken)
            else:
                handles = self.engine.submit_all(requests, taken)
        except BaseException:
            for request in taken:
                self._forget(request)
            raise
        for request, handle in zip(taken, handles, strict=True):
            request.handle = handle
        return taken

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> GenerationResult:
        """Submit one request and wait for its result; cancelled if the task is."""
        request = await self.submit(prompt, params, **options)
        return await request.result()

    def stop_admitting(self) -> None:
        """Refuse requests from now on; those that were taken go on."""
        self._admits = False

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is active; after ``timeout`` seconds cancel those that are left.

        Returns:
            whether all of them ended by themselves.
        """
        self.stop_admitting()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for request in list(self._active):
                request.cancel()
            await self._idle.wait()
            return False
        return True

    async def aclose(self, timeout: float | None = None) -> None:
        """Finish what was taken (see :meth:`drain`), then close the engine."""
        await self.drain(timeout)
        await asyncio.to_thread(self.engine.close)

    def _check_room(self, count: int) -> None:
        if not self._admits:
            raise EngineClosedError("the engine takes no more requests.", "send it to another one.")
        if self.max_waiting is not None:
            room = self.engine.target.num_rows + self.max_waiting - len(self._active)
            if count > room:
                raise QueueFullError(f"{len(self._active)} requests are being served or wait.", "try again later.")

    def _forget(self, request: "AsyncRequest") -> None:
        self._active.discard(request)
        if not self._active:
            self._idle.set()


class AsyncRequest:
    """One request: iterate over it for its chunks (once), or await its :meth:`result`.

    Cancelling the task that does either cancels the request, and its row is free before the next round.
    """

    def __init__(self, owner: AsyncSpecEngine) -> None:
        self.handle: RequestHandle | None = None
        self._owner = owner
        self._mailbox = owner._mailbox  # the two classes are one module
        self._chunks: deque[StreamChunk] = deque()
        self._news = asyncio.Event()
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whichever way."""
        return self._done

    def cancel(self) -> None:
        """End the request before the next round; no effect once it is done."""
        if self.handle is not None:
            self.handle.cancel()

    async def result(self) -> GenerationResult:
        """Wait for the end; returns and raises what :meth:`RequestHandle.result` does."""
        async for _ in self.batches():
            pass
        return self._finished()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        async for chunks in self.batches():
            for chunk in chunks:
                yield chunk
        self._finished()

    async def batches(self) -> AsyncIterator[list[StreamChunk]]:
        """Chunks as they come, all that are there at a time."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._chunks:
                    chunks = list(self._chunks)
                    self._chunks.clear()
                    yield chunks
                if self._done and not self._chunks:
                    return
        finally:
            self.cancel()

    def _finished(self) -> GenerationResult:
        if self.handle is None:
            raise SpecexportError("the request was never queued.")
        return self.handle.result(0)

    # Called in the decoding thread.
    def on_chunk(self, chunk: StreamChunk) -> None:
        """Hand a chunk over to the event loop."""
        self._mailbox.put(self, chunk)

    def on_done(self, handle: RequestHandle) -> None:
        """Hand the end over to the event loop."""
        self.handle = handle
        self._mailbox.put(self, None)

    # Called in the event loop.
    def receive(self, item: StreamChunk | None) -> None:
        """Take in a chunk, or the end."""
        if item is None:
            self._done = True
            self._owner._forget(self)
        else:
            self._chunks.append(item)
        self._news.set()


class _Mailbox:
    """Carries chunks from the decoding thread to the event loop, waking it once for all that came meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[AsyncRequest, StreamChunk | None]] = deque()
        self._scheduled = False

    def put(self, request: AsyncRequest, item: StreamChunk | None) -> None:
        """Decoding thread: leave an item."""
        self._items.append((request, item))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # before the items are taken: one that comes now wakes the loop again
        while self._items:
            request, item = self._items.popleft()
            request.receive(item)

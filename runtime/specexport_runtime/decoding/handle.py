"""What the caller of ``SpecEngine.submit`` holds: a request's stream, its result, and a way to end it."""

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

from specexport_runtime.errors import RequestFailedError, SpecexportError
from specexport_runtime.requests.request import Request, RoundEvent
from specexport_runtime.requests.results import GenerationResult, Prompt, StreamChunk, make_chunk, make_result

Callback = Callable[[StreamChunk], object]


class RequestListener(Protocol):
    """Hears of one request, in the decoding thread: be quick."""

    def on_chunk(self, chunk: StreamChunk) -> None:
        """A round gave tokens; an exception here ends this request alone."""
        ...

    def on_done(self, handle: "RequestHandle") -> None:
        """The request has ended, its :meth:`RequestHandle.result` is there; what this raises is logged."""
        ...


class _Loop(Protocol):
    def cancel(self, handle: "RequestHandle") -> None: ...

    def check_may_wait(self, what: str) -> None: ...


class RequestHandle:
    """One request. Iterate over it for its chunks (once), or ask for its :meth:`result`."""

    def __init__(
        self,
        prompt: Prompt,
        request: Request,  # only the decoding thread touches it before ``done``
        loop: _Loop,
        *,
        stream: bool = False,  # keep chunks for iteration
        callback: Callback | None = None,  # called in the decoding thread; an exception in it ends this request alone
        listener: RequestListener | None = None,
    ) -> None:
        self.prompt = prompt
        self.request = request
        self._loop = loop
        self._callback = callback if listener is None else listener.on_chunk
        self._listener = listener
        self._chunks: SimpleQueue[StreamChunk | None] | None = SimpleQueue() if stream else None
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whichever way."""
        return self._done.is_set()

    def cancel(self) -> None:
        """End the request before the next round and free its row; no effect once it is done."""
        self._loop.cancel(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end, ``timeout`` seconds at the most; None waits for ever.

        The result of a cancelled request is what it had, with ``finish_reason`` ``"cancelled"``. After a TimeoutError
        the request goes on. In callbacks, listeners and observers a request that is not done is an EndlessWaitError. A
        request that an exception ended raises it if it is a SpecexportError, else a RequestFailedError with it as the
        cause.
        """
        if timeout != 0 and not self.done:
            self._loop.check_may_wait("RequestHandle.result()")
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request was not done after {timeout} s.")
        self._raise_error()
        return make_result(self.prompt, self.request)

    def __iter__(self) -> Iterator[StreamChunk]:
        """Chunks as they come, until the one with a ``finish_reason``; raises what :meth:`result` raises.

        In the decoding thread only what is there can be read. Closing the iterator early cancels the request.
        """
        if self._chunks is None:
            raise SpecexportError("this request does not stream.", "use submit() or stream().")
        try:
            while True:
                if self._chunks.empty():
                    self._loop.check_may_wait("iterating over a RequestHandle")
                if (chunk := self._chunks.get()) is None:
                    break
                yield chunk
            self._raise_error()
        finally:
            self.cancel()

    def deliver(self, event: RoundEvent) -> None:
        """Pass on one round (decoding thread only); what the callback raises is raised here too."""
        if self._chunks is None and self._callback is None:
            return
        chunk = make_chunk(event)
        if self._chunks is not None:
            self._chunks.put(chunk)
        if self._callback is not None:
            self._callback(chunk)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the request done (decoding thread only); ``error`` is what ended it."""
        self._error = error or self.request.error
        self._done.set()  # before the stream ends: who has read it to its end finds the result there
        if self._chunks is not None:
            if self._error is None and self.request.finish_reason == "cancelled":
                self._chunks.put(StreamChunk([], "cancelled", self.request.stats))
            self._chunks.put(None)
        if self._listener is None:
            return
        try:
            self._listener.on_done(self)
        except BaseException:  # a closed event loop, for example: the others' requests go on
            logging.getLogger("specexport_runtime").exception("on_done of a request's listener raised.")

    def _raise_error(self) -> None:
        if isinstance(self._error, SpecexportError):
            raise self._error
        if self._error is not None:
            raise RequestFailedError(
                f"the request was ended by {type(self._error).__name__}: {self._error}"
            ) from self._error

"""The thread that decodes. The first request starts it; it waits while nothing is to be done, and ends with its engine.

Requests of any thread join between two rounds. An engine's exception ends the requests that were running. The thread
takes no lock of this module, nor does what a destructor may call (``cancel``, ``close``): orders come by a queue
that is made for that.
"""

import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.decoding.handle import RequestHandle
from specexport_runtime.errors import (
    EndlessWaitError,
    EngineClosedError,
    EngineDeadError,
    RequestFailedError,
    SpecexportError,
)
from specexport_runtime.requests.request import NO_ROW
from specexport_runtime.requests.stats import PaddingStats, PhaseTimes
from specexport_runtime.telemetry.observers import EngineLoad

THREAD_NAME = "specexport-decode"
MAX_FAILURES = 3
"""Steps that fail one after the other, after which an engine counts as dead: a lost GPU fails in all of them."""

Order = Sequence[RequestHandle] | RequestHandle | None
"""What comes to the decoding thread: requests that begin, one that was cancelled, or that it should look around."""

_HINT = "see the log, and load it again in a new process."
_log = logging.getLogger(__name__)
_loops: "weakref.WeakSet[DecodeLoop]" = weakref.WeakSet()
"""Only for forks, of which Python tells functions that cannot be forgotten again."""


def _after_fork() -> None:
    for loop in _loops:
        loop.after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def _end_thread(ref: "weakref.ref[DecodeLoop]", orders: "SimpleQueue[Order]") -> None:
    """A loop was freed, or the interpreter ends: it must not come down around a thread that is inside an engine."""
    if (loop := ref()) is not None:
        loop.close()
    else:
        orders.put(None)


def _decode(ref: "weakref.ref[DecodeLoop]", orders: "SimpleQueue[Order]") -> None:
    """The decoding thread: while it waits it holds nothing of an engine, so that one that nobody has is freed."""
    while True:
        order = orders.get()
        if (loop := ref()) is None or not loop.serve(order):
            return
        del loop, order


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RequestFailedError(f"{type(error).__name__} was raised.")


class DecodeLoop:
    """Runs a decoder for requests that come and go; nothing else may touch the decoder while the loop is busy."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._at_end: Callable[[], object] = lambda: None
        self._handles: dict[int, RequestHandle] = {}  # of requests that have not ended; who takes one out ends it
        self._ending: RequestHandle | None = None
        self._thread: threading.Thread | None = None
        self._closed = False  # no request is taken
        self._over = False  # the thread has ended who was left
        self._defect: str | None = None  # class of what ended it
        self._failures = 0  # steps that failed since one did not
        self._logged: object = None  # what was logged of them
        self._moved = monotonic()  # when a round ended, or work came
        self._orphaned = False  # this process is a child, and requests ran in its parent
        _loops.add(self)
        self._make_queue()

    def _make_queue(self) -> None:
        self._lock = threading.Lock()  # of those who submit
        self._orders: SimpleQueue[Order] = SimpleQueue()
        weakref.finalize(self, _end_thread, weakref.ref(self), self._orders)

    def submit(self, handles: Sequence[RequestHandle]) -> None:
        """Queue requests in order, all for the same round; EngineClosedError, or EndlessWaitError in a fork."""
        self._check_process()
        with self._lock:
            if (error := self._make_refusal) is not None:
                raise error
            if not handles:
                return
            if self._thread is None:
                thread = threading.Thread(
                    target=_decode, args=(weakref.ref(self), self._orders), name=THREAD_NAME, daemon=True
                )
                thread.start()  # if it cannot start, nothing was queued
                self._thread = thread
            if not self._handles:
                self._moved = monotonic()
            self._handles.update({id(handle.request): handle for handle in handles})
            self._orders.put(handles)
        if self._over:  # a destructor closed it, or a defect ended it, since it was asked
            self._finish_all()

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait for requests (``what``) in the decoding thread or a fork: EndlessWaitError."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise EndlessWaitError(
                f"{what} waits for the decoding thread ({THREAD_NAME}), and was called in it.",
                "in callbacks, listeners and observers call submit() only, and wait in another thread.",
            )

    def trouble(self, stuck_after_s: float) -> EngineClosedError | None:
        """What :attr:`SpecEngine.trouble` is; any thread."""
        if self._closed:
            return self._make_refusal
        if self._failures >= MAX_FAILURES:
            return EngineDeadError(f"{self._failures} steps failed, one after the other.", _HINT)
        count, still = len(self._list_open()), monotonic() - self._moved
        if not count or still <= stuck_after_s:
            return None
        return EngineDeadError(f"{count} requests are active, and no round ended for {still:.0f} s.", _HINT)

    def cancel(self, handle: RequestHandle) -> None:
        """End a request before the next round; no effect if it is done, or another process decodes it."""
        if not self._orphaned and not handle.done:
            self._orders.put(handle)

    @property
    def load(self) -> EngineLoad:
        """How busy the decoder is; may be asked from any thread, but in a fork (EndlessWaitError)."""
        self._check_process()
        requests = [handle.request for handle in self._list_open()]
        waiting = [each for each in requests if each.row == NO_ROW and each.finish_reason is None]
        return self.decoder.load._replace(num_waiting=len(waiting))

    def check_idle(self, check: Callable[[], object]) -> None:
        """Call ``check`` while nothing is decoded, nor can begin; SpecexportError if a request has not ended."""
        self._check_process()
        with self._lock:
            if busy := len(self._list_open()):
                raise SpecexportError(f"{busy} requests have not ended.", "wait for them, or cancel them.")
            check()

    def close(self, release: Callable[[], object] = lambda: None) -> None:
        """Cancel everything, refuse requests, wait for the thread unless this is it, ``release``; nothing in a fork."""
        if self._orphaned:
            return
        self._closed = True
        if (thread := self._thread) is threading.current_thread():
            self._at_end = release
            return
        self._orders.put(None)
        if thread is not None:
            thread.join()
        release()

    def after_fork(self) -> None:
        """This process was forked: the thread is not here, and another may have held the lock."""
        self._orphaned = self._orphaned or bool(self._list_open())
        self._thread = None
        self._make_queue()

    def _list_open(self) -> list[RequestHandle]:
        """Requests whose owners have not heard of an end."""
        known = [*self._handles.values(), *([self._ending] if self._ending else [])]
        return [handle for handle in known if not handle.done]

    @property
    def _make_refusal(self) -> EngineClosedError | None:
        """Why no request is taken any more."""
        if self._defect is not None:
            return EngineDeadError(f"this engine was ended by a defect ({self._defect}).", _HINT)
        return EngineClosedError("this engine was closed.", "load it again.") if self._closed else None

    def _check_process(self) -> None:
        if self._orphaned:
            raise EndlessWaitError(
                f"this process was forked while requests ran, and the decoding thread ({THREAD_NAME}) is the parent's.",
                "load the engine in the child, or fork while it is idle.",
            )

    def serve(self, order: Order) -> bool:
        """Decode until nothing is left to do (decoding thread only); False if that is for good."""
        try:
            self._handle_order(order)
            while True:
                while not self._orders.empty():
                    self._handle_order(self._orders.get())
                if self._closed:  # asked after the orders: the one that says so may have been the last
                    break
                if not self.decoder.has_work:
                    return True
                self._run_round()
            for request in [*self.decoder.running, *self.decoder.scheduler.waiting]:
                self.decoder.cancel(request)
        except BaseException as error:  # a defect of ours: no caller may wait for ever, or go on with a broken state
            self._defect, self._closed = type(error).__name__, True
            _log.critical("the decoding thread has ended; its engine takes no more requests", exc_info=error)
        self._over = True
        self._finish_all()
        try:
            self._at_end()
        except BaseException as error:
            _log.error("What an engine had could not be released.", exc_info=error)
        return False

    def _handle_order(self, order: Order) -> None:
        self._moved = monotonic()
        if isinstance(order, RequestHandle):
            if id(order.request) in self._handles:
                self._cancel(order)
        elif order is not None:
            if not self.decoder.has_work:  # idle until now: count anew
                self.decoder.times, self.decoder.padding = PhaseTimes(), PaddingStats()
            for handle in order:
                self.decoder.add(handle.request)

    def _run_round(self) -> None:
        try:
            events = self.decoder.step()
        except BaseException as error:  # the engine's: whatever it is, the requests in flight end with it
            self._fail(error)
            return
        finally:
            self._moved = monotonic()
        self._failures, self._logged = 0, None
        for event in events:
            handle = self._handles.get(id(event.request))
            if handle is None:
                continue
            try:
                if event.tokens:
                    handle.deliver(event)
            except BaseException as error:  # the callback's: this request alone ends
                self._cancel(handle, error)
                continue
            if event.request.finish_reason is not None:
                self._finish(handle)

    def _fail(self, error: BaseException) -> None:
        """A step, or what belongs to one, raised: the requests that ran end with it; if none did, the next one does."""
        self._failures += 1
        stack = type(error), {(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)}
        if stack != self._logged:
            self._logged = stack
            _log.error("A step failed, and what ran ends with it.", exc_info=error)
        self.decoder.fail(_as_exception(error))
        # Requests that ended in this very step too: their last tokens were not handed out.
        ended = [each for each in list(self._handles.values()) if each.request.finish_reason is not None]
        for handle in ended:
            self._finish(handle, handle.request.error or error)
        if not ended and (request := next(iter(self.decoder.scheduler.waiting), None)) is not None:
            self._cancel(self._handles[id(request)], error)

    def _cancel(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        """End a request, for ``error`` or its owner."""
        try:
            self.decoder.cancel(handle.request, None if error is None else _as_exception(error))
        except BaseException as broken:  # its row could not be given back
            self._finish(handle, error)
            self._fail(broken)
        self._finish(handle, error)

    def _finish_all(self) -> None:
        """The thread is over: whoever is left hears of it."""
        error = None if self._defect is None else self._make_refusal
        for handle in list(self._handles.values()):
            if error is None:
                handle.request.end("cancelled")
            self._finish(handle, error and (handle.request.error or error))

    def _finish(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        """The end of a request, in whichever way: the observers hear of it, then its owner, each of them once."""
        self._ending = handle
        if self._handles.pop(id(handle.request), None) is not None:
            if error is not None:
                handle.request.end("error", _as_exception(error))
            self.decoder.observers.notify_finish(handle.request)
            handle.finish(error)
        self._ending = None

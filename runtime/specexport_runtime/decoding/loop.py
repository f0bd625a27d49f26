"""The thread that decodes. It lives while there is work: the first request starts it, the last one ends it.

Requests of any thread join between two rounds. An engine's exception ends the requests that were running.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.decoding.handle import RequestHandle
from specexport_runtime.errors import EndlessWaitError, EngineClosedError, SpecexportError
from specexport_runtime.requests.stats import PaddingStats, PhaseTimes
from specexport_runtime.watch.observe import EngineLoad

THREAD_NAME = "specexport-decode"

_loops: "weakref.WeakSet[DecodeLoop]" = weakref.WeakSet()
"""Only for forks, of which Python tells functions that cannot be forgotten again."""


def _after_fork() -> None:
    for loop in _loops:
        loop.after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def _close_at_exit(loop: "weakref.ref[DecodeLoop]") -> None:
    if (alive := loop()) is not None:
        alive.close()


class DecodeLoop:
    """Runs a decoder for requests that come and go; nothing else may touch the decoder while the loop is busy."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._at_end: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._submitted: list[RequestHandle] = []
        self._cancelled: list[RequestHandle] = []
        self._handles: dict[int, RequestHandle] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._orphaned = False  # this process is a child, and the thread stayed in its parent
        _loops.add(self)
        # The interpreter must not come down around a thread that is inside an engine.
        weakref.finalize(self, _close_at_exit, weakref.ref(self))

    def submit(self, handles: Sequence[RequestHandle]) -> None:
        """Queue requests, in order; all of them join before the same round.

        A closed loop raises EngineClosedError; a process that was forked while requests ran, EndlessWaitError.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise EngineClosedError("this engine was closed, or ended by a defect.", "load it again.")
            if self._thread is None and handles:
                thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
                thread.start()  # it waits for the lock; if it cannot start, nothing was queued
                self._thread = thread
            self._submitted.extend(handles)

    def check_may_wait(self, what: str) -> None:
        """Refuse to wait for requests (``what``) in the decoding thread or a fork: EndlessWaitError."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise EndlessWaitError(
                f"{what} waits for the decoding thread ({THREAD_NAME}), and was called in it.",
                "in callbacks, listeners and observers call submit() only, and wait in another thread.",
            )

    def cancel(self, handle: RequestHandle) -> None:
        """End a request before the next round; no effect if it is done, or another process decodes it."""
        if self._orphaned:
            return
        with self._lock:
            if not handle.done:
                self._cancelled.append(handle)

    @property
    def load(self) -> EngineLoad:
        """How busy the decoder is; may be asked from any thread, but in a fork (EndlessWaitError)."""
        self._check_process()
        with self._lock:  # no request is between the two queues
            load = self.decoder.load
            return load._replace(num_waiting=load.num_waiting + len(self._submitted))

    def check_idle(self, check: Callable[[], object]) -> None:
        """Call ``check`` while nothing is decoded, nor can begin; SpecexportError if a request has not ended."""
        self._check_process()
        with self._lock:
            busy = len(self._handles) + len(self._submitted)
            if busy:
                raise SpecexportError(f"{busy} requests have not ended.", "wait for them, or cancel them.")
            check()

    def close(self, release: Callable[[], object] = lambda: None) -> None:
        """Cancel everything and wait for the thread to end, then call ``release``. Requests are refused from now on.

        In the decoding thread itself it returns at once; in a fork it does nothing, as the engines stayed in the
        parent.
        """
        if self._orphaned:
            return
        with self._lock:
            self._closed = True
            self._cancelled.extend([*self._handles.values(), *self._submitted])
            thread = self._thread
            if thread is threading.current_thread():
                self._at_end = release
                return
        if thread is not None:
            thread.join()
        release()

    def after_fork(self) -> None:
        """This process was forked: a thread of the parent may have held the lock, and none of them is here."""
        self._lock = threading.Lock()
        self._orphaned = self._orphaned or self._thread is not None

    def _check_process(self) -> None:
        if self._orphaned:
            raise EndlessWaitError(
                f"this process was forked while requests ran, and the decoding thread ({THREAD_NAME}) is the parent's.",
                "load the engine in the child, or fork while it is idle.",
            )

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._round()
        except BaseException as error:  # a defect of ours: no caller may wait for ever, or go on with a broken state
            with self._lock:
                self._closed = True
                left, self._submitted = [*self._handles.values(), *self._submitted], []
                self._handles.update({id(handle.request): handle for handle in left})
            for handle in left:
                self._finish(handle, error)
            with self._lock:
                self._thread = None
            raise
        finally:
            if self._at_end is not None:
                self._at_end()

    def _take_orders(self) -> bool:
        """Take in what was submitted and cancelled; False, and the thread is over, if nothing is left to do."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            if submitted and not self._handles:  # idle until now: count anew
                self.decoder.times, self.decoder.padding = PhaseTimes(), PaddingStats()
            for handle in submitted:
                self._handles[id(handle.request)] = handle
                self.decoder.add(handle.request)
            if not submitted and not self._handles:
                self._thread = None
                return False
        for handle in cancelled:
            if id(handle.request) in self._handles:
                self.decoder.cancel(handle.request)
                self._finish(handle)
        return True

    def _round(self) -> None:
        if not self.decoder.has_work:
            return
        try:
            events = self.decoder.step()
        except Exception as error:  # the engine's: whatever it is, the requests in flight end with it
            self.decoder.fail(error)
            # Requests that ended in this very step too: their last tokens were not handed out.
            for ended in [each for each in self._handles.values() if each.request.finish_reason is not None]:
                self._finish(ended, error)
            return
        for event in events:
            handle = self._handles.get(id(event.request))
            if handle is None:
                continue
            try:
                if event.tokens:
                    handle.deliver(event)
            except Exception as error:  # the callback's: this request alone ends
                self.decoder.cancel(event.request, error)
                self._finish(handle, error)
                continue
            if event.request.finish_reason is not None:
                self._finish(handle)

    def _finish(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        """The end of a request, in whichever way: the observers hear of it, then its owner, each of them once."""
        self._handles.pop(id(handle.request))
        if error is not None:
            handle.request.end("error", error if isinstance(error, Exception) else None)
        self.decoder.observers.request_done(handle.request)
        handle.finish(error)

"""The thread that decodes. It lives while there is work: the first request starts it, the last one ends it.

Requests of any thread join the running batch between two rounds. What a request's callback raises ends that request;
what an engine raises ends the requests that were running, and the next ones start afresh.
"""

import atexit
import threading
import weakref
from collections.abc import Sequence as Seq

from specexport_runtime.decoder import Decoder
from specexport_runtime.errors import EngineClosedError
from specexport_runtime.handle import RequestHandle
from specexport_runtime.stats import PaddingStats, PhaseTimes


def _close_at_exit(loop: "weakref.ref[DecodeLoop]") -> None:
    if (alive := loop()) is not None:
        alive.close()


class DecodeLoop:
    """Runs a decoder for requests that come and go.

    Args:
        decoder: what to run; nobody else may touch it while the loop is busy.
        check: assert the decoder's invariants after every round (slow; for tests).
    """

    def __init__(self, decoder: Decoder, *, check: bool = False) -> None:
        self.decoder = decoder
        self._check = check
        self._lock = threading.Lock()
        self._submitted: list[RequestHandle] = []
        self._cancelled: list[RequestHandle] = []
        self._handles: dict[int, RequestHandle] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        # The interpreter must not come down around a thread that is inside an engine.
        atexit.register(_close_at_exit, weakref.ref(self))

    def submit(self, handles: Seq[RequestHandle]) -> None:
        """Queue requests, in order; all of them join before the same round.

        Raises:
            EngineClosedError: the loop was closed.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("this engine was closed, or ended by a defect.", "load it again.")
            self._submitted.extend(handles)
            if self._thread is None and handles:
                self._thread = threading.Thread(target=self._run, name="specexport-decode", daemon=True)
                self._thread.start()

    def cancel(self, handle: RequestHandle) -> None:
        """End a request before the next round; no effect if it is done."""
        with self._lock:
            if not handle.done:
                self._cancelled.append(handle)

    def close(self) -> None:
        """Cancel everything and wait for the thread to end. Requests are refused from now on."""
        with self._lock:
            self._closed = True
            self._cancelled.extend([*self._handles.values(), *self._submitted])
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._round()
        except BaseException as error:  # a defect of ours: nobody may wait for ever, or go on with a broken state
            with self._lock:
                self._closed = True
                left, self._handles, self._thread = list(self._handles.values()), {}, None
                left += self._submitted
                self._submitted = []
            for handle in left:
                handle.finish(error)
            raise

    def _take_orders(self) -> bool:
        """Take in what was submitted and cancelled; False, and the thread is over, if nothing is left to do."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            if submitted and not self._handles:  # idle until now: count anew
                self.decoder.times, self.decoder.padding = PhaseTimes(), PaddingStats()
            for handle in submitted:
                self._handles[id(handle.sequence)] = handle
            if not submitted and not self._handles:
                self._thread = None
                return False
        for handle in submitted:
            self.decoder.add(handle.sequence)
        for handle in cancelled:
            if not handle.done:
                self.decoder.cancel(handle.sequence)
                self._finish(handle)
        return True

    def _round(self) -> None:
        if not self.decoder.has_work:
            return
        try:
            events = self.decoder.step()
            if self._check:
                self.decoder.check()
        except Exception as error:  # the engine's: whatever it is, the requests in flight end with it
            for seq in self.decoder.fail(error):
                self._finish(self._handles[id(seq)])
            return
        for event in events:
            handle = self._handles.get(id(event.sequence))
            if handle is None:
                continue
            try:
                if event.tokens:
                    handle.deliver(event)
            except Exception as error:  # the callback's: this request alone ends
                self.decoder.cancel(event.sequence)
                self._finish(handle, error)
                continue
            if event.sequence.finish_reason is not None:
                self._finish(handle)

    def _finish(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        self._handles.pop(id(handle.sequence), None)
        handle.finish(error)

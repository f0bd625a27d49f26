"""What an engine tells those who watch it: metrics, traces. Watching never changes what is generated."""

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request, RoundEvent


class RoundRecord(NamedTuple):
    """One step of the engine.

    Attributes:
        events: what it did for each request that got tokens or failed.
        prompt_tokens: tokens of prompts that it fed.
        seconds: it took, drafting included.
        plain_seconds: a round of plain decoding of the same rows would have taken, one token each; None if that is not
            known.
        reread_tokens: of ``prompt_tokens``, those of paused requests that were read before.
        preemptions: requests that were paused before it.
    """

    events: "Sequence[RoundEvent]"
    prompt_tokens: int
    seconds: float
    plain_seconds: float | None = None
    reread_tokens: int = 0
    preemptions: int = 0

    @property
    def saved_seconds(self) -> float | None:
        """Seconds saved against plain decoding; negative if the round lost time; None where that is not known.

        Plain decoding gives one token a row and round, so the tokens of this round would have taken it as many rounds
        as each row got on average. Unknown for steps that fed prompts too.
        """
        rows = [event for event in self.events if event.tokens]
        if self.plain_seconds is None or self.prompt_tokens or not rows:
            return None
        return self.plain_seconds * sum(len(event.tokens) for event in rows) / len(rows) - self.seconds


class EngineObserver(Protocol):
    """Watches an engine. All calls come from the decoding thread, between rounds: be quick.

    What an observer raises is logged once, and the observer is not called again; requests go on.
    """

    def on_round(self, record: RoundRecord) -> None:
        """A step was executed."""
        ...

    def on_finish(self, request: "Request") -> None:
        """A request ended, in whichever way; see its ``finish_reason``, ``stats`` and ``error``."""
        ...


class Observers:
    """The observers of one engine. False while there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._each: tuple[EngineObserver, ...] = ()
        self.dropped = 0  # that raised

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, observer: EngineObserver) -> None:
        """Call ``observer`` from now on (any thread)."""
        with self._lock:
            self._each = (*self._each, observer)

    def notify_round(self, record: RoundRecord) -> None:
        """Tell all of a step."""
        for observer in self._each:
            self._notify(observer, "on_round", record)

    def notify_finish(self, request: "Request") -> None:
        """Tell all of the end of a request."""
        for observer in self._each:
            self._notify(observer, "on_finish", request)

    def _notify(self, observer: EngineObserver, what: str, news: object) -> None:
        try:
            getattr(observer, what)(news)
        except BaseException:  # even that there is no such method: who watches must not stop what is watched
            self.dropped += 1
            with self._lock:
                self._each = tuple(each for each in self._each if each is not observer)
            logging.getLogger("specexport_runtime").exception(
                "an observer (%s) raised; it is not called any more.", type(observer).__name__
            )


class EngineLoad(NamedTuple):
    """How busy an engine is, at the moment of asking; while it decodes, a request on its way may not be counted.

    Attributes:
        num_running: requests that hold a cache row.
        num_waiting: requests that wait for one.
        max_num_seqs: cache rows.
        kv_entries: committed cache entries of the target.
        kv_capacity: cache entries that the rows can hold together.
        num_prefixes: texts that are kept in rows where no request runs.
        prefix_entries: cache entries of these.
        kv_bytes_resident: memory of the cache rows of all models that was written to; 0 where that is not known.
        kv_bytes_reserved: memory that running requests may come to need, and that of texts that are kept for good.
        kv_bytes_budget: bound of both; None where none was set.
    """

    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_entries: int
    kv_capacity: int
    num_prefixes: int = 0
    prefix_entries: int = 0
    kv_bytes_resident: int = 0
    kv_bytes_reserved: int = 0
    kv_bytes_budget: int | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the cache that is in use, 0 to 1: of the budget what is reserved, without one of the entries."""
        if self.kv_bytes_budget:
            return self.kv_bytes_reserved / self.kv_bytes_budget
        return self.kv_entries / self.kv_capacity if self.kv_capacity else 0.0

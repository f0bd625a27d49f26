"""What is known of a request while it is answered: its log line and its trace are made of it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexport_runtime.requests.request import Request

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are asked all the time: not traced, and logged only at DEBUG unless they fail in a way not their job."""


@dataclass
class RequestLog:
    """What is known of a request, for its log line and its trace; ``request.state.log``."""

    began: float = field(default_factory=time.perf_counter)  # when it came, seconds of the monotonic clock
    model: str | None = None  # that it asked for, once that is checked
    streamed: bool = False
    user: str | None = None  # the parameter ``user``
    error_code: str | None = None  # the ``code`` of the error that answered it
    requests: "list[Request]" = field(default_factory=list)  # one a choice
    status: int | None = None  # of the answer, once it has begun; 499 if the client went away before the end
    trace_id: str | None = None

    def follow(self, requests: "Iterable[Request]") -> None:
        """Note what the engine generates for this request; read only when the request has ended."""
        self.requests.extend(requests)

    @property
    def finish_reasons(self) -> list[str]:
        """How the choices ended, each way once; one that was still going on is about to be cancelled."""
        return list(dict.fromkeys(request.finish_reason or "cancelled" for request in self.requests))

    def total(self, name: str) -> int:
        """Sum of a counter of ``RequestStats`` over the choices, a prompt that several share counted for each."""
        return sum(getattr(request.stats, name) for request in self.requests)

    @property
    def queued_s(self) -> float | None:
        """Longest that a choice waited for a cache row; None if none got one."""
        waits = [stats.queued_s for stats in (s.stats for s in self.requests) if stats.start_time > stats.submit_time]
        return max(waits, default=None)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any choice."""
        times = [request.stats.first_token_time for request in self.requests]
        return min((at - self.began for at in times if at is not None), default=None)

    def generation(self) -> dict[str, Any]:
        """The fields of a request that reached the engine."""
        if not self.requests:
            return {}
        errors = [request.error for request in self.requests if request.error is not None]
        return {
            "streamed": self.streamed,
            "choices": len(self.requests),
            "prompt_tokens": self.total("num_prompt_tokens"),
            "generated_tokens": self.total("num_generated_tokens"),
            "finish_reasons": self.finish_reasons,
            **{name: self.total(name) for name in ("rounds", "drafted", "accepted")},
            "queued_ms": to_milliseconds(self.queued_s),
            "ttft_ms": to_milliseconds(self.first_token_s),
            "error": type(errors[0]).__name__ if errors else None,
        }


def to_milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds, rounded for a log line."""
    return None if seconds is None else round(1000 * seconds, 3)

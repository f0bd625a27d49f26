"""The log line of a request: who asked what, how it ended, and what it cost. Never what was asked or answered."""

import contextlib
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.log_format import current_state, fields, log_config
from specexport_runtime.server.tracing import Tracing

if TYPE_CHECKING:
    from specexport_runtime.sequences.sequence import Sequence

__all__ = ["AccessLog", "RequestLog", "add_logging", "log_config"]

CLIENT_GONE = 499
"""As nginx calls it: the client closed the connection before it had its answer."""
PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are asked all the time: logged only at DEBUG, unless they fail in a way that is not their job."""

_access = logging.getLogger("specexport.access")
_ERROR_BODY_BYTES = 10_000


@dataclass
class RequestLog:
    """What is known of a request, for its log line and its trace; ``request.state.log``.

    Attributes:
        began: when it came, on the monotonic clock.
        model: name of the model that it asked for, once that is checked.
        streamed: it asked for a stream.
        user: the parameter ``user``.
        error_code: the ``code`` of an error that it was answered with.
        sequences: what the engine generates for it, one a choice.
        status: of the answer, once it has begun; 499 if the client went away before the end.
        trace_id: of its trace, if there is one.
    """

    began: float = field(default_factory=time.perf_counter)
    model: str | None = None
    streamed: bool = False
    user: str | None = None
    error_code: str | None = None
    sequences: "list[Sequence]" = field(default_factory=list)
    status: int | None = None
    trace_id: str | None = None

    def follow(self, sequences: "Iterable[Sequence]") -> None:
        """Note what the engine generates for this request; read only when the request has ended."""
        self.sequences.extend(sequences)

    @property
    def finish_reasons(self) -> list[str]:
        """How the choices ended, each way once; one that was still going on is about to be cancelled."""
        return list(dict.fromkeys(sequence.finish_reason or "cancelled" for sequence in self.sequences))

    def total(self, name: str) -> int:
        """Sum of a counter of ``SequenceStats`` over the choices, a prompt that several share counted for each."""
        return sum(getattr(sequence.stats, name) for sequence in self.sequences)

    @property
    def queued_s(self) -> float | None:
        """Longest that a choice waited for a cache row; None if none got one."""
        waits = [stats.queued_s for stats in (s.stats for s in self.sequences) if stats.start_time > stats.submit_time]
        return max(waits, default=None)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any choice."""
        times = [sequence.stats.first_token_time for sequence in self.sequences]
        return min((at - self.began for at in times if at is not None), default=None)

    def generation(self) -> dict[str, Any]:
        """The fields of a request that reached the engine."""
        if not self.sequences:
            return {}
        errors = [sequence.error for sequence in self.sequences if sequence.error is not None]
        return {
            "streamed": self.streamed,
            "choices": len(self.sequences),
            "prompt_tokens": self.total("num_prompt_tokens"),
            "generated_tokens": self.total("num_generated_tokens"),
            "finish_reasons": self.finish_reasons,
            "rounds": self.total("rounds"),
            "drafted": self.total("drafted"),
            "accepted": self.total("accepted"),
            "queued_ms": _milliseconds(self.queued_s),
            "ttft_ms": _milliseconds(self.first_token_s),
            "error": type(errors[0]).__name__ if errors else None,
        }


def add_logging(app: FastAPI, config: ServerConfig) -> None:  # noqa: ARG001  # the format is set by `log_config`
    """Log and trace every request; call it after everything else that is added, so that this comes first."""
    app.add_middleware(Tracing)
    app.add_middleware(AccessLog)


class AccessLog:
    """ASGI middleware: one line a request, when its last byte was sent or its client has gone.

    Args:
        app: what comes next.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write its line when it has ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        log = RequestLog()
        scope.setdefault("state", {})["log"] = log
        current_state.set(scope["state"])  # of this request's task alone
        exchange = _Exchange(log, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except BaseException:
            exchange.failed = True
            raise
        finally:
            exchange.end(scope)


class _Exchange:
    """Watches a request and its answer pass by."""

    def __init__(self, log: RequestLog, receive: Receive, send: Send) -> None:
        self._log, self._receive, self._send = log, receive, send
        self._complete = self._gone = self.failed = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self._gone = True
            self._log.status = CLIENT_GONE
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._gone:
            self._log.status = message["status"]
        elif message["type"] == "http.response.body":
            self._note_error(message.get("body", b""))
            self._complete = self._complete or not message.get("more_body", False)
        await self._send(message)

    def _note_error(self, body: bytes) -> None:
        """The code of an error body, whoever wrote it."""
        if self._log.error_code is not None or (self._log.status or 0) < 400 or len(body) > _ERROR_BODY_BYTES:
            return
        with contextlib.suppress(ValueError, TypeError, KeyError):
            error = json.loads(body)["error"]
            self._log.error_code = str(error["code"] or error["type"])

    def end(self, scope: Scope) -> None:
        """Write the line."""
        log, state = self._log, scope["state"]
        if log.status is None:  # nothing was sent
            log.status = 500 if self.failed else state.get("status", CLIENT_GONE)
        is_probe = scope["path"] in PROBES and log.status in (200, 401, 503)
        defect = log.status >= 500 and log.status not in (503, 504)
        failed = defect or self.failed or any(sequence.error is not None for sequence in log.sequences)
        level = logging.ERROR if failed else logging.DEBUG if is_probe else logging.INFO
        if _access.isEnabledFor(level):
            _access.log(level, "request", extra=fields(**_line(scope, log)))


def _line(scope: Scope, log: RequestLog) -> dict[str, Any]:
    client = scope.get("client")
    return {
        "request_id": scope["state"].get("request_id"),
        "trace_id": log.trace_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": log.status,
        "client": client[0] if client else None,
        "duration_ms": _milliseconds(time.perf_counter() - log.began),
        "model": log.model,
        "user": log.user,
        **log.generation(),
        "error_code": log.error_code,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)

"""The log line of a request: who asked what, how it ended, and what it cost. Never what was asked or answered."""

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport_runtime.server.log_format import current_state, log_fields
from specexport_runtime.server.request_log import PROBES, RequestLog, to_milliseconds

CLIENT_GONE = 499
"""As nginx calls it: the client closed the connection before it had its answer."""

_access = logging.getLogger("specexport.access")


class AccessLog:
    """ASGI middleware: one line a request, when its last byte was sent or its client has gone."""

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
        exchange = _LoggedExchange(log, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except BaseException:
            exchange.failed = True
            raise
        finally:
            exchange.end(scope)


class _LoggedExchange:
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
            self._complete = self._complete or not message.get("more_body", False)
        await self._send(message)

    def end(self, scope: Scope) -> None:
        """Write the line."""
        log, state = self._log, scope["state"]
        if log.status is None:  # nothing was sent
            log.status = 500 if self.failed else state.get("status", CLIENT_GONE)
        is_probe = scope["path"] in PROBES and log.status in (200, 401, 503)
        defect = log.status >= 500 and log.status not in (503, 504)
        failed = defect or self.failed or any(sequence.error is not None for sequence in log.requests)
        level = logging.ERROR if failed else logging.DEBUG if is_probe else logging.INFO
        if _access.isEnabledFor(level):
            _access.log(level, "request", extra=log_fields(**_build_line(scope, log)))


def _build_line(scope: Scope, log: RequestLog) -> dict[str, Any]:
    client = scope.get("client")
    return {
        "request_id": scope["state"].get("request_id"),
        "trace_id": log.trace_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": log.status,
        "client": client[0] if client else None,
        "duration_ms": to_milliseconds(time.perf_counter() - log.began),
        "model": log.model,
        "user": log.user,
        **log.generation(),
        "error_code": log.error_code,
    }

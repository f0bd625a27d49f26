"""What every request goes through before a route sees it, and every answer on its way out.

Plain ASGI: starlette's ``BaseHTTPMiddleware`` would cost a queue and a task switch for each chunk of a stream.
"""

import asyncio
import logging
import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport_runtime.server.admission import BODY_PATHS, Admission, ClientGoneError, has_body, read_body, replay
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import (
    ApiError,
    as_api_error,
    is_messages_request,
    request_timeout_error,
    unavailable_error,
)
from specexport_runtime.server.log_format import log_fields
from specexport_runtime.server.state import ServerState

_log = logging.getLogger("specexport.server")

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}
"""Headers of every answer that does not set them itself."""

GRACE_S = 1.0
"""A route ends a late request itself, more gently: it gets so much longer."""


class Guard:
    """ASGI middleware: request id, admission, bounded body, deadline, headers, and an answer to all that is raised."""

    def __init__(self, app: ASGIApp, config: ServerConfig, state: ServerState) -> None:
        self.app, self._config, self._state = app, config, state
        self._admission = Admission(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._state, int(self._config.keep_alive_timeout_s))
        try:
            scope["state"]["owner"] = self._admission.check(scope, self._state)
            if scope["method"] == "POST" and scope["path"] in BODY_PATHS and has_body(scope["headers"]):
                receive = replay(await read_body(receive, self._config), receive)
            await self._run(exchange, receive)
        except ClientGoneError:
            scope["state"]["status"] = 499  # as nginx logs it; the client is gone
        except Exception as error:
            await exchange.answer(error, receive)

    async def _run(self, exchange: "_Exchange", receive: Receive) -> None:
        limit = self._config.request_timeout_s
        deadline = asyncio.timeout(limit + GRACE_S)
        try:
            async with deadline:
                await self.app(exchange.scope, receive, exchange.send)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise request_timeout_error(limit) from error


class _Exchange:
    """One request and its answer; its headers say for how many seconds the connection may rest after it."""

    def __init__(self, scope: Scope, send: Send, state: ServerState, rest_s: int) -> None:
        self.scope = scope
        self._send, self._server, self._rest_s = send, state, rest_s
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._state["request_id"] = get_request_id(scope)

    async def send(self, message: Message) -> None:
        """Pass on a part of the answer; its head gets the headers that every answer has."""
        if message["type"] == "http.response.start":
            self._state["status"] = message["status"]
            message = {**message, "headers": self._complete(message.get("headers", ()))}
        await self._send(message)

    def _complete(self, headers: Any) -> list[tuple[bytes, bytes]]:
        given = {name.lower() for name, _ in headers}
        more = [(name, value) for name, value in _HEADERS.items() if name not in given]
        names = (b"x-request-id", b"request-id")[: 1 + is_messages_request(self.scope)]
        more += [(name, self._state["request_id"].encode()) for name in names]
        keeps_alive = self._state.get("keeps_alive")  # not there behind another server's connections
        if b"connection" in given:
            pass
        elif self._server.draining or (keeps_alive is not None and not keeps_alive()):
            more.append((b"connection", b"close"))  # the next request should go elsewhere
        elif self._rest_s and keeps_alive is not None:
            more += [(b"connection", b"keep-alive"), (b"keep-alive", b"timeout=%d" % self._rest_s)]
        return [*headers, *more]

    async def answer(self, error: Exception, receive: Receive) -> None:
        """Answer with an error, or cut the connection if an answer has begun."""
        told = as_api_error(error)
        if told.status == 500:  # a client hears that it happened; this says what
            _log.error("A request failed.", exc_info=error, extra=log_fields(request_id=self._state["request_id"]))
        if "status" in self._state:
            abort = self._state.get("abort_connection")
            if abort is None:
                raise error
            abort()
            return
        count_refused_request(self._state.get("served", self._server), told)
        await told.response(self.scope)(self.scope, receive, self.send)


def get_request_id(scope: Scope) -> str:
    """The client's ``X-Request-Id`` if it is sane, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def count_refused_request(state: ServerState, error: ApiError) -> None:
    """Count a request that never reached the engine."""
    if state.metrics is not None and (error.status < 499 or error.status == 503):
        state.metrics.count_refused(error.code or f"http_{error.status}")


async def refuse_overload(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of connections above the limit."""
    error = unavailable_error("too_many_connections", "The server has as many connections as it may have.")
    error.headers["Connection"] = "close"
    await error.response(scope)(scope, receive, send)

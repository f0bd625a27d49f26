"""One client's connection, below HTTP: how many there are, how long and how large the head of a request may be.

uvicorn with httptools has none of these limits: a client could send a head for ever, never read its answer, or hold
more requests in one connection than the server answers. This protocol closes such connections.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specexport_runtime.server.config import ServerConfig

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 32 * 1024
LINGER_S = 5.0
"""How long what is left of a request is read and thrown away after its answer, so that the client gets to see that."""
KEEP_ALIVE_GRACE_S = 1.0
"""How much longer a connection may rest than its client was told: what is sent at the last moment is on its way."""
LAST_LOOK_S = 0.01
SPARE_CONNECTIONS = 64
"""Connections above the limit that get an answer; any more are cut off."""

_ANY_LENGTH = 2**62
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits."""

    def __init__(
        self,
        *args: Any,
        settings: ServerConfig,
        refuse_overload: ASGIApp,  # answers connections above the limit
        # the server's connections that wait for a request, or for the rest of its head; oldest first
        resting: "dict[BoundedProtocol, None]",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._settings, self._overloaded, self._resting = settings, refuse_overload, resting
        self.timeout_keep_alive = settings.keep_alive_timeout_s + KEEP_ALIVE_GRACE_S  # type: ignore[assignment]
        self._incoming: asyncio.TimerHandle | None = None  # what arrives must be complete by then
        self._unread: asyncio.TimerHandle | None = None  # what was sent must be read by then
        self._in_head = self._in_message = False
        self._head_bytes = self._begun = 0
        self._deaf = False

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Take a connection, if need be in the place of one that rests or whose head is slow, or turn it away."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._evict_waiting_connection()
        above = len(self.connections) - self._settings.max_connections
        if above > SPARE_CONNECTIONS:
            transport.abort()
            return
        if above > 0:
            self.app = self._overloaded
            self._start_deadline(HEAD_TIMEOUT_S, self._on_head_timeout)
        else:
            self._wait_for_next_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._cancel_deadline()
        self._in_head = False
        self._unset_keepalive_if_required()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in bytes; too large a head ends the connection, however many of them come at once."""
        while data and not self._deaf and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - (self._head_bytes if self._in_head else 0)
            if not room:
                self._refuse(431, f"the head of a request may have up to {MAX_HEAD_BYTES} bytes.", "head_too_large")
                return
            self._feed(data[:room])
            data = data[room:]
        if self._deaf or self.transport.is_closing() or self._in_head:
            return
        at_rest = self in self._resting
        if self._incoming is None and not self._is_answering and not at_rest:  # an empty line keeps no connection open
            self._start_deadline(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _feed(self, data: bytes) -> None:
        """Parse bytes, and count those of a head that is not complete, unless it began among others."""
        was_in_head, was_in_message, self._begun = self._in_head, self._in_message, 0
        super().data_received(data if was_in_message else remove_upgrade_header(data))
        if self._in_head and self._begun == (0 if was_in_head else 1) and was_in_head == was_in_message:
            self._head_bytes += len(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._begun += 1
        self._in_head, self._in_message, self._head_bytes = True, True, 0
        if not self._is_answering:
            self._resting[self] = None
            self._start_deadline(HEAD_TIMEOUT_S, self._on_head_timeout)

    def on_headers_complete(self) -> None:
        """The head is there.

        A request that comes before the answer to the one before is dropped, and the connection closed after that
        answer: while uvicorn keeps it, it does not read, and would not notice that the client is gone.
        """
        self._in_head = False
        self._resting.pop(self, None)
        if self._is_answering:
            self.cycle.keep_alive = False
            self._deaf = True
            return
        self._start_deadline(self._settings.body_timeout_s + LINGER_S, self._abort)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _disable_chunked_encoding(self.cycle)
        self.scope["state"] |= {"abort_connection": self._abort, "keeps_alive": partial(_can_keep_alive, self.cycle)}

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._in_message = False
        if not self._deaf:
            self._cancel_deadline()
            super().on_message_complete()
            if not self._is_answering:  # it was answered before it was there
                self._wait_for_next_request()

    def on_response_complete(self) -> None:
        """The answer was given; if the request is still coming, not for long."""
        super().on_response_complete()
        if self._incoming is not None:
            self._start_deadline(LINGER_S, self._abort)
        if self.transport.is_closing():
            self._wait_for_reader()
        elif self._incoming is None:
            self._wait_for_next_request()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came: close, unless one came while the loop was busy, and is read before the last look."""
        self._wait_for_next_request(LAST_LOOK_S, self._end)

    def _end(self) -> None:
        """Close, even if the last answer is never read."""
        self._unset_keepalive_if_required()
        self.transport.close()
        self._wait_for_reader()

    def _wait_for_next_request(self, seconds: float | None = None, then: Callable[[], None] | None = None) -> None:
        """Wait for a request, of which nothing has come yet."""
        self._unset_keepalive_if_required()
        seconds = self.timeout_keep_alive if seconds is None else seconds
        self.timeout_keep_alive_task = self.loop.call_later(seconds, then or self.timeout_keep_alive_handler)
        self._resting[self] = None

    def _unset_keepalive_if_required(self) -> None:
        super()._unset_keepalive_if_required()
        if not self._in_head:
            self._resting.pop(self, None)

    def _evict_waiting_connection(self) -> None:
        """Of the one that has rested, or sent the head of a request, for the longest; of one that just came at last."""
        # One that rests has sent all of its last answer. Of one that just came, what it sent may not have been read.
        able = [other for other in self._resting if not other.transport.get_write_buffer_size()]
        known = (other for other in able if other._in_head or other.cycle is not None)
        if able:
            other = next(known, able[0])
            self.connections.discard(other)
            self._resting.pop(other)
            other._unset_keepalive_if_required()
            other.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; never into the middle of an answer, nor in place of an earlier request's."""
        self._refuse(400, msg, "bad_http")

    def pause_writing(self) -> None:
        """The client does not read as fast as is written: it must go on within the time of a request."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _wait_for_reader(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self._settings.request_timeout_s, self._abort)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _start_deadline(self, seconds: float, action: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._incoming = self.loop.call_later(seconds, action)

    def _cancel_deadline(self) -> None:
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None

    def _abort(self) -> None:
        self.transport.abort()

    def _on_head_timeout(self) -> None:
        if self._in_head:
            self._refuse(408, f"the head of the request took longer than {HEAD_TIMEOUT_S:.0f} s.", "request_too_slow")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        in_body = self._in_message and not self._in_head
        if self._is_answering and in_body and not self.cycle.response_started:
            self.cycle.disconnected = True  # this is the answer to it; the application is told to leave
            self.cycle.message_event.set()
        elif self._is_answering:
            self.transport.close()
            return
        if not self.transport.is_closing():
            self.transport.write(build_raw_error_response(status, message, code))
        self.transport.close()


def _can_keep_alive(cycle: Any) -> bool:
    """Whether another request may follow an answer: not if a body that was not asked for may be left out."""
    return bool(cycle.keep_alive and not cycle.waiting_for_100_continue)


def _disable_chunked_encoding(cycle: Any) -> None:
    """For HTTP/1.0, which has no chunks: what has no length ends with the connection."""
    send = cycle.send

    async def send_plainly(message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
                cycle.expected_content_length = _ANY_LENGTH
        elif cycle.expected_content_length > _ANY_LENGTH // 2 and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn wants none to be left
        await send(message)

    cycle.send = send_plainly


def remove_upgrade_header(data: bytes) -> bytes:
    """The first bytes of a request without a wish for another protocol, such as Java's for HTTP/2."""
    if b"pgrade" not in data and b"PGRADE" not in data:
        return data
    head, mark, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nX-Upgrade:", head) + mark + rest


def build_raw_error_response(status: int, message: str, code: str) -> bytes:
    """An error answer as it goes over the wire, for where there is no request to answer to."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body

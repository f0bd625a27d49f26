"""Server-sent events, written by hand: eight clients want one every few milliseconds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Send

from specexport_runtime.server.json_text import json_text

DONE = b"data: [DONE]\n\n"
SILENCE_S = 10.0
"""After twice this time without an event, at the latest, a comment is sent: proxies cut off what is silent."""
_COMMENT = b":\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


def event(value: Any) -> bytes:
    """One event that holds JSON."""
    return b"data: %s\n\n" % json_text(value, (",", ":")).encode()


def named_event(name: str, value: Any) -> bytes:
    """One event with a name, that holds JSON."""
    return b"event: %s\n%s" % (name.encode(), event(value))


class EventStream:
    """Writes events as the body of an answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self._spoke = False

    async def start(self) -> None:
        """Send status and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def write(self, events: bytes) -> None:
        """Send events; waits while the client is slow to read."""
        self._spoke = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While its block lasts, a silent stream gets comments."""
        comments = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            comments.cancel()

    async def _comment(self) -> None:
        while True:
            self._spoke = False
            await asyncio.sleep(SILENCE_S)
            if not self._spoke:
                await self.write(_COMMENT)

    async def finish(self, events: bytes) -> None:
        """Send the last events and end the answer."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

"""The body of a request, read as a whole before a route sees it: so a slow client holds no cache row."""

import asyncio
from typing import Any

from starlette.types import Message, Receive

from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError


class ClientGoneError(Exception):
    """The client went away before it had sent its request."""


async def read_body(receive: Receive, config: ServerConfig) -> bytes:
    """The whole body; ``ApiError`` if it is too large (413) or too slow (408), ``ClientGoneError`` if it ends early."""
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > config.max_body_bytes:
                    raise body_too_large(config)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request's body did not arrive within {config.body_timeout_s:g} s.",
            code="request_too_slow",
            headers={"Connection": "close"},
        ) from None


def body_too_large(config: ServerConfig) -> ApiError:
    """The answer to a body that is too large."""
    return ApiError(413, f"the request's body is larger than {config.max_body_bytes} bytes.", code="body_too_large")


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body first, and then nothing until the client is gone."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive_again() -> Any:
        nonlocal message
        if message is not None:
            first, message = message, None
            return first
        while (later := await receive())["type"] != "http.disconnect":
            pass
        return later

    return receive_again

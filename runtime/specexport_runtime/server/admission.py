"""Who may ask: what a request's head must have before its body is read, all of it before a route sees it."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server.config import ServerConfig, is_loopback_name
from specexport_runtime.server.errors import ApiError, unavailable_error
from specexport_runtime.server.page import find_page
from specexport_runtime.server.state import ServerState

PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key, and no name of ours: they tell nothing of the model."""

BODY_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"}) | {
    "/v1/messages",
    "/v1/messages/count_tokens",
}
"""Paths that read the body of a POST; nobody else's is waited for."""

_PARAMETER = rb'[^\s;,="]+=(?:"(?:[^"\\]|\\.)*"|[^\s;,"]*)'
_JSON = re.compile(rb"application/json[ \t]*((?:;[ \t]*(?:%s[ \t]*)?)*)" % _PARAMETER)
_UTF_8 = (b"utf-8", b"utf8", b"us-ascii")

Headers = Sequence[tuple[bytes, bytes]]


class Admission:
    """Checks of the head of a request."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        page = find_page(config)
        self._public = PUBLIC_PATHS if page is None else PUBLIC_PATHS | page.PUBLIC_PATHS
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._hosts = {name.lower().removesuffix(".") for name in (config.host, *config.allowed_hosts)}
        # Where a key is needed no web page gets in without one, whatever name it gives to this address.
        self._checks_host = not config.api_keys and (config.is_loopback or bool(config.allowed_hosts))

    def check(self, scope: Scope, state: ServerState) -> str:
        """Let a request pass, or raise an ``ApiError``; a digest of its API key, empty where no key is needed."""
        headers: Headers = scope["headers"]
        if self._checks_host and scope["path"] not in PUBLIC_PATHS:  # probes come by address, or by no name
            self._check_host(headers)
        owner = ""
        if scope["path"] in self._public:
            if scope["method"] not in ("GET", "HEAD"):
                message = f"{scope['path']!r} does not take {scope['method']}."
                raise ApiError(405, message, code="method_not_allowed", headers={"Allow": "GET, HEAD"})
        elif self._digests:
            owner = self._check_key(headers)
        if has_body(headers):
            check_content(headers)
            self._check_length(headers)
        if scope["method"] == "POST" and (state.draining or not state.opens_when_asked):
            require_engine(state)
        return owner

    def _check_host(self, headers: Headers) -> None:
        names = [host_name(value) for value in _all(headers, b"host")]
        if len(names) != 1 or not (names[0] in self._hosts or is_loopback_name(names[0])):
            raise ApiError(
                421,
                f"this server does not go by the name {', '.join(names) or '(none)'}; call it 127.0.0.1 or localhost, "
                "or start it with --allowed-host.",
                code="wrong_host",
            )

    def _check_key(self, headers: Headers) -> str:
        given = _all(headers, b"authorization")
        given = given or [b"Bearer " + key for key in _all(headers, b"x-api-key")]  # Anthropic's clients
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, and digests have one length: the time tells nothing of any key.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "this server needs an API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest.hex()

    def _check_length(self, headers: Headers) -> None:
        for value in _all(headers, b"content-length"):
            if value.isdigit() and int(value[:20]) > self._config.max_body_bytes:
                raise body_too_large_error(self._config)


def has_body(headers: Headers) -> bool:
    """Whether a request says that a body follows."""
    lengths = _all(headers, b"content-length")
    return any(value.strip(b"0") for value in lengths) or bool(_all(headers, b"transfer-encoding"))


_NOT_JSON = (
    "The body must be JSON: send `Content-Type: application/json`. Other types are refused, because any web page may "
    "send them from a browser without asking."
)


def check_content(headers: Headers) -> None:
    """A body must be JSON, or it is an ``ApiError``: a browser asks before it posts that from another origin."""
    kinds = _all(headers, b"content-type")
    match = _JSON.fullmatch(kinds[0].strip().lower()) if len(kinds) == 1 else None
    parameters = dict(each.split(b"=", 1) for each in re.findall(_PARAMETER, match[1])) if match else {}
    if match is None or parameters.get(b"charset", b"utf-8").strip(b'"') not in _UTF_8:
        raise ApiError(415, _NOT_JSON, code="not_json")
    if any(value.strip().lower() != b"identity" for value in _all(headers, b"content-encoding")):
        raise ApiError(415, "a compressed body is not taken: send it as it is.", code="compressed")


def require_engine(state: ServerState) -> AsyncSpecEngine:
    """The engine; ``ApiError`` 503 if it is not loaded yet, or the server shuts down."""
    if state.draining:
        raise unavailable_error("draining", "The server is shutting down.")
    if state.engine is None:
        raise unavailable_error("loading", "The model is being loaded.")
    return state.engine


def host_name(value: bytes) -> str:
    """The name of a ``Host`` header without its port, in lower case."""
    text = value.decode("latin1").strip().lower()
    if text.startswith("["):
        name, bracket, port = text.partition("]")
        return name + bracket if bracket and (not port or _is_port(port)) else text
    name, colon, port = text.partition(":")
    return name.removesuffix(".") if not colon or _is_port(colon + port) else text


def _is_port(text: str) -> bool:
    return text[0] == ":" and (text[1:].isascii() and text[1:].isdigit())


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


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
                    raise body_too_large_error(config)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request's body did not arrive within {config.body_timeout_s:g} s.",
            code="request_too_slow",
            headers={"Connection": "close"},
        ) from None


def body_too_large_error(config: ServerConfig) -> ApiError:
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

"""Bytes to a server and back: requests that no HTTP library would send, and what may be answered to them."""

import contextlib
import json
import re
import socket
import struct
from typing import Any, NamedTuple

from tests.support.cases.patience import HANG_S

ANSWER_SECONDS = HANG_S
SETTLE_SECONDS = 0.5


class RawRequest(NamedTuple):
    """What is sent over one connection.

    Attributes:
        kind: name of what made it, for the counts.
        data: bytes, as they are.
        ending: ``"read"`` until the server closes; ``"settle"`` is for what may have no answer: where none comes at
            once, say that no more comes; ``"abort"`` resets the connection.
        head: the method is HEAD: answers have no body.
    """

    kind: str
    data: bytes
    ending: str = "read"
    head: bool = False


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class BrokenAnswerError(Exception):
    """What came back is no HTTP."""


def send(port: int, request: RawRequest) -> list[Answer]:
    """Send it to 127.0.0.1 and read what comes; no answers where the client aborts.

    Raises:
        OSError: no connection, or no end of the answer within ``ANSWER_SECONDS``.
        BrokenAnswerError: what came is no HTTP.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused early; the answer can be read
            connection.sendall(request.data)
        if request.ending == "abort":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return []
        data = _read(connection, settle=request.ending == "settle")
    return read_answers(data, head=request.head)


def _read(connection: socket.socket, *, settle: bool) -> bytes:
    parts: list[bytes] = []
    if settle:
        connection.settimeout(SETTLE_SECONDS)
    with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
        while True:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                if not settle:
                    raise
                if parts:
                    break
                settle = False
                connection.settimeout(ANSWER_SECONDS)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                continue
            if not part:
                break
            parts.append(part)
    return b"".join(parts)


def read_answers(data: bytes, *, head: bool = False) -> list[Answer]:
    """All answers of a closed connection; the last one may be cut off."""
    answers = []
    while data:
        start, found, data = data.partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.[01] (\d{3})", start)
        if not match:
            raise BrokenAnswerError(repr(start[:200]))
        if not found:
            break
        lines = start.decode("latin-1").split("\r\n")[1:]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(match[1])
        if head or status in (204, 304) or status < 200:
            body = b""
        elif "chunked" in headers.get("transfer-encoding", ""):
            body, data = _chunked(data)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, data = data[:size], data[size:]
        else:
            body, data = data, b""
        answers.append(Answer(status, headers, body))
    return answers


def _chunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while data:
        size, found, data = data.partition(b"\r\n")
        count = int(size, 16)
        if not found or not count:
            return body, data.removeprefix(b"\r\n")
        body, data = body + data[:count], data[count + 2 :]
    return body, data


def problem_of(answer: Answer, *, head: bool = False) -> str | None:
    if answer.status >= 500 and answer.status not in (503, 504):
        return f"status {answer.status}: {answer.body[:300]!r}"
    if answer.status < 200 or head:
        return None
    kind = answer.headers.get("content-type", "")
    if answer.status >= 400:
        return problem_of_error(answer.body)
    if kind.startswith("text/event-stream"):
        return problem_of_stream(answer.body)
    if kind.startswith("application/json"):
        return None if _strict(answer.body) is not None else f"no JSON: {answer.body[:300]!r}"
    return None


def problem_of_error(body: bytes) -> str | None:
    """What is wrong with the body of an error, which must have OpenAI's shape or Anthropic's; None if nothing is."""
    data = _strict(body)
    if isinstance(data, dict) and set(data) == {"type", "error", "request_id"}:
        error = data["error"]
        is_right = data["type"] == "error" and set(error) <= {"type", "message", "details"}
        is_right = is_right and _is_said(error["type"]) and _is_said(error["message"])
        return None if is_right else f"not Anthropic's error shape: {body[:300]!r}"
    error = data.get("error") if isinstance(data, dict) and len(data) == 1 else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"not OpenAI's error shape: {body[:300]!r}"
    texts_right = _is_said(error["message"]) and _is_said(error["type"])
    rest_right = all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return None if texts_right and rest_right else f"wrong types in the error: {body[:300]!r}"


def problem_of_stream(body: bytes) -> str | None:
    """What is wrong with a stream of events; its last one may be cut off."""
    for event in body.decode("utf-8", "replace").split("\n\n")[:-1]:
        for line in event.splitlines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            value = _strict(data.encode())
            if not isinstance(value, dict):
                return f"no JSON in the stream: {data[:300]!r}"
            if "error" in value and (problem := problem_of_error(data.encode())):
                return problem
            if "error" in value and value["error"]["type"] in ("server_error", "api_error"):
                return f"a defect in the stream: {data[:300]!r}"
    return None


def _is_said(text: Any) -> bool:
    return isinstance(text, str) and text != ""


def _strict(body: bytes) -> Any:
    """The JSON value; None for what is no strict JSON (NaN is none)."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(name)

"""A raw connection to a test server: for clients that no HTTP library would be."""

import json
import socket
import struct
from typing import Any, NamedTuple

from tests.support.cases.patience import HANG_S

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"  # more headers follow


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The ``code`` of an error; the answer must have the shape of one."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error["code"]


class Wire:
    """A connection, as a context manager.

    Args:
        port: of the server on 127.0.0.1.
        receive_buffer: bytes that the system keeps of what is not read.
    """

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(HANG_S)
        self.socket.connect(("127.0.0.1", port))
        self._pending = b""

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> None:
        self.send(request(body, path, **headers))

    def reply(self) -> Reply:
        status, headers = self.head()
        length = int(headers["content-length"])
        while len(self._pending) < length:
            self._more()
        body, self._pending = self._pending[:length], self._pending[length:]
        return Reply(status, headers, body)

    def head(self) -> tuple[int, dict[str, str]]:
        head = self.until(b"\r\n\r\n").decode()
        first, *lines = head.strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    def ask(self, data: bytes) -> Reply:
        self.send(data)
        return self.reply()

    def until(self, mark: bytes) -> bytes:
        while mark not in self._pending:
            self._more()
        end = self._pending.index(mark) + len(mark)
        found, self._pending = self._pending[:end], self._pending[end:]
        return found

    def rest(self) -> bytes:
        try:
            while True:
                self._more()
        except (EOFError, ConnectionResetError):
            return self._pending

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(self._pending)
        self._pending += data


def request(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content

"""The socket that a server listens on, and the HTTP server on it."""

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from specexport_runtime.errors import UserInputError
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.connection import BoundedProtocol
from specexport_runtime.server.guard import refuse_overload

LAST_WORDS_S = 5.0
"""How long clients may take to read the end of their answers when the server ends."""
_FILES_BESIDES_CONNECTIONS = 256


def bind(config: ServerConfig) -> socket.socket:
    """Listen on the address of a server; ``UserInputError`` if it is in use, not this machine's, or not permitted."""
    host = "127.0.0.1" if config.host == "localhost" else config.host  # whatever else that name may mean here
    try:
        found = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserInputError(
            f"--host {config.host!r} cannot be resolved: {error}.", "give an address of this machine, as 127.0.0.1."
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        _find_dead_clients(listener)
        listener.bind(address)
        listener.listen(config.max_connections)  # here: two sockets can be bound to one port, but not listen
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from None
    return listener


def _find_dead_clients(listener: socket.socket) -> None:
    """A client whose machine is gone says nothing; accepted connections inherit these options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bind_error(config: ServerConfig, error: OSError) -> UserInputError:
    where = f"port {config.port} of {config.host}"
    if error.errno == errno.EADDRINUSE:
        return UserInputError(f"{where} is in use.", "give another --port, or 0 for a free one.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserInputError(f"--host {config.host} is no address of this machine.", "give one that is.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserInputError(f"{where} may not be taken by this user.", "give a --port of 1024 or more.")
    return UserInputError(
        f"{where} cannot be listened on: {error.strerror or error}.", "give another --host or --port."
    )


def format_url(listener: socket.socket, config: ServerConfig) -> str:
    """Where the server is reached."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn would end by the signal that it got; ours ends with 0 after a drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; clients that have not read the end of their answers by then are cut off."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)


def make_http_server(app: Any, config: ServerConfig, log_config: dict[str, Any] | None = None) -> uvicorn.Server:
    """The HTTP server of an application; it leaves signals to its caller, and logging too without ``log_config``."""
    raise_open_file_limit(config.max_connections + _FILES_BESIDES_CONNECTIONS)
    protocol: Any = functools.partial(BoundedProtocol, settings=config, refuse_overload=refuse_overload, resting={})
    options = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=log_config,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # addresses are only logged; no proxy is trusted with them
        backlog=config.max_connections,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
    return _Server(options)


def raise_open_file_limit(count: int) -> None:
    """Let this process have so many files and sockets open, as far as it may say so itself."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes event loops: uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # Windows has none
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

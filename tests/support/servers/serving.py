"""A server on a real socket of this machine, for tests."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from specexport_runtime import SpecEngine
from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.listener import loop_factory, make_http_server
from tests.support.cases.patience import HANG_S, wait_until
from tests.support.fakes.engine import make_tokenizer
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.loop import VOCAB

MAX_MODEL_LEN = 400
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def fake_engine(
    rows: int = 4, *, step_seconds: float = 0.0, adapters: tuple[str, ...] = (), **options: Any
) -> SpecEngine:
    """An engine of two tiny numpy models that talks in the words w0 … w16; a step of the target takes so long."""
    target = FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 16, num_adapters=len(adapters))
    draft = options.pop("draft", None) or FakeExecutor(VOCAB, rows, MAX_MODEL_LEN + 16, noise=0.4)
    if step_seconds:
        execute = target.execute

        def slow(*args: Any) -> Any:
            time.sleep(step_seconds)
            return execute(*args)

        target.execute = slow  # type: ignore[method-assign]
    options = {"max_model_len": MAX_MODEL_LEN, "chat_template": TEMPLATE} | options
    return engine_of(target, make_tokenizer(), draft=draft, adapters=adapters, **options)


class Served:
    """A server in a thread of its own, as a context manager.

    Args:
        make_engine: makes the engine; called in that thread.
        config: the server's settings; the port is chosen by the system.
    """

    def __init__(self, make_engine: Callable[[], SpecEngine], config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self._make_engine = make_engine
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app: Any = None
        self.engine: AsyncSpecEngine
        self.loop: asyncio.AbstractEventLoop
        self._server: uvicorn.Server
        self._started = threading.Event()
        self._told: asyncio.Event
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._started.wait(HANG_S)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._told.set)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def thread_id(self) -> int:
        assert self._thread.ident is not None
        return self._thread.ident

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)

    def wait_until_idle(self) -> None:
        """Wait until no request is active; then the engine's invariants must hold."""
        wait_until(lambda: not self.engine.num_active)
        self.engine.engine.check()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._serve())

    async def _until_told(self) -> None:
        """As uvicorn's own, which looks only ten times a second whether it is to end."""
        await self._server.on_tick(0)
        await self._told.wait()

    async def _serve(self) -> None:
        try:
            self.loop = asyncio.get_running_loop()
            self.engine = AsyncSpecEngine(self._make_engine(), max_waiting=self.config.max_waiting)
            self.app = create_app(self.engine, self.config)
            self._server, self._told = make_http_server(self.app, self.config), asyncio.Event()
            self._server.main_loop = self._until_told  # type: ignore[method-assign]
            task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.005)
            self._started.set()
            await task
            await self.engine.aclose(5)
        except BaseException as error:
            self._error = error
            self._started.set()
            raise

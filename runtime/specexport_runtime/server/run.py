"""Run a server until it is told to stop: listen, load, answer, drain."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.engine import SpecEngine
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import warn_of_unused_budget
from specexport_runtime.server.listener import bind, format_url, loop_factory, make_http_server
from specexport_runtime.server.log_format import log_config
from specexport_runtime.server.model_pool import ModelPool, load_in_thread

_log = logging.getLogger("specexport.server")
_STUCK_S = 30.0
"""A round that takes longer than this after the drain will not end."""


def run_server(served: Callable[[], SpecEngine] | ModelPool, config: ServerConfig) -> int:
    """Serve until SIGTERM or Ctrl-C what is loaded, or a pool; returns 0 after a drain, which a second signal ends."""
    # Long texts have a thread of their own: tokenizers need not start more.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = bind(config)
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_ServerRun(listener, config, served).run())


class _ServerRun:
    """One run of a server on a socket that listens; ``served`` loads its model, or is the pool of several."""

    def __init__(
        self, listener: socket.socket, config: ServerConfig, served: Callable[[], SpecEngine] | ModelPool
    ) -> None:
        self._config, self._served, self._url = config, served, format_url(listener, config)
        self._listener = listener
        self._stop = asyncio.Event()
        self._app = create_app(None, config, served if isinstance(served, ModelPool) else None)

    async def run(self) -> int:
        """From the first answer of ``/health`` to the last of a request; the exit code."""
        self._watch_signals()
        server = make_http_server(self._app, self._config, log_config(self._config.log_format))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            engine = await self._open()
            if engine is not None:
                await self._wait_unless_signalled(serving)
                await self._drain(engine)
        finally:
            server.should_exit = True
            await serving
        if engine is None:
            _exit_process(0)  # the thread that loads cannot be told to stop
        await _wait_or_exit(engine.aclose(0), self._config.drain_timeout_s + _STUCK_S)
        if engine.has_work_aside:
            _exit_process(0)  # the interpreter would wait for it
        return 0

    async def _open(self) -> AsyncSpecEngine | ModelPool | None:
        """What answers, from now on; None if the server was told to stop meanwhile."""
        served = self._served
        if isinstance(served, ModelPool):
            _settle_memory()
            _log.info("Serving %d models at %s.", len(served.states), self._url)
            return served
        _log.info("Listening at %s; the model is being loaded.", self._url)

        def load() -> SpecEngine:
            engine = served()
            _settle_memory()
            return engine

        loaded = load_in_thread(load)
        await self._wait_unless_signalled(loaded)
        if self._stop.is_set():
            self._app.state.server.draining = True
            return None
        engine = AsyncSpecEngine(loaded.result(), max_waiting=self._config.max_waiting)
        warn_of_unused_budget(engine.engine, self._config)
        self._app.state.server.use_engine(engine)
        _log.info("Serving %s at %s.", self._config.model_name, self._url)
        return engine

    async def _wait_unless_signalled(self, work: "asyncio.Future[Any]") -> None:
        """Wait until something is done, or the server is told to stop."""
        told = asyncio.create_task(self._stop.wait())
        await asyncio.wait({told, work}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()

    async def _drain(self, engine: AsyncSpecEngine | ModelPool) -> None:
        self._app.state.server.draining = True
        limit, began = self._config.drain_timeout_s, time.monotonic()
        _log.info("Draining: %d sequences go on for up to %g s.", engine.num_active, limit)
        if not await _wait_or_exit(engine.drain(limit), limit + _STUCK_S):
            _log.warning("Drain: what was left after %g s was cancelled.", limit)
        engine.limit_flush(max(0.0, began + limit - time.monotonic()))

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which `nohup` sets
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            _exit_process(128 + number)
        self._stop.set()


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()  # what a server has stays: each whole collection would go through it, 60 to 140 ms
    gc.set_threshold(*gc.get_threshold()[:2], 2)  # 10 as usual: one took 52 ms of the loop, not 19


async def _wait_or_exit(work: Any, seconds: float) -> Any:
    """Wait for something; if it takes too long the engine is stuck, and the process ends without it."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        _log.error("The engine did not end within %g s.", seconds)
        _exit_process(1)


def _exit_process(code: int) -> NoReturn:
    """End the process now: the interpreter would wait for threads that are inside an engine."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

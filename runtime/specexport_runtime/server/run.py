"""Run a server until it is told to stop: load, listen, drain."""

import asyncio
from pathlib import Path
from typing import Any

import uvicorn

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server.app import create_app
from specexport_runtime.server.config import ServerConfig


def run_server(bundle: Path, config: ServerConfig, **load_options: Any) -> int:
    """Serve a bundle until SIGTERM or Ctrl-C.

    Args:
        bundle: bundle folder.
        config: settings.
        **load_options: of ``SpecEngine.load``.

    Returns:
        the exit code: 0 after a drain.
    """
    return asyncio.run(_serve(bundle, config, load_options))


async def _serve(bundle: Path, config: ServerConfig, load_options: dict[str, Any]) -> int:
    engine = await AsyncSpecEngine.load(bundle, max_waiting=config.max_waiting, **load_options)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), host=config.host, port=config.port))
    await server.serve()
    await engine.aclose(config.drain_timeout_s)
    return 0

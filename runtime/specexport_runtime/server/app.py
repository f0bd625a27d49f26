"""The server as an ASGI application: routes, guards and error shapes put together."""

import time

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server import completions, playground, status
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, as_api_error
from specexport_runtime.server.guard import add_guards
from specexport_runtime.server.state import ServerState


def create_app(engine: AsyncSpecEngine | None, config: ServerConfig | None = None) -> FastAPI:
    """The application.

    Args:
        engine: what answers; None for one that is loaded later: set ``app.state.server.engine`` then.
        config: settings; None for the defaults.
    """
    settings = config or ServerConfig()
    app = FastAPI(title="specexport", docs_url=None, redoc_url=None)
    app.state.server = ServerState(settings, engine, started=int(time.time()))
    app.include_router(status.router)
    app.include_router(completions.router)
    if settings.playground:
        app.include_router(playground.router)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer)
    add_guards(app, settings)
    return app


async def _answer(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _answer_validation(_: Request, error: Exception) -> Response:
    return ApiError(400, str(error)).response()


async def _answer_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

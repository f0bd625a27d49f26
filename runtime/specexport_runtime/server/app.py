"""The server as an ASGI application: routes, guards and error shapes put together."""

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.metrics import EngineMetrics
from specexport_runtime.server import chat, completions, playground, responses_api, status, tokens
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, ErrorBody, as_api_error
from specexport_runtime.server.guard import add_guards, refused
from specexport_runtime.server.logs import add_logging
from specexport_runtime.server.state import ServerState, state_of

_NO_TELEMETRY_OF_ITS_OWN: TelemetryConfig = {
    "tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False
}  # fmt: skip
"""FastAPI's would log the texts of exceptions and repeat the spans of ``tracing``."""


def create_app(engine: AsyncSpecEngine | None, config: ServerConfig | None = None) -> FastAPI:
    """The application; ``engine`` None for one that is loaded later: call ``app.state.server.use_engine`` then."""
    settings = config or ServerConfig()
    app = FastAPI(
        title="specexport",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY_OF_ITS_OWN,
        responses={"4XX": {"model": ErrorBody, "description": "The request was refused."}},
    )
    state = ServerState(settings, metrics=EngineMetrics(settings.model_name), started=int(time.time()))
    app.state.server = state
    if engine is not None:
        state.use_engine(engine)
    app.include_router(status.router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(responses_api.router)
    app.include_router(tokens.router)
    if settings.playground:
        app.include_router(playground.router)
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)
    add_guards(app, settings)
    add_logging(app, settings)
    return app


def _refuse(request: Request, error: ApiError) -> Response:
    refused(state_of(request), error)
    return error.response()


async def _answer(request: Request, error: Exception) -> Response:
    return _refuse(request, as_api_error(error))


async def _answer_validation(request: Request, error: Exception) -> Response:
    """What FastAPI finds wrong with a parameter: the first of it."""
    assert isinstance(error, RequestValidationError)  # noqa: S101  # registered for it
    first: dict[str, Any] = next(iter(error.errors()), {"loc": (), "msg": "the request cannot be read"})
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _refuse(request, ApiError(400, f"{where or 'body'}: {first['msg']}.", param=where or None))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it
    path = request.scope["path"][:100]
    told = {
        404: ApiError(404, f"there is nothing at {path!r}.", code="not_found"),
        405: ApiError(405, f"{path!r} does not take {request.method}.", code="method_not_allowed"),
    }.get(error.status_code) or ApiError(error.status_code, str(error.detail))
    told.headers.update(error.headers or {})
    return _refuse(request, told)

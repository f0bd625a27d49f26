"""The server as an ASGI application: routes, guards and error shapes put together."""

import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.metrics import EngineMetrics
from specexport_runtime.server import chat, completions, messages_api, responses_api, tokens
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, ErrorBody, as_api_error
from specexport_runtime.server.guard import Guard, count_refused_request
from specexport_runtime.server.logs import AccessLog
from specexport_runtime.server.models import describe_models, no_such_model
from specexport_runtime.server.page import find_page
from specexport_runtime.server.state import ServerState, state_of
from specexport_runtime.server.tracing import Tracing

_NO_TELEMETRY_OF_ITS_OWN: TelemetryConfig = {
    "tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False
}  # fmt: skip
"""FastAPI's would log the texts of exceptions and repeat the spans of ``tracing``."""

router = APIRouter()

_RETRY_AFTER_S = 5


def create_app(
    engine: AsyncSpecEngine | None, config: ServerConfig | None = None, state: ServerState | None = None
) -> FastAPI:
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
    if state is None:
        state = ServerState(settings, metrics=EngineMetrics(settings.model_name), started=int(time.time()))
    app.state.server = state
    if engine is not None:
        state.use_engine(engine)
    app.include_router(router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(responses_api.router)
    app.include_router(messages_api.router)
    app.include_router(tokens.router)
    if (page := find_page(settings)) is not None:
        app.include_router(page.router)
    app.add_exception_handler(ApiError, _handle_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_middleware(Guard, config=settings, state=state)
    app.add_middleware(Tracing)
    app.add_middleware(AccessLog)  # what is added last comes first
    return app


def _refuse(request: Request, error: ApiError) -> Response:
    count_refused_request(getattr(request.state, "served", state_of(request)), error)
    return error.response(request.scope)


async def _handle_exception(request: Request, error: Exception) -> Response:
    return _refuse(request, as_api_error(error))


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    """What FastAPI finds wrong with a parameter: the first of it."""
    assert isinstance(error, RequestValidationError)  # noqa: S101  # registered for it
    first: dict[str, Any] = next(iter(error.errors()), {"loc": (), "msg": "the request cannot be read"})
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _refuse(request, ApiError(400, f"{where or 'body'}: {first['msg']}.", param=where or None))


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it
    path = request.scope["path"][:100]
    told = {
        404: ApiError(404, f"there is nothing at {path!r}.", code="not_found"),
        405: ApiError(405, f"{path!r} does not take {request.method}.", code="method_not_allowed"),
    }.get(error.status_code) or ApiError(error.status_code, str(error.detail))
    told.headers.update(error.headers or {})
    return _refuse(request, told)


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["status"])
async def health(request: Request) -> Response:
    """The process is alive, and not of no use: 503 asks for its end."""
    is_dead = state_of(request).status == "dead"
    return JSONResponse({"status": "dead" if is_dead else "ok"}, 503 if is_dead else 200)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["status"])
async def ready(request: Request) -> Response:
    """A request would be taken: the model is loaded, its engine lives, and the server is not draining."""
    if (status := state_of(request).status) == "ready":
        return JSONResponse({"status": status})
    return JSONResponse({"status": status}, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


@router.get("/metrics", tags=["status"])
async def metrics(request: Request) -> Response:
    """Metrics in the format of Prometheus, or of OpenMetrics where ``Accept`` asks for it."""
    state = state_of(request)
    if state.metrics is None:
        raise ApiError(404, "this server keeps no metrics.", code="not_found")
    body, content_type = state.metrics.render(openmetrics_format=_accepts_openmetrics(request))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> dict[str, Any]:
    """The models that are served, and their LoRA adapters."""
    return {"object": "list", "data": describe_models(state_of(request))}


@router.get("/v1/models/{model_id:path}", tags=["models"])
async def model(request: Request, model_id: str) -> dict[str, Any]:
    """The model of that name."""
    found = {model["id"]: model for model in describe_models(state_of(request))}
    if model_id not in found:
        raise no_such_model(model_id, list(found))
    return found[model_id]


def _accepts_openmetrics(request: Request) -> bool:
    kinds = [part.split(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    return "application/openmetrics-text" in kinds

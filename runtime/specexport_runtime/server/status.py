"""``/health``, ``/ready``, ``/metrics`` and ``/v1/models``."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.models import adapter_of, describe_models
from specexport_runtime.server.state import state_of

router = APIRouter()

_RETRY_AFTER_S = 5


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["status"])
async def health() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["status"])
async def ready(request: Request) -> Response:
    """A request would be taken: the model is loaded, and the server is not draining."""
    state = state_of(request)
    if state.ready:
        return JSONResponse({"status": "ready"})
    word = "draining" if state.draining else "loading"
    return JSONResponse({"status": word}, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


@router.get("/metrics", tags=["status"])
async def metrics(request: Request) -> Response:
    """Metrics in the format of Prometheus, or of OpenMetrics where ``Accept`` asks for it."""
    state = state_of(request)
    if state.metrics is None:
        raise ApiError(404, "this server keeps no metrics.", code="not_found")
    body, content_type = state.metrics.render(openmetrics_format=_asks_for_openmetrics(request))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> dict[str, Any]:
    """The model that is served, and its LoRA adapters."""
    return {"object": "list", "data": describe_models(state_of(request))}


@router.get("/v1/models/{model_id:path}", tags=["models"])
async def model(request: Request, model_id: str) -> dict[str, Any]:
    """The model of that name."""
    state = state_of(request)
    adapter_of(model_id, None if state.engine is None else state.engine.engine, state.config.model_name)
    return next(model for model in describe_models(state) if model["id"] == model_id)


def _asks_for_openmetrics(request: Request) -> bool:
    kinds = [part.split(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    return "application/openmetrics-text" in kinds

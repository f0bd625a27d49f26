"""``/health``, ``/ready``, ``/metrics`` and ``/v1/models``."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from specexport_runtime.server.state import state_of

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """A request would be taken: the model is loaded, and the server is not draining."""
    state = state_of(request)
    word = "ready" if state.ready else "draining" if state.draining else "loading"
    return JSONResponse({"status": word}, 200 if state.ready else 503)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    state = state_of(request)
    model = {"id": state.config.model_name, "object": "model", "created": state.started, "owned_by": "specexport"}
    return {"object": "list", "data": [model]}

"""The page at ``/``: a fixed list of static files of this package, and what the page must know of the bundle."""

import hashlib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.state import state_of

router = APIRouter()

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground/style.css": ("style.css", "text/css; charset=utf-8"),
    "/playground/icon.svg": ("icon.svg", "image/svg+xml"),
    "/playground/main.js": ("main.js", "text/javascript; charset=utf-8"),
    "/playground/controls.js": ("controls.js", "text/javascript; charset=utf-8"),
    "/playground/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/playground/run.js": ("run.js", "text/javascript; charset=utf-8"),
    "/playground/tokens.js": ("tokens.js", "text/javascript; charset=utf-8"),
    "/playground/rounds.js": ("rounds.js", "text/javascript; charset=utf-8"),
}

PUBLIC_PATHS = frozenset(_FILES)
"""Paths that need no API key: the page itself, which tells nothing of the bundle. It asks for the key where one is
needed."""

_HEADERS = {
    # Nothing inline, nothing from elsewhere; the page sends no form and is in no frame.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cache-Control": "no-cache",  # kept, but asked for again: an upgrade shows at once
}


class StaticFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str  # changes when the bytes do


@cache
def static_file(path: str) -> StaticFile:
    """The file that is served at a path of ``PUBLIC_PATHS``."""
    name, media_type = _FILES[path]
    content = resources.files("specexport_runtime.playground").joinpath("static", name).read_bytes()
    return StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def _serve_file(request: Request) -> Response:
    file = static_file(request.scope["route"].path)
    headers = _HEADERS | {"ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in _FILES:
    router.add_api_route(_path, _serve_file, methods=["GET", "HEAD"], include_in_schema=False)


@router.get("/playground.json", include_in_schema=False)
async def describe(request: Request) -> dict[str, Any]:
    """What the page must know: the model, its limits, and how it can draft."""
    state = state_of(request)
    if state.engine is None:
        raise ApiError(
            503, "the model is loading.", kind="service_unavailable", code="loading", headers={"Retry-After": "1"}
        )
    engine = state.engine.engine
    limit = engine.max_model_len - 1
    return {
        "model": state.config.model_name,
        "max_model_len": engine.max_model_len,
        "max_tokens": min(limit, state.config.max_tokens or limit),
        "chat": engine.has_chat_template,
        "max_speculative_tokens": engine.lookahead,
        "auto": engine.cost_curves is not None,
        **_describe_drafting(engine),
    }


def _name_plan(stages: list[str], *, adaptive: bool) -> str | None:
    """What a request would call a plan of these stages."""
    if stages and KINDS[stages[0]].traits.remembers and (adaptive or len(stages) > 1):
        return "auto"
    if len(stages) > 1:
        return "chained"
    return stages[0] if stages else None


def _describe_drafting(engine: SpecEngine) -> dict[str, Any]:
    """Drafters with the K that they take if none is asked for, or why they are not to be had; which one is default."""
    drafters: list[dict[str, Any]] = []
    for name in engine.drafters:
        if name == "none":
            continue
        try:
            plan = engine.resolve_drafting(drafter=name)
        except InvalidRequestError as error:
            drafters.append({"name": name, "num_speculative_tokens": None, "obstacle": error.message})
        else:
            number = "auto" if plan.adaptive else plan.stages[-1].lookahead
            drafters.append({"name": name, "num_speculative_tokens": number, "obstacle": None})
    default = engine.resolve_drafting()
    names = [stage.drafter for stage in default.stages]
    return {
        "drafters": drafters,
        "default_drafter": _name_plan(names, adaptive=default.adaptive),
        "default_num_speculative_tokens": (
            "auto" if default.adaptive else default.stages[-1].lookahead if names else None
        ),
    }

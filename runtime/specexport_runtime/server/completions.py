"""``/v1/completions``."""

import secrets
import time
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server.answer import Answer, AnswerForm
from specexport_runtime.server.answer_schema import CompletionAnswer
from specexport_runtime.server.errors import unavailable
from specexport_runtime.server.parsing import parse_body, request_body, responses
from specexport_runtime.server.protocol import CompletionRequest, Sampling
from specexport_runtime.server.request_log import RequestLog
from specexport_runtime.server.responses import CompletionFormat, Header
from specexport_runtime.server.state import ServerState, state_of
from specexport_runtime.server.token_text import TokenTexts
from specexport_runtime.server.translate import Plan, plan_completion

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/completions",
    response_class=Response,
    responses=responses(CompletionAnswer),
    openapi_extra=request_body(CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several."""
    state = state_of(request)
    engine = ready_engine(state)
    body = await parse_body(request, CompletionRequest)
    plan = await plan_completion(body, engine, state.config, owner_of(request))
    note_request(request, state, plan, body)
    form = partial(CompletionFormat, include_usage=plan.include_usage)
    return make_answer(request, state, engine, plan, "cmpl-", form)


def ready_engine(state: ServerState) -> AsyncSpecEngine:
    """The engine; ``ApiError`` 503 if it is not loaded yet, or the server shuts down."""
    if state.draining:
        raise unavailable("draining", "The server is shutting down.")
    if state.engine is None:
        raise unavailable("loading", "The model is being loaded.")
    return state.engine


def owner_of(request: Request) -> str:
    """Who asks: a digest of the API key; empty where everybody may."""
    return getattr(request.state, "owner", "")


def note_request(request: Request, state: ServerState, plan: Plan, body: Sampling) -> None:
    """Tell the log of a request that was understood, if there is a log."""
    log: RequestLog | None = getattr(request.state, "log", None)
    if log is not None:
        log.model, log.streamed = plan.model or state.config.model_name, plan.stream
        log.user = body.safety_identifier or body.user


def make_answer(
    request: Request,
    state: ServerState,
    engine: AsyncSpecEngine,
    plan: Plan,
    prefix: str,
    form: Callable[..., AnswerForm],
) -> Answer:
    """The answer to a request, in the JSON of its endpoint; the answer's id begins with ``prefix``."""
    name = getattr(request.state, "request_id", None) or secrets.token_hex(12)
    bundle = engine.engine.fingerprint
    fingerprint = None if bundle is None else f"fp_{bundle[:12]}"
    header = Header(f"{prefix}{name}", int(time.time()), plan.model or state.config.model_name, fingerprint)
    texts = None if plan.logprobs is None and plan.prompt_logprobs is None else _token_texts(request, engine)
    shown = None if plan.logprobs is None else texts
    made = form(header, texts=shown, origins=plan.origins)
    return Answer(engine, plan, made, state.config.request_timeout_s, texts)


def _token_texts(request: Request, engine: AsyncSpecEngine) -> TokenTexts:
    """Of the server's tokenizer; made when they are first asked for."""
    texts: TokenTexts | None = getattr(request.app.state, "token_texts", None)
    if texts is None:
        texts = request.app.state.token_texts = TokenTexts(engine.engine.tokenizer)
    return texts

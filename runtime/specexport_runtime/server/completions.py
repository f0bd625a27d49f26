"""``/v1/completions``."""

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from specexport_runtime.engine import SpecEngine
from specexport_runtime.server.admission import require_engine
from specexport_runtime.server.answer import Answer, AnswerForm, PreparedRequest
from specexport_runtime.server.answer_format import CompletionFormat, Header
from specexport_runtime.server.answer_schema import CompletionAnswer
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.parsing import parse_body, read_request_body
from specexport_runtime.server.prompt_tokens import run_beside_event_loop
from specexport_runtime.server.protocol import CompletionRequest, Sampling
from specexport_runtime.server.request_log import RequestLog
from specexport_runtime.server.state import ServerState, state_of
from specexport_runtime.server.structured import may_compile
from specexport_runtime.server.token_text import TokenTexts
from specexport_runtime.server.translate import RequestPlan, plan_completion

router = APIRouter(tags=["generation"])

Body = TypeVar("Body", bound=Sampling)


@router.post(
    "/v1/completions",
    response_class=Response,
    responses=responses(CompletionAnswer),
    openapi_extra=request_body(CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several."""
    form_of = lambda _, plan: partial(CompletionFormat, include_usage=plan.include_usage)  # noqa: E731
    return await answer(request, "cmpl-", CompletionRequest, plan_completion, form_of)


def get_owner(request: Request) -> str:
    """Who asks: a digest of the API key; empty where everybody may."""
    return getattr(request.state, "owner", "")


def note_request(request: Request, state: ServerState, plan: RequestPlan, body: Sampling) -> None:
    """Tell the log of a request that was understood, if there is a log."""
    log: RequestLog | None = getattr(request.state, "log", None)
    if log is not None:
        log.model, log.streamed = plan.model or state.config.model_name, plan.stream
        log.user = body.safety_identifier or body.user


async def answer(
    request: Request,
    prefix: str,
    model: type[Body],
    plan_of: Callable[[Body, SpecEngine, ServerConfig, str], RequestPlan],
    form_of: Callable[[Body, RequestPlan], Callable[..., AnswerForm]],
) -> Answer:
    """The answer to a body of the kind ``model``, in the JSON of its endpoint; its id begins with ``prefix``."""
    server, owner, data = state_of(request), get_owner(request), await read_request_body(request)

    def plan(state: ServerState, body: Body) -> PreparedRequest:
        engine = require_engine(state).engine
        plan = plan_of(body, engine, state.config, owner)
        note_request(request, state, plan, body)
        name = getattr(request.state, "request_id", None) or secrets.token_hex(12)
        fingerprint = None if engine.fingerprint is None else f"fp_{engine.fingerprint[:12]}"
        header = Header(f"{prefix}{name}", int(time.time()), plan.model or state.config.model_name, fingerprint)
        texts = None if plan.logprobs is None and plan.prompt_logprobs is None else _token_texts(state)
        shown = None if plan.logprobs is None else texts
        return PreparedRequest(plan, form_of(body, plan)(header, texts=shown, origins=plan.origins), texts)

    async def prepare(state: ServerState) -> PreparedRequest:
        service = require_engine(state)
        body = await run_beside_event_loop(service, owner, len(data), partial(parse_body, data, model))
        return await run_beside_event_loop(
            service, owner, len(data), partial(plan, state, body), compiles=may_compile(body)
        )

    return Answer(partial(server.lease, request, data), owner, prepare, server.config.request_timeout_s)


def _token_texts(state: ServerState) -> TokenTexts:
    """Of the model's tokenizer; made when they are first asked for."""
    if state.token_texts is None:
        state.token_texts = TokenTexts(require_engine(state).engine.tokenizer)
    return state.token_texts

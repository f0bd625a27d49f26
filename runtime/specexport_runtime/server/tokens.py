"""``/tokenize``, ``/detokenize`` and ``/version``, with vLLM's names."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from specexport_runtime.engine import SpecEngine
from specexport_runtime.requests.token_bytes import decode_ids, get_token_name
from specexport_runtime.server.admission import require_engine
from specexport_runtime.server.answer import interrupt_on_disconnect
from specexport_runtime.server.completions import get_owner
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import make_dialect, read_prompt, read_tools
from specexport_runtime.server.errors import ERROR_RESPONSES, invalid_error
from specexport_runtime.server.messages_protocol import CountTokensRequest
from specexport_runtime.server.models import resolve_adapter
from specexport_runtime.server.openapi import request_body
from specexport_runtime.server.parsing import parse_body, read_request_body
from specexport_runtime.server.prompt_tokens import check_length, encode, run_beside_event_loop
from specexport_runtime.server.protocol import MAX_ITEMS, Message, PromptEnd, StrictModel, TokenIds, Tools
from specexport_runtime.server.state import ServerState, state_of

router = APIRouter(tags=["tokens"])


class TokenizeRequest(PromptEnd):
    """Body of ``/tokenize``: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(default=None, description="Of a prompt; a conversation has its template's.")
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest, CountTokensRequest)


@router.post("/tokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation by the model's chat template."""
    return await answer_beside_event_loop(request, TokenizeRequest, _tokenize)


@router.post("/detokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return await answer_beside_event_loop(request, DetokenizeRequest, _detokenize)


async def answer_beside_event_loop(
    request: Request, model: type[Body], work: Callable[[Body, SpecEngine, ServerConfig], Any]
) -> Response:
    """The answer of work on a body; both are bounded by the tokens of a prompt."""
    server, data = state_of(request), await read_request_body(request)

    def build_response(state: ServerState, engine: SpecEngine) -> Response:
        body = parse_body(data, model)
        resolve_adapter(body.model, engine, state.config.model_name)
        return JSONResponse(work(body, engine, state.config))

    async with (
        interrupt_on_disconnect(request.receive, server.config.request_timeout_s),
        server.lease(request, data) as state,
    ):
        service = require_engine(state)
        return await run_beside_event_loop(
            service, get_owner(request), len(data), partial(build_response, state, service.engine)
        )


def _tokenize(body: TokenizeRequest, engine: SpecEngine, config: ServerConfig) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid_error("prompt", "give either prompt or messages.")
    if body.messages is not None:
        source, dialect = "messages", make_dialect(engine, config)
        functions = read_tools(body.tools or (), dialect)
        _, ids = read_prompt(engine, config, dialect, body.messages, functions, body.chat_template_kwargs, body)
    else:
        source, special = "prompt", body.add_special_tokens is not False
        ids = encode(engine, body.prompt or "", source, config.max_prompt_tokens, add_special_tokens=special)
    check_length(engine, config, source, ids)
    names = [get_token_name(engine.tokenizer, token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": names}


def _detokenize(body: DetokenizeRequest, engine: SpecEngine, config: ServerConfig) -> dict[str, Any]:
    ids = body.tokens
    check_length(engine, config, "tokens", ids)
    for token in ids:
        if token >= engine.target.vocab_size:
            raise invalid_error(
                "tokens", f"tokens names token {token}; ids go from 0 to {engine.target.vocab_size - 1}."
            )
    return {"prompt": decode_ids(engine.tokenizer, ids, skip_special_tokens=False)}


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the server."""
    try:
        return {"version": version("specexport")}
    except PackageNotFoundError:  # run from its sources
        return {"version": "unknown"}

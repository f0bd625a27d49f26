"""``/tokenize``, ``/detokenize`` and ``/version``, with vLLM's names."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from specexport_runtime.engine import SpecEngine
from specexport_runtime.requests.token_bytes import name_of, text_of
from specexport_runtime.server.admission import ready_engine
from specexport_runtime.server.answer import request_life
from specexport_runtime.server.completions import owner_of
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import dialect_of, read_prompt, tools_of
from specexport_runtime.server.errors import ERROR_RESPONSES, invalid
from specexport_runtime.server.models import adapter_of
from specexport_runtime.server.parsing import bytes_of, parse_body, request_body
from specexport_runtime.server.prompt_tokens import beside, check_length, encode
from specexport_runtime.server.protocol import MAX_ITEMS, Message, PromptEnd, Strict, TokenIds, Tools
from specexport_runtime.server.state import state_of

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


class DetokenizeRequest(Strict):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


@router.post("/tokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation by the model's chat template."""
    return await _answer(request, TokenizeRequest, _tokenize)


@router.post("/detokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return await _answer(request, DetokenizeRequest, _detokenize)


async def _answer(
    request: Request, model: type[Body], work: Callable[[Body, SpecEngine, ServerConfig], Any]
) -> Response:
    """The answer of work on a body; both are bounded by the tokens of a prompt."""
    state = state_of(request)
    service, data = ready_engine(state), await bytes_of(request)

    def told() -> Response:
        body = parse_body(data, model)
        adapter_of(body.model, service.engine, state.config.model_name)
        return JSONResponse(work(body, service.engine, state.config))

    async with request_life(request.receive, state.config.request_timeout_s):
        return await beside(service, owner_of(request), len(data), told)


def _tokenize(body: TokenizeRequest, engine: SpecEngine, config: ServerConfig) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages.")
    if body.messages is not None:
        source, dialect = "messages", dialect_of(engine, config)
        functions = tools_of(body.tools or (), dialect)
        _, ids = read_prompt(engine, config, dialect, body.messages, functions, body.chat_template_kwargs, body)
    else:
        source, special = "prompt", body.add_special_tokens is not False
        ids = encode(engine, body.prompt or "", source, config.max_prompt_tokens, add_special_tokens=special)
    check_length(engine, config, source, ids)
    names = [name_of(engine.tokenizer, token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": names}


def _detokenize(body: DetokenizeRequest, engine: SpecEngine, config: ServerConfig) -> dict[str, Any]:
    ids = body.tokens
    check_length(engine, config, "tokens", ids)
    for token in ids:
        if token >= engine.target.vocab_size:
            raise invalid("tokens", f"tokens names token {token}; ids go from 0 to {engine.target.vocab_size - 1}.")
    return {"prompt": text_of(engine.tokenizer, ids, skip_special_tokens=False)}


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the server."""
    try:
        return {"version": version("specexport")}
    except PackageNotFoundError:  # run from its sources
        return {"version": "unknown"}

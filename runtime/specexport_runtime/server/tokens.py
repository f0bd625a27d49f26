"""``/tokenize``, ``/detokenize`` and ``/version``, with vLLM's names."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from specexport_runtime.server.completions import ready_engine
from specexport_runtime.server.conversation import dialect_of, read_prompt, tools_of
from specexport_runtime.server.errors import ERROR_RESPONSES, invalid
from specexport_runtime.server.models import adapter_of
from specexport_runtime.server.parsing import parse_body, request_body
from specexport_runtime.server.prompt_tokens import aside_if_long, encode
from specexport_runtime.server.protocol import MAX_ITEMS, Message, Refused, Strict, TokenIds, Tools
from specexport_runtime.server.state import state_of

router = APIRouter(tags=["tokens"])


class TokenizeRequest(Strict):
    """Body of ``/tokenize``: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(default=None, description="Of a prompt; a conversation has its template's.")
    return_token_strs: bool | None = None
    add_generation_prompt: Refused[Literal[True]] = None
    continue_final_message: Refused[Literal[False]] = None


class DetokenizeRequest(Strict):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


@router.post("/tokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """The token ids of a prompt, or of a conversation by the model's chat template."""
    state = state_of(request)
    service = ready_engine(state)
    body = await parse_body(request, TokenizeRequest)
    adapter_of(body.model, service.engine, state.config.model_name)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages.")
    engine = service.engine
    if body.messages is not None:
        dialect = dialect_of(engine, state.config)
        functions = tools_of(body.tools or (), dialect)
        _, ids = await read_prompt(service, dialect, body.messages, functions, body.chat_template_kwargs)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        ids = await aside_if_long(service, len(text), lambda: encode(engine, text, add_special_tokens=special))
    names = [engine.tokenizer.id_to_token(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": names}


@router.post("/detokenize", responses=ERROR_RESPONSES, openapi_extra=request_body(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    service = ready_engine(state)
    body = await parse_body(request, DetokenizeRequest)
    adapter_of(body.model, service.engine, state.config.model_name)
    engine, ids = service.engine, body.tokens
    for token in ids:
        if token >= engine.target.vocab_size:
            raise invalid("tokens", f"tokens names token {token}; ids go from 0 to {engine.target.vocab_size - 1}.")
    text = await aside_if_long(service, len(ids), lambda: engine.tokenizer.decode(ids, skip_special_tokens=False))
    return {"prompt": text}


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the server."""
    try:
        return {"version": version("specexport")}
    except PackageNotFoundError:  # run from its sources
        return {"version": "unknown"}

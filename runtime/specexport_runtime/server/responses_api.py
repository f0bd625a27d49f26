"""``/v1/responses``, as far as a response is one generation: it is planned as a chat, and told in its own form."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server.completions import make_answer, note_request, owner_of, ready_engine
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, invalid
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.parsing import parse_body
from specexport_runtime.server.protocol import ChatRequest, Message, Sampling
from specexport_runtime.server.responses_format import ResponsesFormat
from specexport_runtime.server.responses_protocol import (
    LOGPROBS,
    FlatJsonSchemaFormat,
    InputMessage,
    ResponsesRequest,
)
from specexport_runtime.server.responses_schema import ResponseAnswer
from specexport_runtime.server.state import state_of
from specexport_runtime.server.translate import Plan, plan_chat

router = APIRouter(tags=["generation"])

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}
"""Parameters of a chat, and what they are called here."""


@router.post(
    "/v1/responses",
    response_class=Response,
    responses=responses(ResponseAnswer, events="OpenAI's typed events, from `response.created` to the last"),
    openapi_extra=request_body(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """Answer a text, or a conversation."""
    state = state_of(request)
    engine = ready_engine(state)
    body = await parse_body(request, ResponsesRequest)
    plan = await plan_response(body, engine, state.config, owner_of(request))
    note_request(request, state, plan, body.safety_identifier or body.user)
    return make_answer(request, state, engine, plan, "resp_", partial(ResponsesFormat, body))


async def plan_response(
    body: ResponsesRequest, service: AsyncSpecEngine, config: ServerConfig, owner: str = ""
) -> Plan:
    """The request of a body of ``/v1/responses``; ``owner`` keeps what is remembered apart.

    Raises:
        ApiError: 400; names the parameter.
    """
    if body.top_logprobs and not body.include:
        raise invalid("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"].')
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true.")
    try:
        return await plan_chat(_as_chat(body), service, config, owner)
    except ApiError as error:
        raise _renamed(error) from None


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a response is."""
    told = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [Message(role=each.role, content=_content(each)) for each in told]
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    chat = {name: getattr(body, name) for name in Sampling.model_fields} | {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body),
        "logprobs": bool(body.include),
        "top_logprobs": body.top_logprobs if body.include else None,
    }
    return ChatRequest.model_validate(chat)


def _content(message: InputMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _response_format(body: ResponsesRequest) -> Any:
    """The form of the answer as chats have it: a schema is one level deeper there."""
    form = None if body.text is None else body.text.format
    if not isinstance(form, FlatJsonSchemaFormat):
        return form
    schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": schema}


def _renamed(error: ApiError) -> ApiError:
    """The error of a chat in the words of this endpoint."""
    param, message = error.param or "", error.message
    if param == "structured_outputs":
        message = message.replace("response_format", _NAMES["response_format"])
    for name, own in _NAMES.items():
        if f"{param}.".startswith(f"{name}."):
            param, message = param.replace(name, own, 1), message.replace(name, own, 1)
            break
    return ApiError(error.status, message, kind=error.kind, param=param or None, code=error.code, headers=error.headers)

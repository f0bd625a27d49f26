"""``/v1/responses``, as far as a response is one generation: it is planned as a chat, and told in its own form."""

from functools import partial

from fastapi import APIRouter, Request, Response

from specexport_runtime.async_engine import AsyncSpecEngine
from specexport_runtime.server.completions import make_answer, note_request, owner_of, ready_engine
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, invalid, unsupported
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.parsing import parse_body
from specexport_runtime.server.responses_format import ResponsesFormat
from specexport_runtime.server.responses_input import ResponseAsChat
from specexport_runtime.server.responses_protocol import LOGPROBS, ResponsesRequest
from specexport_runtime.server.responses_schema import ResponseAnswer
from specexport_runtime.server.state import state_of
from specexport_runtime.server.translate import Plan, plan_chat

router = APIRouter(tags=["generation"])


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
    note_request(request, state, plan, body)
    return make_answer(request, state, engine, plan, "resp_", partial(ResponsesFormat, body, plan.conversation))


async def plan_response(
    body: ResponsesRequest, service: AsyncSpecEngine, config: ServerConfig, owner: str = ""
) -> Plan:
    """The request of a body of ``/v1/responses``; ``owner`` keeps what is remembered apart.

    ``ApiError`` 400 names the parameter.
    """
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"].')
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true.")
    chat = ResponseAsChat(body)
    try:
        plan = await plan_chat(chat.request, service, config, owner)
    except ApiError as error:
        raise chat.renamed(error) from None
    if plan.conversation is not None:
        for param, asked in (("include", body.wants_logprobs), ("speculative.token_origins", plan.origins)):
            if asked:
                message = f"{param}: tokens are not told of where an answer may have calls or thinking."
                raise unsupported(param, f"{message} /v1/chat/completions tells of all of them.")
    return plan

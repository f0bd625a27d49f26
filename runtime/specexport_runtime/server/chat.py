"""``/v1/chat/completions``."""

from functools import partial

from fastapi import APIRouter, Request, Response

from specexport_runtime.server.answer_schema import ChatAnswer
from specexport_runtime.server.completions import make_answer, note_request, owner_of, ready_engine
from specexport_runtime.server.message_parts import PartsFormat
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.parsing import parse_body
from specexport_runtime.server.protocol import ChatRequest
from specexport_runtime.server.responses import ChatFormat
from specexport_runtime.server.state import state_of
from specexport_runtime.server.translate import plan_chat

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses=responses(ChatAnswer),
    openapi_extra=request_body(ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    engine = ready_engine(state)
    body = await parse_body(request, ChatRequest)
    plan = await plan_chat(body, engine, state.config, owner_of(request))
    note_request(request, state, plan, body)
    talk = plan.conversation
    form = ChatFormat if talk is None else partial(PartsFormat, talk)
    return make_answer(request, state, engine, plan, "chatcmpl-", form)

"""``/v1/responses``, as far as a response is one generation: planned as a chat, and told in its own form."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from specexport_runtime.engine import SpecEngine
from specexport_runtime.intake.functions import MAX_FUNCTIONS
from specexport_runtime.server.chat_names import ChatNames
from specexport_runtime.server.completions import answer
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, invalid_error, over_limit_error, unsupported_error
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.protocol import MAX_ITEMS, ChatRequest, Sampling
from specexport_runtime.server.responses_format import ResponsesFormat
from specexport_runtime.server.responses_protocol import (
    LOGPROBS,
    FlatJsonSchemaFormat,
    FunctionToolChoice,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ResponsesRequest,
)
from specexport_runtime.server.responses_schema import ResponseAnswer
from specexport_runtime.server.translate import RequestPlan, plan_chat

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
"""Parameters of a chat, and what they are called here."""

router = APIRouter(tags=["generation"])


class ResponseAsChat:
    """The chat (``request``) that a response is, and what its parts are called there; ApiError 400 if it cannot be."""

    def __init__(self, body: ResponsesRequest) -> None:
        self.names = ChatNames(_NAMES)
        self._messages: list[dict[str, Any]] = []
        if body.instructions is not None:
            self.names["messages[0].content"] = "instructions"
            self._add({"role": "system", "content": body.instructions}, "instructions")
        if isinstance(body.input, str):
            self.names[f"messages[{len(self._messages)}].content"] = "input"
            self._add({"role": "user", "content": body.input}, "input")
        else:
            self._read(body.input)
        if not self._messages:
            raise invalid_error("input", "input has nothing but empty items of reasoning.")
        if len(self._messages) > MAX_ITEMS:
            raise over_limit_error("input", f"{len(self._messages)} messages", MAX_ITEMS)
        self.request = ChatRequest.model_validate(
            {name: getattr(body, name) for name in Sampling.model_fields}
            | {
                "messages": self._messages,
                "max_completion_tokens": body.max_output_tokens,
                "response_format": _response_format(body),
                "logprobs": body.wants_logprobs,
                "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
                "tools": self._tools(body),
                "tool_choice": _tool_choice(body),
                "parallel_tool_calls": body.parallel_tool_calls,
                "chat_template_kwargs": body.chat_template_kwargs,
                "reasoning_effort": body.reasoning and body.reasoning.effort,
            }
        )

    def _read(self, items: Sequence[InputItem]) -> None:
        """Items to messages: what the model thought, said and called between others' messages is one of its own."""
        turn: dict[str, Any] | None = None  # the assistant's, to which more may be added
        for i, item in enumerate(items):
            own = f"input[{i}]"
            match item:
                case InputReasoning():
                    if text := _text(item.content or ""):
                        turn = self._add({"role": "assistant", "content": None, "reasoning_content": text}, own)
                case InputMessage(role="assistant"):
                    if turn is None or turn["content"] is not None or "tool_calls" in turn:
                        turn = self._add({"role": "assistant", "content": None}, own)
                    turn["content"] = _text(item.content)
                case InputCall():
                    turn = self._add({"role": "assistant", "content": None}, own) if turn is None else turn
                    self._call(item, turn, own)
                case InputMessage():
                    self._add({"role": item.role, "content": _text(item.content)}, own)
                    turn = None
                case InputCallOutput():
                    at = len(self._messages)
                    self.names[f"messages[{at}].tool_call_id"] = f"{own}.call_id"
                    self._add({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id}, own)
                    turn = None

    def _add(self, message: dict[str, Any], own: str) -> dict[str, Any]:
        self.names.setdefault(f"messages[{len(self._messages)}]", own)
        self._messages.append(message)
        return message

    def _call(self, item: InputCall, turn: dict[str, Any], own: str) -> None:
        calls = turn.setdefault("tool_calls", [])
        if len(calls) == MAX_FUNCTIONS:
            raise over_limit_error(own, f"{len(calls) + 1} calls beside each other", MAX_FUNCTIONS)
        where = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {f"{where}.function": own, where: own}
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def _tools(self, body: ResponsesRequest) -> list[dict[str, Any]] | None:
        if body.tools is None:
            return None
        for i in range(len(body.tools)):
            self.names[f"tools[{i}].function"] = f"tools[{i}]"
        return [
            {"type": tool.type, "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools
        ]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if not isinstance(choice, FunctionToolChoice):
        return choice
    return {"type": choice.type, "function": {"name": choice.name}}


def _response_format(body: ResponsesRequest) -> Any:
    """The form of the answer as chats have it: a schema is one level deeper there."""
    form = None if body.text is None else body.text.format
    if not isinstance(form, FlatJsonSchemaFormat):
        return form
    schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": schema}


@router.post(
    "/v1/responses",
    response_class=Response,
    responses=responses(ResponseAnswer, events="OpenAI's typed events, from `response.created` to the last"),
    openapi_extra=request_body(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """Answer a text, or a conversation."""
    form_of = lambda body, plan: partial(ResponsesFormat, body, plan.conversation)  # noqa: E731
    return await answer(request, "resp_", ResponsesRequest, plan_response, form_of)


def plan_response(body: ResponsesRequest, engine: SpecEngine, config: ServerConfig, owner: str = "") -> RequestPlan:
    """The request of a body of ``/v1/responses`` (ApiError 400); ``owner`` keeps what is remembered apart."""
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid_error("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"].')
    if body.stream_options is not None and not body.stream:
        raise invalid_error("stream_options", "stream_options needs stream: true.")
    chat = ResponseAsChat(body)
    try:
        plan = plan_chat(chat.request, engine, config, owner)
    except ApiError as error:
        raise chat.names.translate(error) from None
    if plan.conversation is not None:
        for param, asked in (("include", body.wants_logprobs), ("speculative.token_origins", plan.origins)):
            if asked:
                message = f"{param}: tokens are not told of where an answer may have calls or thinking."
                raise unsupported_error(param, f"{message} /v1/chat/completions tells of all of them.")
    return plan

"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: planned as a chat, and told in their own form."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from specexport_runtime.engine import SpecEngine
from specexport_runtime.intake.chat import template_variables
from specexport_runtime.intake.chat_dialect import ChatDialect
from specexport_runtime.intake.functions import MAX_FUNCTIONS
from specexport_runtime.server import messages_protocol as bodies
from specexport_runtime.server.chat_names import ChatNames
from specexport_runtime.server.completions import answer
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import make_dialect, read_conversation
from specexport_runtime.server.errors import ApiError, invalid_error, over_limit_error, shown, unsupported_error
from specexport_runtime.server.messages_format import MessagesFormat
from specexport_runtime.server.messages_schema import MESSAGES_ERRORS, MessageAnswer, TokenCount
from specexport_runtime.server.openapi import request_body, responses
from specexport_runtime.server.prompt_tokens import check_length
from specexport_runtime.server.protocol import MAX_ITEMS, ChatRequest, Sampling
from specexport_runtime.server.tokens import answer_beside_event_loop
from specexport_runtime.server.translate import RequestPlan, plan_chat

_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
}
"""Parameters of a chat, and what they are called here."""
_ORDER = (bodies.RedactedThinkingBlock, bodies.ThinkingBlock, bodies.TextBlock, bodies.ToolUseBlock)
"""What a message of the assistant has, in the order of a chat."""
_BLOCKS = {"assistant": _ORDER, "user": (bodies.TextBlock, bodies.ToolResultBlock), "system": (bodies.TextBlock,)}

router = APIRouter(tags=["generation"])


class MessagesAsChat:
    """The chat (``request``) that a body is, and what its parts are called there; ApiError 400 if it cannot be."""

    def __init__(self, body: bodies.CountTokensRequest, dialect: ChatDialect) -> None:
        self.names = ChatNames(_NAMES)
        self._messages: list[dict[str, Any]] = []
        if body.system not in (None, []):
            self._read_message(bodies.Turn.model_construct(role="system", content=body.system), "system", "system")
        for i, message in enumerate(body.messages):
            self._read_message(message, f"messages[{i}]", f"messages[{i}].content")
        if len(self._messages) > MAX_ITEMS:
            raise over_limit_error("messages", f"{len(self._messages)} turns and results of tools", MAX_ITEMS)
        sampling: dict[str, Any] = {"model": body.model}
        if isinstance(body, bodies.MessagesRequest):
            sampling = {name: getattr(body, name) for name in Sampling.model_fields}
            sampling |= {"stop": body.stop_sequences, "metadata": None, "service_tier": None}
            # The text comes with its stop sequence, which tells which one it was.
            sampling["include_stop_str_in_output"] = True
        form = body.response_format
        chat = {
            "messages": self._messages,
            "response_format": form
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}},
            "tools": [self._read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
            "tool_choice": body.tool_choice and _read_tool_choice(body.tool_choice),
            "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        }
        if self._messages[-1]["role"] == "assistant":
            self.names["continue_final_message"] = f"messages[{len(body.messages) - 1}]"
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        self.request = ChatRequest.model_validate(sampling | chat | _read_thinking(body, dialect))

    def translate(self, error: ApiError) -> ApiError:
        """The error of the chat in the words of the body."""
        told = self.names.translate(error)
        told.message = told.message.replace("leave continue_final_message out", "end with a message of the user")
        return told

    def _read_message(self, message: bodies.Turn, own: str, own_content: str) -> None:
        """A message to those of a chat: the result of a tool is one, and so is what comes in another order."""
        content, turn, last, before = message.content, None, 0, len(self._messages)
        blocks = [bodies.TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            where, kinds = f"{own_content}[{j}]", _BLOCKS[message.role]
            if type(block) not in kinds:
                said = f"{where}.type is {block.type!r}, which is not for messages of role {message.role!r}."
                raise invalid_error(f"{where}.type", said)
            if isinstance(block, bodies.ToolResultBlock):
                self.names[f"messages[{len(self._messages)}].tool_call_id"] = f"{where}.tool_use_id"
                self._add_message(
                    "tool", where, f"{where}.content", content=_read_result(block), tool_call_id=block.tool_use_id
                )
                turn = None
                continue
            rank = kinds.index(type(block))
            if turn is None or rank < last:
                turn = self._add_message(message.role, own, own_content, content=[])
            last = rank
            match block:
                case bodies.TextBlock():
                    turn["content"].append({"type": "text", "text": block.text})
                case bodies.ThinkingBlock():
                    self.names[f"messages[{len(self._messages) - 1}].reasoning_content"] = where
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
                case bodies.ToolUseBlock():
                    self._add_call(block, turn, where)
        if len(self._messages) == before:
            self._add_message(message.role, own, own_content, content=[])

    def _add_call(self, block: bodies.ToolUseBlock, turn: dict[str, Any], own: str) -> None:
        calls = turn.setdefault("tool_calls", [])
        if len(calls) == MAX_FUNCTIONS:
            raise over_limit_error(own, f"{len(calls) + 1} calls beside each other", MAX_FUNCTIONS)
        where = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {f"{where}.function.arguments": f"{own}.input", where: own}
        try:
            function = {"name": block.name, "arguments": json.dumps(block.input, allow_nan=False)}
        except ValueError:
            raise invalid_error(f"{own}.input", f"{own}.input has a number that is too large.") from None
        calls.append({"id": block.id, "type": "function", "function": function})

    def _add_message(self, role: str, own: str, own_content: str, **more: Any) -> dict[str, Any]:
        where = f"messages[{len(self._messages)}]"
        self.names |= {where: own, f"{where}.content": own_content}
        self._messages.append({"role": role, **more})
        return self._messages[-1]

    def _read_tool(self, tool: bodies.CustomTool, own: str) -> dict[str, Any]:
        self.names |= {f"{own}.function.parameters": f"{own}.input_schema", f"{own}.function": own}
        function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _read_result(block: bodies.ToolResultBlock) -> str:
    """What a tool gave, as the model reads it: chats have no place for its failure."""
    content = block.content or ""
    text = content if isinstance(content, str) else "".join([each.text for each in content])
    return f"Error: {text}" if block.is_error else text


def _read_tool_choice(choice: bodies.ToolUseChoice) -> Any:
    if choice.type != "tool":
        if choice.name is not None:
            raise invalid_error("tool_choice.name", 'tool_choice.name is only for {"type": "tool"}.')
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is missing.", param="tool_choice.name", code="missing_required_parameter")
    return {"type": "function", "function": {"name": choice.name}}


def _read_thinking(body: bodies.CountTokensRequest, dialect: ChatDialect) -> dict[str, Any]:
    """Whether the model thinks, and how much, as chats have it. One that never thinks keeps to any budget."""
    names, own = template_variables(dialect.template), {}
    effort = body.output_config and body.output_config.effort
    if effort == "high" and "reasoning_effort" not in names:
        effort = None
    budget = None
    if body.thinking is not None:
        kind, budget = body.thinking.type, body.thinking.budget_tokens
        if (budget is None) == (kind == "enabled"):
            param = "thinking.budget_tokens"
            raise invalid_error(param, f'{param} is needed for {{"type": "enabled"}}, and only for that.')
        if "enable_thinking" in names:
            own = {"enable_thinking": kind != "disabled"}
        elif kind == "disabled":
            budget = 0
    return {
        "reasoning_effort": effort,
        "thinking_token_budget": None if dialect.thinking is None else budget,
        "chat_template_kwargs": own | (body.chat_template_kwargs or {}),
    }


@router.post(
    "/v1/messages",
    response_class=Response,
    responses=responses(MessageAnswer, events="Anthropic's events, from `message_start` to `message_stop`")
    | MESSAGES_ERRORS,
    openapi_extra=request_body(bodies.MessagesRequest),
)
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(
        request, "msg_", bodies.MessagesRequest, plan_messages, lambda *of: partial(MessagesFormat, *of)
    )


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=MESSAGES_ERRORS,
    openapi_extra=request_body(bodies.CountTokensRequest),
)
async def count_tokens(request: Request) -> Response:
    """The number of tokens of a conversation."""
    return await answer_beside_event_loop(request, bodies.CountTokensRequest, _count_tokens)


def plan_messages(
    body: bodies.MessagesRequest, engine: SpecEngine, config: ServerConfig, owner: str = ""
) -> RequestPlan:
    """The request of a body of ``/v1/messages`` (ApiError 400); ``owner`` keeps what is remembered apart.

    As in Anthropic's API, an answer may end with the context before its ``max_tokens``.
    """
    if body.speculative is not None and body.speculative.token_origins:
        param = "speculative.token_origins"
        raise unsupported_error(param, f"{param}: tokens are not told of here. /v1/chat/completions tells of them.")
    if config.max_tokens is not None and body.max_tokens > config.max_tokens:
        raise over_limit_error("max_tokens", f"max_tokens = {shown(body.max_tokens)}", config.max_tokens)
    chat = MessagesAsChat(body, make_dialect(engine, config))
    try:
        plan = plan_chat(chat.request, engine, config, owner)
    except ApiError as error:
        raise chat.translate(error) from None
    (spec,) = plan.specs
    limited = replace(spec.params, max_tokens=min(body.max_tokens, spec.params.max_tokens))
    return plan._replace(specs=[spec._replace(params=limited)])


def _count_tokens(body: bodies.CountTokensRequest, engine: SpecEngine, config: ServerConfig) -> dict[str, int]:
    chat = MessagesAsChat(body, make_dialect(engine, config))
    try:
        ids = read_conversation(chat.request, engine, config).ids
        check_length(engine, config, "messages", ids)
    except ApiError as error:
        raise chat.translate(error) from None
    return {"input_tokens": len(ids)}

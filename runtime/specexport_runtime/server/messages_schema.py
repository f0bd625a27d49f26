"""What ``/v1/messages`` answers, for OpenAPI; it is written by ``messages_format`` without these models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from specexport_runtime.server.answer_schema import AnswerPart, SpeculativeUsage
from specexport_runtime.server.errors import ERROR_RESPONSES


class MessageText(AnswerPart):
    """Text for the user."""

    type: Literal["text"]
    text: str


class MessageThinking(AnswerPart):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageCall(AnswerPart):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(AnswerPart):
    """Tokens of one message; those of the input are the first three together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    speculative: SpeculativeUsage


class MessageAnswer(AnswerPart):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[MessageText | MessageThinking | MessageCall, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(AnswerPart):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class MessagesErrorDetail(AnswerPart):
    """What is wrong."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesErrorBody(AnswerPart):
    """The body of every answer that is not a success."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorBody, "description": told["description"]}
    for status, told in ({"4XX": {"description": "The request was refused."}} | ERROR_RESPONSES).items()
}
"""As ``ERROR_RESPONSES``."""

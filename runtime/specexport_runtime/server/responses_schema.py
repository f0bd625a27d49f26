"""What ``/v1/responses`` answers, for OpenAPI; it is written by ``responses_format`` without these models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from specexport_runtime.server.answer_schema import AnswerPart, ChatTokenChoice, SpeculativeUsage, TokenOrigin

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputTextPart(AnswerPart):
    """Text of the model; ``tokens`` only if ``speculative.token_origins`` asked for them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenChoice]
    tokens: list[TokenOrigin] | None = None


class OutputMessage(AnswerPart):
    """What the model said."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ReasoningPart(AnswerPart):
    """Text that the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(AnswerPart):
    """What the model thought before it answered."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningPart]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCall(AnswerPart):
    """A call of a function; ``arguments`` is a text that holds a JSON object, if its status is ``completed``."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(AnswerPart):
    """Of the tokens of the input, those that a cache row had; nothing is charged for what is written to one."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerPart):
    """Of the tokens of the output, those of thoughts."""

    reasoning_tokens: int


class ResponseUsage(AnswerPart):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculative: SpeculativeUsage


class IncompleteDetails(AnswerPart):
    """Why the answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(AnswerPart):
    """Why there is no answer."""

    code: str
    message: str


class ResponseAnswer(AnswerPart):
    """The answer of ``/v1/responses``: what was asked for, and what came of it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    system_fingerprint: str | None
    output: list[Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None

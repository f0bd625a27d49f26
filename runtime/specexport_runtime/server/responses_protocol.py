"""Body of ``/v1/responses``: what of OpenAI's Responses API is one generation from text; the rest is refused."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specexport_runtime.server.protocol import (
    MAX_ITEMS,
    MAX_LOGPROBS,
    Empty,
    JsonObjectFormat,
    JsonSchema,
    Refused,
    Sampling,
    Strict,
    Text,
    TextFormat,
)

LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""
MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _kind(value: Any) -> str:
    """Which form a text has, so that what is wrong with it is told of that form alone."""
    return "list" if isinstance(value, list) else "text"


class InputText(Strict):
    """A part of a message to the model."""

    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """A part of an earlier answer; what clients copy along with its text changes nothing."""

    type: Literal["output_text"]
    text: str
    annotations: Refused[Empty] = None
    logprobs: Annotated[list[Any], Field(max_length=2**20)] | None = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


class InputMessage(Strict):
    """A message of the conversation so far; an output item of an earlier answer is one, too."""

    type: Literal["message"] | None = None  # first: an item of another kind is told of by its kind
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("list")], Discriminator(_kind)]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Refused[None] = None


Messages = Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


class FlatJsonSchemaFormat(JsonSchema):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(Strict):
    """The form of the answer."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")] | None
    ) = None  # fmt: skip
    verbosity: Refused[None] = None


class EventOptions(Strict):
    """Options of a stream."""

    include_obfuscation: Refused[Literal[False]] = None


class Reasoning(Strict):
    """Settings of models that think; taken if they ask for nothing."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(Sampling):
    """Body of ``/v1/responses``."""

    input: Annotated[Annotated[Text, Tag("text")] | Annotated[Messages, Tag("list")], Discriminator(_kind)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(fail_fast=True, max_length=8)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    stream_options: EventOptions | None = Field(default=None, description="Only with stream.")
    parallel_tool_calls: bool | None = None  # there are no tools, so there are no calls, parallel or not
    tools: Refused[Empty] = None
    tool_choice: Refused[Literal["none", "auto"]] = None
    max_tool_calls: Refused[None] = None
    store: Refused[Literal[False]] = None
    previous_response_id: Refused[None] = None
    conversation: Refused[None] = None
    prompt: Refused[None] = None
    background: Refused[Literal[False]] = None
    truncation: Refused[Literal["disabled"]] = None
    reasoning: Refused[Reasoning] = None
    service_tier: Refused[Literal["auto", "default"]] = None
    prompt_cache_key: Refused[None] = None
    prompt_cache_retention: Refused[None] = None

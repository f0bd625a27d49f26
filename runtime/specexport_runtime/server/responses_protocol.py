"""Body of ``/v1/responses``: what of OpenAI's Responses API is one generation from text; the rest is refused."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from specexport_runtime.intake.functions import MAX_FUNCTIONS
from specexport_runtime.server.protocol import (
    MAX_ITEMS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    OFF,
    Effort,
    Empty,
    FunctionName,
    FunctionSpec,
    Hint,
    JsonObjectFormat,
    JsonSchema,
    Refused,
    Sampling,
    StrictModel,
    Text,
    TextFormat,
    list_or_text,
    object_or_text,
)

LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""The second is for servers that tell nothing of what was thought; here it is told, and can be sent back."""
_NULLS_OF_CLIENTS = ("async", "async_", "caller", "namespace")
MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _item_kind(value: Any) -> str:
    """Which kind an item is of; what is not known is told of as a message whose type is wrong."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind) if kind in ("function_call", "function_call_output", "reasoning") else "message"


class InputText(StrictModel):
    """A part of a message to the model."""

    type: Literal["input_text"]
    text: str
    cache_control: Hint[dict[str, Any]] = None


class OutputText(StrictModel):
    """A part of an earlier answer; what clients copy along with its text changes nothing."""

    type: Literal["output_text"]
    text: str
    annotations: Refused[Empty] = None
    logprobs: Annotated[list[Any], Field(max_length=2**20)] | None = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


Status = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]


class InputMessage(StrictModel):
    """A message of the conversation so far; an output item of an earlier answer is one, too."""

    type: Literal["message"] | None = None  # first: an item of another kind is told of by its kind
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag("a text")] | Annotated[Parts, Tag("a list")], Discriminator(list_or_text)]
    id: str | None = None
    status: Status | None = None
    phase: Refused[None] = None


class InputCall(StrictModel):
    """A call of a function, of an earlier answer; ``arguments`` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = Field(default=None, description="What the official client adds; not read.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """What the official client adds to a call when it writes it down, where it says nothing."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key not in _NULLS_OF_CLIENTS}


InputTexts = Annotated[list[InputText], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


class InputCallOutput(StrictModel):
    """What a call of a function gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[Annotated[str, Tag("a text")] | Annotated[InputTexts, Tag("a list")], Discriminator(list_or_text)]
    id: str | None = None
    status: Status | None = None


class ReasoningText(StrictModel):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(StrictModel):
    """What the model thought before an earlier answer; the chat template keeps it or drops it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    summary: Refused[Empty] = None
    encrypted_content: Refused[None] = None
    id: str | None = None
    status: Status | None = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_kind),
]
InputItems = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]


class _IsFunction(StrictModel):
    type: Annotated[Literal["function"], OFF]


class FlatFunction(FunctionSpec, _IsFunction):  # the fields of the last base come first: a tool is told of by its kind
    """A function that may be called; tools of other kinds are refused."""


class FunctionToolChoice(StrictModel):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a text")] | Annotated[FunctionToolChoice, Tag("an object")],
    Discriminator(object_or_text),
]
FlatFunctions = Annotated[list[FlatFunction], Field(fail_fast=True, max_length=MAX_FUNCTIONS)]


class FlatJsonSchemaFormat(JsonSchema):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(StrictModel):
    """The form of the answer."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")] | None
    ) = None  # fmt: skip
    verbosity: Refused[Literal["medium"]] = None


class EventOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: Refused[Literal[False]] = None


class Reasoning(StrictModel):
    """Settings of models that think. What they thought is told as it is: there are no summaries."""

    effort: Effort | None = Field(default=None, description="Where the chat template reads reasoning_effort.")
    summary: Refused[Literal["auto"]] = None
    generate_summary: Refused[Literal["auto"]] = None


class ResponsesRequest(Sampling):
    """Body of ``/v1/responses``."""

    input: Annotated[Annotated[Text, Tag("a text")] | Annotated[InputItems, Tag("a list")], Discriminator(list_or_text)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    include: Annotated[list[Included], Field(fail_fast=True, max_length=8)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    stream_options: EventOptions | None = Field(default=None, description="Only with stream.")
    tools: FlatFunctions | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, enable_thinking say."
    )
    max_tool_calls: Refused[None] = None
    previous_response_id: Refused[None] = None
    conversation: Refused[None] = None
    prompt: Refused[None] = None
    background: Refused[Literal[False]] = None
    truncation: Refused[Literal["disabled"]] = None
    reasoning: Reasoning | None = None
    client_metadata: Hint[dict[str, Any]] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer tells of the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

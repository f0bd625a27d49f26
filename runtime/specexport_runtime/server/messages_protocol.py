"""Bodies of ``/v1/messages``: what of Anthropic's Messages API is one generation from text; the rest is refused."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from specexport_runtime.intake.functions import MAX_FUNCTIONS
from specexport_runtime.server.protocol import (
    MAX_ITEMS,
    MAX_SALT_CHARS,
    Empty,
    FunctionName,
    Hint,
    Refused,
    Sampling,
    StopText,
    StrictModel,
    list_or_text,
)

CallId = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]


class _MayBeCached(StrictModel):
    cache_control: Hint[dict[str, Any]] = None


class TextBlock(_MayBeCached):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Refused[Empty] = None
    parsed_output: Any = Field(default=None, description="What the official client adds; not read.")


Texts = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_ITEMS)]
TextOrTexts = Annotated[Annotated[str, Tag("a text")] | Annotated[Texts, Tag("a list")], Discriminator(list_or_text)]


class ToolUseBlock(_MayBeCached):
    """A call of a tool, of an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]
    caller: Hint[dict[str, Any]] = None
    toolset_name: Refused[None] = None


class ToolResultBlock(_MayBeCached):
    """What a call of a tool gave."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrTexts | None = None
    is_error: bool | None = Field(default=None, description="true: the model reads `Error: ` before the content.")
    toolset_name: Refused[None] = None


class ThinkingBlock(_MayBeCached):
    """What the model thought before an earlier answer; the chat template keeps it or drops it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Not read.")


class RedactedThinkingBlock(_MayBeCached):
    """Thoughts that only Anthropic can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_ITEMS)]


class Turn(StrictModel):
    """A message of the conversation so far; an assistant's that comes last is the beginning of the answer."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("a text")] | Annotated[Blocks, Tag("a list")], Discriminator(list_or_text)]


class _IsCustom(StrictModel):
    type: Refused[Literal["custom"]] = None


class CustomTool(_MayBeCached, _IsCustom):  # the fields of the last base come first: a tool is told of by its kind
    """A tool that the client runs; others are refused."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: Hint[bool] = None
    defer_loading: Refused[Literal[False]] = None
    allowed_callers: Refused[Annotated[list[Literal["direct"]], Field(fail_fast=True, max_length=1)]] = None
    input_examples: Refused[Empty] = None


class ToolUseChoice(StrictModel):
    """Whether tools are called; ``name`` with the type ``tool``, and only there."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSetting(StrictModel):
    """Whether the model thinks, where its chat template leaves a choice; ``budget_tokens`` with ``enabled``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Refused[Literal["summarized"]] = None


class JsonOutput(StrictModel):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The form of the answer, and how much is thought about it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Where the chat template reads reasoning_effort; `high`, the default, anywhere."
    )
    format: JsonOutput | None = None


class Metadata(StrictModel):
    """About the request."""

    user_id: str | None = Field(default=None, description="Logged.")


class CountTokensRequest(StrictModel):
    """Body of ``/v1/messages/count_tokens``: a conversation."""

    WANTED: ClassVar[dict[str, str]] = {
        "content": "must be a text or a list of blocks",
        "system": "must be a text or a list of blocks that are text",
        "tool_choice": 'must be {"type": "auto"}, "any" or "none", or {"type": "tool", "name": …}',
    }
    model: str | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    system: TextOrTexts | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingSetting | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    cache_control: Hint[dict[str, Any]] = None

    @property
    def response_format(self) -> JsonOutput | None:
        """The form of the answer, by its name in a chat."""
        return None if self.output_config is None else self.output_config.format


class MessagesRequest(CountTokensRequest, Sampling):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=16)] | None = None
    thread: Refused[None] = None
    metadata: Metadata | None = None  # type: ignore[assignment]
    service_tier: Refused[Literal["auto", "standard_only"]] = None  # type: ignore[assignment]
    stop: Refused[None] = None
    include_stop_str_in_output: Refused[Literal[False]] = None

    def model_post_init(self, _: Any) -> None:
        """A user is logged by one name."""
        if self.metadata is not None:
            self.user = self.user or self.metadata.user_id

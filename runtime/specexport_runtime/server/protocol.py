"""Bodies of requests: OpenAI's parameters, and those of vLLM that the engine honours. Nothing else is taken.

A parameter that cannot be honoured is declared with the values that turn it off, so that clients which send their
defaults work and all others are told.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from specexport_runtime.intake.drafting import DRAFTERS, MAX_NODES
from specexport_runtime.intake.functions import MAX_FUNCTIONS, NAME_PATTERN
from specexport_runtime.sampling.block import RULES
from specexport_runtime.sampling.params import CUTS

MAX_LOGPROBS = 20
MAX_ITEMS = 4096
"""Longest list of texts, messages or parts: what a body may hold of each is looked at before anything else runs."""
MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256

Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
IdKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Empty = Annotated[list[Any], Field(fail_fast=True, max_length=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

OFF = "refused unless it is off"
"""Marks a parameter that is declared only to be refused, unless it holds a value that turns it off."""

T = TypeVar("T")
Refused = Annotated[T | None, OFF]
Hint = Annotated[T | None, Field(exclude=True, description="A hint that changes no answer; not read.")]


def list_or_text(value: Any) -> str:
    """Which form a value has, so that what is wrong with it is told of that form alone; no key is called like it."""
    return "a list" if isinstance(value, list) else "a text"


def object_or_text(value: Any) -> str:
    """Likewise."""
    return "an object" if isinstance(value, (dict, BaseModel)) else "a text"


class StrictModel(BaseModel):
    """An object without unknown keys, whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Refused[Literal[False]] = None


class StructuredForm(StrictModel):
    """vLLM's parameter: the form that the text must have; one of them is given."""

    json_schema: dict[str, Any] | Text | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None


class JsonSchema(StrictModel):
    """OpenAI's schema of an answer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class JsonObjectFormat(StrictModel):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class TextFormat(StrictModel):
    """An answer of any form."""

    type: Literal["text"]


Format = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Speculative(StrictModel):
    """How to draft for one request; what is left out is up to the server."""

    num_speculative_tokens: Annotated[int, Field(ge=1, lt=2**31)] | Literal["auto"] | None = None
    drafter: Literal[DRAFTERS] | None = None  # type: ignore[valid-type]
    acceptance: Literal[tuple(RULES)] | None = None  # type: ignore[valid-type]
    tree_size: Annotated[int, Field(ge=0, le=MAX_NODES)] | Literal["auto"] | None = None
    reference: str | None = None
    token_origins: bool | None = None
    remember: bool | None = None


class _Sampling(StrictModel):
    """What all endpoints that generate take."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, description="Choice i of a prompt uses seed + i: each can be asked for alone."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[IdKey, Bias] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Hint[dict[str, Any]] = None
    store: Hint[bool] = None
    prompt_cache_key: Hint[str] = None
    prompt_cache_retention: Hint[str] = None
    service_tier: Refused[Literal["auto", "default"]] = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculative: Speculative | None = None
    structured_outputs: StructuredForm | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        default=None,
        description="Lower goes first. Other than 0 only with --scheduling-policy priority.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    min_tokens: Refused[Literal[0]] = None
    use_beam_search: Refused[Literal[False]] = None
    truncate_prompt_tokens: Refused[None] = None


if TYPE_CHECKING:
    Sampling = _Sampling
else:
    Sampling = create_model(
        "Sampling",
        __base__=_Sampling,
        __doc__=_Sampling.__doc__,
        **{name: (Annotated[float, Field(ge=cut.low, le=cut.high)] | None, None) for name, cut in CUTS.items()},
    )


class Choices(Sampling):
    """What completions and chats take besides."""

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    response_format: Format | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        default=None, description="Not with stream."
    )


class CompletionRequest(Choices):
    """Body of ``/v1/completions``."""

    prompt: (
        str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)] | TokenIds | ManyTokenIds
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="0 only with echo: the prompt, and its log-probabilities if they are asked for."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="What follows the completion. Not with echo.")
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: Refused[Literal[True]] = None


class TextPart(StrictModel):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Hint[dict[str, Any]] = None


class RefusalPart(StrictModel):
    """A part of a message in which the assistant refused."""

    type: Literal["refusal"]
    refusal: str
    cache_control: Hint[dict[str, Any]] = None

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_ITEMS)]
Content = Annotated[Annotated[str, Tag("a text")] | Annotated[Parts, Tag("a list")], Discriminator(list_or_text)]


FunctionName = Annotated[str, Field(pattern=NAME_PATTERN)]


class FunctionSpec(StrictModel):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """OpenAI's tool: a function."""

    type: Literal["function"]
    function: FunctionSpec
    cache_control: Hint[dict[str, Any]] = None


class NamedFunction(StrictModel):
    """A function by its name."""

    name: FunctionName


class NamedTool(StrictModel):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a text")] | Annotated[NamedTool, Tag("an object")],
    Discriminator(object_or_text),
]


class CalledFunction(StrictModel):
    """A function that was called; its arguments are a text that holds a JSON object."""

    name: FunctionName
    arguments: str
    parsed_arguments: Any = Field(default=None, description="What the official client adds; not read.")


class ToolCall(StrictModel):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = Field(default=None, description="What clients copy from a stream; not read.")


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_FUNCTIONS)]
ToolCalls = Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_FUNCTIONS)]


def _role(*names: str, null: tuple[str, ...], given: tuple[str, ...] = ()) -> dict[str, Any]:
    """What messages of a role must have and must not have, for OpenAPI."""
    return {
        "properties": {"role": {"enum": names}}
        | {name: {"type": "null"} for name in null}
        | {name: {"type": ["string", "array"], "minItems": 1} for name in given},
        "required": list(given),
    }


_OF_ASSISTANTS = ("tool_calls", "reasoning_content", "reasoning")
_ROLES: list[Any] = [
    _role("system", "developer", "user", null=(*_OF_ASSISTANTS, "tool_call_id"), given=("content",)),
    _role("assistant", null=("tool_call_id",)),
    _role("tool", null=_OF_ASSISTANTS, given=("content", "tool_call_id")),
]


class Message(StrictModel):
    """A message; the keys that are null are those that clients copy from an answer."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _ROLES})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(default=None, description="null only of the assistant.")
    name: Text | None = None
    tool_calls: ToolCalls | None = Field(default=None, description="Of the assistant.")
    tool_call_id: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = Field(
        default=None, description="Of a tool: the call that it answers."
    )
    reasoning_content: str | None = Field(default=None, description="Of the assistant; the chat template takes it.")
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")
    refusal: Refused[None] = None
    annotations: Refused[Empty] = None
    audio: Refused[None] = None
    function_call: Refused[None] = None
    parsed: Any = Field(default=None, description="What the official client adds; not read.")
    provider_specific_fields: Any = Field(default=None, description="What LiteLLM adds; not read.")
    cache_control: Hint[dict[str, Any]] = None


class Prediction(StrictModel):
    """OpenAI's predicted output: text that the answer probably repeats."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("a text")] | Annotated[Parts, Field(min_length=1), Tag("a list")],
        Discriminator(list_or_text),
    ]


class PromptEnd(StrictModel):
    """How the prompt of a conversation ends, as in vLLM."""

    add_generation_prompt: bool | None = Field(default=None, description="false: it ends with the last message.")
    continue_final_message: bool | None = Field(
        default=None,
        description="It ends with what the last message, the assistant's, says; that goes on.",
    )


class ChatRequest(PromptEnd, Choices):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    echo: bool | None = Field(default=None, description="Only with continue_final_message: the answer begins with it.")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Refused[Empty] = None
    function_call: Refused[Literal["none"]] = None
    audio: Refused[None] = None
    modalities: Refused[Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1, max_length=1)]] = None
    reasoning_effort: Effort | None = Field(default=None, description="Where the chat template reads it.")
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="Most tokens that the model thinks; then its thinking is ended for it."
    )
    verbosity: Refused[Literal["medium"]] = None
    web_search_options: Refused[None] = None
    chat_template: Refused[None] = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, enable_thinking say."
    )


def join_text(content: Content) -> str:
    """The text of a content: its parts one after the other, nothing between them."""
    return content if isinstance(content, str) else "".join(part.text for part in content)

"""What answers look like, for OpenAPI; they are written by ``answer_format`` without these models."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class AnswerPart(BaseModel):
    """An object of an answer, without other keys."""

    model_config = ConfigDict(extra="forbid")


class DrafterUsage(AnswerPart):
    """What one drafter did: rounds with a draft of it, draft tokens tested, of these accepted; both of branches."""

    rounds: int
    drafted: int
    accepted: int
    branches: int
    accepted_branches: int


class SpeculativeUsage(AnswerPart):
    """Drafting, summed over the choices; rate and length are null if nothing was drafted.

    ``drafters`` has those that drafted something, by name.
    """

    rounds: int
    drafted: int
    accepted: int
    branches: int
    accepted_branches: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    drafters: dict[str, DrafterUsage]


class PromptTokensDetails(AnswerPart):
    """Of the tokens of prompts, those that a cache row had: they were not read again."""

    cached_tokens: int


class Usage(AnswerPart):
    """Tokens; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculative: SpeculativeUsage


class TokenOrigin(AnswerPart):
    """Text that one token added, and where the token came from; ``drafter`` and ``branch`` only of accepted ones."""

    text: str
    kind: Literal["accepted", "corrected", "bonus", "target"]
    drafter: str = ""
    branch: bool = False


class CompletionLogprobs(AnswerPart):
    """Log-probabilities as ``/v1/completions`` has them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(AnswerPart):
    """A token of the prompt, or one in its place, as vLLM describes it; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id; null for the first."""


class CompletionChoice(AnswerPart):
    """One text; ``tokens`` only if ``speculative.token_origins`` asked for them, ``prompt_logprobs`` likewise."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    tokens: list[TokenOrigin] = []
    prompt_logprobs: PromptLogprobs = []


class CompletionAnswer(AnswerPart):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class ChatToken(AnswerPart):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenChoice(ChatToken):
    """A token that was chosen, and the likeliest in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(AnswerPart):
    """Log-probabilities as ``/v1/chat/completions`` has them."""

    content: list[ChatTokenChoice]
    refusal: None


class CalledFunctionPart(AnswerPart):
    """A function and its arguments, a text that holds a JSON object."""

    name: str
    arguments: str


class ToolCallPart(AnswerPart):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunctionPart


class ChatMessage(AnswerPart):
    """What the model said.

    ``content`` is null where there is none beside calls or thinking; ``reasoning`` is another name of
    ``reasoning_content``, and both are there only for models that think.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] = []


class ChatChoice(AnswerPart):
    """One message; ``tokens`` as in completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    tokens: list[TokenOrigin] = []


class ChatAnswer(AnswerPart):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []

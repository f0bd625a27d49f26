"""From a checked body to requests of the engine; what the server or the engine does not take is refused here."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from specexport_runtime.engine import SpecEngine
from specexport_runtime.intake.drafting import RequestOptions, RequestSpec
from specexport_runtime.requests.results import as_prompts
from specexport_runtime.requests.text import TextStream
from specexport_runtime.requests.token_bytes import decode_ids
from specexport_runtime.sampling.params import CUTS, SamplingParams
from specexport_runtime.server.answer_format import check_logprob_count, max_logprob_tokens
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.conversation import ParsedConversation, read_conversation
from specexport_runtime.server.errors import invalid_error, over_limit_error, shown, unsupported_error
from specexport_runtime.server.models import resolve_adapter
from specexport_runtime.server.prompt_tokens import check_prompt, check_reference, encode, resolve_max_tokens
from specexport_runtime.server.protocol import ChatRequest, Choices, CompletionRequest, Sampling, join_text
from specexport_runtime.server.structured import read_form

DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions
_SAME_NAMES = (
    *CUTS,
    "top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class Echo(NamedTuple):
    """What a prompt shows."""

    text: str  # the prompt's tokens, decoded
    open_end: int  # characters at its end that may change with tokens of the answer: first bytes of one, say

    @property
    def settled_text(self) -> str:
        """What stays whatever follows."""
        return self.before(self.open_end)

    def before(self, replaced: int) -> str:
        """What stays when the answer has replaced some characters at the end."""
        return self.text[: len(self.text) - replaced]


NO_ECHO = Echo("", 0)


def make_echo(engine: SpecEngine, prompt: Sequence[int], *, skip_special_tokens: bool) -> Echo:
    """The echo of a prompt; ids that are no tokens are left out."""
    known = [token for token in prompt if token < engine.target.vocab_size]
    text = decode_ids(engine.tokenizer, known, skip_special_tokens=skip_special_tokens)
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    return Echo(text, TextStream(engine.tokenizer, params, prompt=known).open_end())


class RequestPlan(NamedTuple):
    """What a body asks for."""

    specs: list[RequestSpec]  # one request a choice; choices of the first prompt come first
    echoes: list[Echo]  # text before each choice's own
    num_prompt_tokens: int  # of all prompts, each counted once
    num_choices: int  # of each prompt
    stream: bool  # answer with events
    include_usage: bool  # end the events with the usage
    origins: bool  # say where each token came from
    logprobs: int | None  # alternatives a token; None for no log-probabilities
    scores: bool = False  # an echo has log-probabilities too
    only_echo: bool = False  # nothing is told of the one token that was generated
    continuous_usage: bool = False  # each chunk has the usage of its choice so far
    conversation: ParsedConversation | None = None  # None where answers have nothing but content
    prompt_logprobs: int | None = None  # alternatives a token of each prompt, in vLLM's shape; None for none
    model: str = ""  # name of the model that answers; empty for the one that is served


def plan_completion(body: CompletionRequest, engine: SpecEngine, config: ServerConfig, owner: str = "") -> RequestPlan:
    """The requests of a body of ``/v1/completions`` (ApiError 400); ``owner`` keeps what is remembered apart."""
    _check_common(body, engine, config)
    if body.best_of not in (None, body.n or 1):
        raise unsupported_error("best_of", "best_of other than n is not supported: leave it out.")
    if body.echo and body.logprobs is not None and body.stream:
        raise unsupported_error("echo", "echo with logprobs cannot be streamed: leave stream out.")
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise invalid_error(
            "max_tokens", "max_tokens is 0, which leaves nothing but an echo that is not streamed: add echo."
        )
    prompts = as_prompts(body.prompt)
    if len(prompts) > config.max_prompts:
        raise over_limit_error("prompt", f"{len(prompts)} prompts", config.max_prompts)
    ids = [encode(engine, prompt, "prompt", config.max_prompt_tokens) for prompt in prompts]
    skip = body.skip_special_tokens is not False
    echoes = [make_echo(engine, prompt, skip_special_tokens=skip) if body.echo else NO_ECHO for prompt in ids]
    limit = ("max_tokens", body.max_tokens or (None if body.max_tokens is None else 1))
    return _make_plan(body, engine, config, owner, "prompt", ids, echoes, limit, DEFAULT_MAX_TOKENS)


def plan_chat(body: ChatRequest, engine: SpecEngine, config: ServerConfig, owner: str = "") -> RequestPlan:
    """The requests of a body of ``/v1/chat/completions`` (ApiError 400); ``owner`` keeps what is remembered apart."""
    _check_common(body, engine, config)
    if body.top_logprobs and not body.logprobs:
        raise invalid_error("top_logprobs", "top_logprobs needs logprobs: true.")
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    given = [(name, value) for name, value in limits.items() if value is not None]
    if len({value for _, value in given}) > 1:
        raise invalid_error("max_tokens", "max_tokens and max_completion_tokens differ: give one.")
    conversation = read_conversation(body, engine, config)
    limit = given[0] if given else ("max_tokens", None)
    most = engine.max_model_len
    return _make_plan(body, engine, config, owner, "messages", [conversation.ids], [NO_ECHO], limit, most, conversation)


def _make_plan(
    body: CompletionRequest | ChatRequest,
    engine: SpecEngine,
    config: ServerConfig,
    owner: str,
    source: str,
    prompts: list[list[int]],
    echoes: list[Echo],
    limit: tuple[str, int | None],
    default_tokens: int,
    conversation: ParsedConversation | None = None,
) -> RequestPlan:
    """``n`` requests for each prompt; choice i uses seed + i, so that each can be asked for alone."""
    n = body.n or 1
    reference = _encode_reference(body, engine)
    drafting = _read_drafting(body, engine, reference, owner)
    adapter = resolve_adapter(body.model, engine, config.model_name)
    if adapter is not None:
        drafting["lora"] = adapter
    common, alternatives = _read_sampling(body), _num_alternatives(body)
    scores = alternatives is not None and isinstance(body, CompletionRequest) and bool(body.echo)
    wanted = {"prompt_logprobs": body.prompt_logprobs, "logprobs": alternatives if scores else None}
    asked = {name: count for name, count in wanted.items() if count is not None}
    for name, count in asked.items():
        check_logprob_count(name, "prompt tokens", sum(map(len, prompts)), count)
    if conversation is not None and isinstance(body, ChatRequest):
        common["structured_outputs"] = conversation.form(body, engine)
        common |= conversation.sampling(common.get("logit_bias"))
    else:
        common["structured_outputs"] = read_form(body, engine)
    if common["structured_outputs"] is not None and body.ignore_eos:
        raise invalid_error("ignore_eos", "ignore_eos: an answer of a given form ends where the form ends.")
    if alternatives is not None:
        common["logprobs"] = alternatives
        num_choices = n * len(prompts)
        check_logprob_count("logprobs", f"tokens of {num_choices} answers", num_choices * (limit[1] or 0), alternatives)
        # Where nothing is asked for, an answer ends where its log-probabilities would be too many.
        default_tokens = min(default_tokens, max_logprob_tokens(num_choices, alternatives))
    specs = []
    for ids in prompts:
        check_prompt(engine, config, source, ids)
        common["max_tokens"] = resolve_max_tokens(engine, config, len(ids), limit, default_tokens)
        for i in range(n):
            seed = None if body.seed is None else body.seed + i
            scored = max(asked.values(), default=None) if i == 0 else None  # the choices of a prompt share it
            params = SamplingParams(**common, seed=seed, prompt_logprobs=scored)
            specs.append(RequestSpec(ids, params, reference, drafting))
    return RequestPlan(
        specs,
        [echo for echo in echoes for _ in range(n)],
        sum(map(len, prompts)),
        n,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        origins=bool(body.speculative and body.speculative.token_origins),
        logprobs=alternatives,
        scores=scores,
        only_echo=body.max_tokens == 0,
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        conversation=conversation if conversation is not None and conversation.has_parts else None,
        prompt_logprobs=body.prompt_logprobs,
        model=adapter or "",
    )


def _check_common(body: Choices, engine: SpecEngine, config: ServerConfig) -> None:
    resolve_adapter(body.model, engine, config.model_name)
    if body.n is not None and body.n > config.max_n:
        raise over_limit_error("n", f"n = {shown(body.n)}", config.max_n)
    if body.priority and config.scheduling_policy != "priority":
        raise unsupported_error("priority", "priority other than 0 needs a server with --scheduling-policy priority.")
    if body.stream_options is not None and not body.stream:
        raise invalid_error("stream_options", "stream_options needs stream: true.")
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported_error("prompt_logprobs", "prompt_logprobs cannot be streamed: leave stream out.")
    vocab = engine.target.vocab_size
    named = {"logit_bias": map(int, body.logit_bias or {}), "stop_token_ids": body.stop_token_ids or ()}
    for param, tokens in named.items():
        for token in tokens:
            if token >= vocab:
                raise invalid_error(param, f"{param} names token {token}; ids go from 0 to {vocab - 1}.")


def _read_sampling(body: Sampling) -> dict[str, Any]:
    """Arguments of ``SamplingParams``; what is null or left out has its default."""
    common = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    common["temperature"] = 1.0 if body.temperature is None else body.temperature
    common["top_k"] = max(body.top_k or 0, 0)  # vLLM's -1 is off, too
    if body.logit_bias:
        common["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return common


def _num_alternatives(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _encode_reference(body: CompletionRequest | ChatRequest, engine: SpecEngine) -> list[int] | None:
    """Token ids that lookup may copy from, besides the prompt; None if none were given."""
    source, text = "speculative.reference", None if body.speculative is None else body.speculative.reference
    if isinstance(body, ChatRequest) and body.prediction is not None:
        if text is not None:
            raise invalid_error("prediction", "prediction and speculative.reference are both given: give one.")
        source, text = "prediction", join_text(body.prediction.content)
    if text is None:
        return None
    ids = encode(engine, text, source, add_special_tokens=False)
    check_reference(engine, source, ids)
    return ids


def _read_drafting(body: Sampling, engine: SpecEngine, reference: list[int] | None, owner: str) -> RequestOptions:
    """How to draft, for whom, and when; a reference implies that it is copied from."""
    drafting: RequestOptions = {"owner": owner, "priority": body.priority or 0}
    if reference is not None:
        drafting["drafter"] = "lookup" if engine.draft is None and engine.head is None else "chained"
    names = ("drafter", "num_speculative_tokens", "acceptance", "tree_size", "remember")
    given = {name: value for name in names if (value := getattr(body.speculative, name, None)) is not None}
    drafting.update(cast(RequestOptions, given))
    if owner or body.cache_salt is not None:  # a key's digest has no slash: no client can name another's scope
        drafting["cache_salt"] = f"{owner}/{body.cache_salt or ''}"
    return drafting

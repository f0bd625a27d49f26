"""From a checked body to requests of the engine; what the server or the engine does not take is refused here."""

import asyncio
from typing import Any, NamedTuple

from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.request_spec import RequestSpec
from specexport_runtime.results import as_prompts
from specexport_runtime.sampling import SamplingParams
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError
from specexport_runtime.server.protocol import ChatRequest, CompletionRequest, Sampling, join_text

DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions
_LONG_TEXT = 2000  # characters; longer texts are tokenized on another thread
_MESSAGE = 50  # characters that a message costs besides its content
_SAME_NAMES = (
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class Plan(NamedTuple):
    """What a body asks for.

    Attributes:
        specs: one request a choice; those of the first prompt come first.
        echoes: text before each choice's own.
        num_prompt_tokens: of all prompts, each counted once.
        stream: answer with events.
        include_usage: end the events with the usage.
        origins: say where each token came from.
        logprobs: alternatives a token; None for no log-probabilities.
    """

    specs: list[RequestSpec]
    echoes: list[str]
    num_prompt_tokens: int
    stream: bool
    include_usage: bool
    origins: bool
    logprobs: int | None


async def plan_completion(body: CompletionRequest, engine: SpecEngine, config: ServerConfig) -> Plan:
    """The requests of a body of ``/v1/completions``.

    Raises:
        ApiError: 400; names the parameter.
    """
    _check_common(body, engine, config)
    if body.best_of not in (None, body.n or 1):
        raise _unsupported("best_of", "best_of other than n is not supported: leave it out.")
    if body.echo and body.logprobs is not None:
        raise _unsupported("echo", "echo with logprobs is not supported: prompts have no log-probabilities here.")
    prompts = as_prompts(body.prompt)
    if len(prompts) > config.max_prompts:
        raise _over("prompt", f"{len(prompts)} prompts", config.max_prompts)
    if sum(map(len, prompts)) > _LONG_TEXT:
        ids = await asyncio.to_thread(lambda: [_encode(engine, prompt) for prompt in prompts])
    else:
        ids = [_encode(engine, prompt) for prompt in prompts]
    echoes = [_decode(engine, prompt, body.skip_special_tokens is not False) if body.echo else "" for prompt in prompts]
    return _plan(body, engine, config, "prompt", ids, echoes, ("max_tokens", body.max_tokens), DEFAULT_MAX_TOKENS)


async def plan_chat(body: ChatRequest, engine: SpecEngine, config: ServerConfig) -> Plan:
    """The requests of a body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400; names the parameter.
    """
    _check_common(body, engine, config)
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    given = [(name, value) for name, value in limits.items() if value is not None]
    if len({value for _, value in given}) > 1:
        raise _invalid("max_tokens", "max_tokens and max_completion_tokens differ: give one.")
    messages = [
        {"role": item.role, "content": join_text(item.content)} | ({"name": item.name} if item.name else {})
        for item in body.messages
    ]
    try:
        if sum(len(item["content"]) + _MESSAGE for item in messages) > _LONG_TEXT:
            ids = await asyncio.to_thread(_encode_chat, engine, messages)
        else:
            ids = _encode_chat(engine, messages)
    except InvalidRequestError as error:
        raise _invalid("messages", f"messages: {error}") from None
    limit = given[0] if given else ("max_tokens", None)
    return _plan(body, engine, config, "messages", [ids], [""], limit, engine.max_model_len)


def _plan(
    body: CompletionRequest | ChatRequest,
    engine: SpecEngine,
    config: ServerConfig,
    source: str,
    prompts: list[list[int]],
    echoes: list[str],
    limit: tuple[str, int | None],
    default_tokens: int,
) -> Plan:
    """``n`` requests for each prompt; choice i uses seed + i, so that each can be asked for alone."""
    n = body.n or 1
    reference, drafting = _drafting(body, engine)
    common, alternatives = _sampling(body), _alternatives(body)
    if alternatives is not None:
        common["logprobs"] = alternatives
    specs = []
    for ids in prompts:
        _check_prompt(engine, config, source, ids)
        common["max_tokens"] = _max_tokens(engine, config, len(ids), limit, default_tokens)
        for i in range(n):
            seed = None if body.seed is None else body.seed + i
            specs.append(RequestSpec(ids, SamplingParams(**common, seed=seed), reference, drafting))
    return Plan(
        specs,
        [echo for echo in echoes for _ in range(n)],
        sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        origins=bool(body.speculative and body.speculative.token_origins),
        logprobs=alternatives,
    )


def _check_common(body: Sampling, engine: SpecEngine, config: ServerConfig) -> None:
    if body.model not in (None, config.model_name):
        message = f"There is no model {body.model[:100]!r} here, only {config.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")
    if body.n is not None and body.n > config.max_n:
        raise _over("n", f"n = {_count(body.n)}", config.max_n)
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "stream_options needs stream: true.")
    vocab = engine.target.vocab_size
    named = {"logit_bias": map(int, body.logit_bias or {}), "stop_token_ids": body.stop_token_ids or ()}
    for param, tokens in named.items():
        for token in tokens:
            if token >= vocab:
                raise _invalid(param, f"{param} names token {token}; ids go from 0 to {vocab - 1}.")


def _sampling(body: Sampling) -> dict[str, Any]:
    """Arguments of ``SamplingParams``; what is null or left out has its default."""
    common = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    common["temperature"] = 1.0 if body.temperature is None else body.temperature
    common["top_k"] = max(body.top_k or 0, 0)  # vLLM's -1 is off, too
    if body.logit_bias:
        common["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return common


def _alternatives(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _drafting(body: CompletionRequest | ChatRequest, engine: SpecEngine) -> tuple[str | None, dict[str, Any]]:
    """The text that lookup may copy from, and how to draft."""
    asked = body.speculative
    drafting: dict[str, Any] = {}
    reference = None if asked is None else asked.reference
    if isinstance(body, ChatRequest) and body.prediction is not None:
        if reference is not None:
            raise _invalid("prediction", "prediction and speculative.reference are both given: give one.")
        reference = join_text(body.prediction.content)
    if reference is not None:
        drafting["drafter"] = "lookup" if engine.draft is None else "chained"
    if asked is not None and asked.drafter is not None:
        drafting["drafter"] = asked.drafter
    if asked is not None and asked.num_speculative_tokens is not None:
        drafting["num_speculative_tokens"] = asked.num_speculative_tokens
    return reference, drafting


def _encode(engine: SpecEngine, prompt: Any) -> list[int]:
    return engine.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)


def _encode_chat(engine: SpecEngine, messages: list[dict[str, str]]) -> list[int]:
    """As ``engine.encode_chat``, but of any length: what is too long has an error of its own here."""
    ids: list[int] = engine.tokenizer.encode(engine.format_chat(messages), add_special_tokens=False).ids
    return ids


def _decode(engine: SpecEngine, prompt: Any, skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    known = [token for token in prompt if token < engine.target.vocab_size]  # others are refused later
    return str(engine.tokenizer.decode(known, skip_special_tokens=skip_special_tokens))


def _check_prompt(engine: SpecEngine, config: ServerConfig, source: str, ids: list[int]) -> None:
    if config.max_prompt_tokens is not None and len(ids) > config.max_prompt_tokens:
        raise _over(source, f"{len(ids)} tokens", config.max_prompt_tokens)
    if len(ids) >= engine.max_model_len:
        raise _too_long(source, f"{source} has {len(ids)} tokens", engine.max_model_len)
    try:
        engine.encode(ids)
    except InvalidRequestError as error:
        raise _invalid(source, f"{source}: {error}") from None


def _max_tokens(
    engine: SpecEngine, config: ServerConfig, length: int, limit: tuple[str, int | None], default: int
) -> int:
    """Tokens to generate: what was asked for, all of it, or the default as far as there is room."""
    name, asked = limit
    room, most = engine.max_model_len - length, config.max_tokens
    if asked is None:
        return min(default, room, default if most is None else most)
    if most is not None and asked > most:
        raise _over(name, f"{name} = {_count(asked)}", most)
    if asked > room:
        what = f"{length} of prompt and {name} = {_count(asked)}"
        raise _too_long(name, what, engine.max_model_len)
    return asked


def _count(number: int) -> str:
    return str(number) if number < 2**63 else "over 2**63"


def _too_long(param: str, what: str, most: int) -> ApiError:
    message = f"This model's maximum context length is {most} tokens, prompt and answer together; here: {what}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _over(param: str, what: str, most: int) -> ApiError:
    return ApiError(400, f"{what}: this server takes up to {most} ({param}).", param=param, code="limit_exceeded")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")

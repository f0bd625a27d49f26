"""Token ids of prompts and references, and how many tokens the server and the engine take."""

from collections.abc import Callable
from typing import TypeVar

from specexport_runtime.async_engine import AsyncSpecEngine, Lane
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.results import Prompt
from specexport_runtime.requests.token_bytes import compute_max_token_length, ids_of
from specexport_runtime.server.config import ServerConfig
from specexport_runtime.server.errors import ApiError, invalid_error, over_limit_error, shown

T = TypeVar("T")

_SHORT, _LONG = 2000, 2**15
"""Bytes of a body: shorter ones are worked on at once, longer ones among those that take long."""


async def run_beside_event_loop(
    service: AsyncSpecEngine, owner: str, length: int, work: Callable[[], T], *, compiles: bool = False
) -> T:
    """The result of work on a body of so many bytes, done where it keeps no other client waiting."""
    if length <= _SHORT and not compiles:
        return work()
    lane: Lane = "forms" if compiles else "brief" if length <= _LONG else "long"
    return await service.run_aside(work, owner, lane=lane)


def encode(
    engine: SpecEngine, prompt: Prompt, source: str, most: int | None = None, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a prompt; ``ApiError`` 400 names ``source`` if they must be more than ``most``, by its length."""
    if not isinstance(prompt, str):
        return list(prompt)
    most = engine.max_model_len if most is None else min(most, engine.max_model_len)
    longest = compute_max_token_length(engine.tokenizer)
    if longest is not None and (least := -(-len(prompt) // longest)) > most:
        if most < engine.max_model_len:
            raise over_limit_error(source, f"{source} of at least {least} tokens", most)
        raise _too_long_error(engine, source, f"{source} has at least {least} tokens")
    return ids_of(engine.tokenizer, prompt, add_special_tokens=add_special_tokens)


def check_length(engine: SpecEngine, config: ServerConfig, source: str, ids: list[int]) -> None:
    """Refuse more tokens than the server or the engine takes; ``ApiError`` 400 names ``source``."""
    if config.max_prompt_tokens is not None and len(ids) > config.max_prompt_tokens:
        raise over_limit_error(source, f"{source} of {len(ids)} tokens", config.max_prompt_tokens)
    if len(ids) > engine.max_model_len:
        raise _too_long_error(engine, source, f"{source} has {len(ids)} tokens")


def check_prompt(engine: SpecEngine, config: ServerConfig, source: str, ids: list[int]) -> None:
    """Refuse a prompt that the server or the engine does not take; ``ApiError`` 400 names ``source``."""
    check_length(engine, config, source, ids)
    if len(ids) == engine.max_model_len:
        raise _too_long_error(engine, source, f"{source} has {len(ids)} tokens")
    try:
        engine.encode(ids)
    except InvalidRequestError as error:
        raise invalid_error(source, f"{source}: {error}") from None


def check_reference(engine: SpecEngine, source: str, ids: list[int]) -> None:
    """Refuse (ApiError 400) a reference longer than any answer: reading it keeps all other requests waiting."""
    if len(ids) > engine.max_model_len:
        raise over_limit_error(source, f"{source} of {len(ids)} tokens", engine.max_model_len)


def resolve_max_tokens(
    engine: SpecEngine, config: ServerConfig, length: int, limit: tuple[str, int | None], default: int
) -> int:
    """Tokens to generate after a prompt of ``length``: ``limit``, or the default as far as there is room."""
    name, asked = limit
    room, most = engine.max_model_len - length, config.max_tokens
    if asked is None:
        return min(default, room, default if most is None else most)
    if most is not None and asked > most:
        raise over_limit_error(name, f"{name} = {shown(asked)}", most)
    if asked > room:
        raise _too_long_error(engine, name, f"{length} of prompt and {name} = {shown(asked)}")
    return asked


def _too_long_error(engine: SpecEngine, param: str, what: str) -> ApiError:
    most = engine.max_model_len
    message = f"This model's maximum context length is {most} tokens, prompt and answer together; here: {what}."
    return ApiError(400, message, param=param, code="context_length_exceeded")

"""Which replica requests with a common beginning go to: a key of the prompt, and rendezvous hashing over replicas."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def prompt_key(body: bytes, chars: int) -> str:
    """A key of a prompt's first ``chars`` or a conversation's first turn, alike in later turns; empty for none."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(data, dict):
        return ""
    messages = _response_messages(data) if "input" in data else data.get("messages")
    text = _get_prompt_start(data.get("prompt"), chars) if messages is None else _conversation(messages, chars)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest() if text else ""


def _response_messages(data: Mapping[str, Any]) -> Any:
    """The conversation of a response, its instructions first."""
    told = data["input"]
    messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
    if isinstance(messages, list) and data.get("instructions") is not None:
        return [{"role": "system", "content": data["instructions"]}, *messages]
    return messages


def _conversation(messages: Any, chars: int) -> str:
    if not isinstance(messages, list):
        return ""
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping):
            return ""
        parts.append(f"{message.get('role')}\0{message.get('content')}"[:chars])
        if message.get("role") == "user":
            break
    return "\0".join(parts)


def _get_prompt_start(prompt: Any, chars: int) -> str:
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:chars]
    if isinstance(prompt, list):
        return " ".join(map(str, prompt[:chars]))[:chars]
    return ""


def rank_replicas(key: str, replicas: Sequence[str]) -> list[str]:
    """Replicas in the order in which ``key`` prefers them: rendezvous hashing, by which only a gone one's keys move."""
    return sorted(replicas, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest())


def is_overloaded(preferred: int | None, others: Sequence[int | None], margin: int) -> bool:
    """Whether a replica's queue is longer than the others' shortest by more than ``margin``; None: unknown."""
    known = [length for length in others if length is not None]
    return preferred is not None and bool(known) and preferred > min(known) + margin

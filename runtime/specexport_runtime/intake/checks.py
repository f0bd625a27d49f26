"""Checks of what a caller gave: token ids, lists of one item a prompt, match lengths."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.block import RULES


def check_text(text: str, what: str) -> None:
    """Refuse a text with halves of surrogate pairs, as of bytes that are not UTF-8: no tokenizer takes them."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{what} is no text: character {error.start + 1} is {text[error.start]!r}, half a surrogate pair or a byte "
            "that is not UTF-8.",
            "give text in UTF-8.",
        ) from None


def check_adapter(name: str | None, adapters: Sequence[str]) -> None:
    """Refuse a LoRA adapter that an engine has not, or that is in its weights; None passes."""
    if name is None or name in adapters:
        return
    near = get_close_matches(str(name), adapters, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(adapters)}, or leave it out."
    if not adapters:
        fix = "leave it out; `specexport build --lora NAME=FOLDER --lora-mode choose` makes adapters to choose from."
    raise InvalidRequestError(f"there is no LoRA adapter {name!r} to choose.", fix)


def check_token_ids(ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, has ids outside the vocabulary (V), or leaves no room for a generated token."""
    if not ids:
        raise InvalidRequestError("the prompt is empty.", "give at least one token of text.")
    check_token_range(ids, vocab_size=vocab_size, what="the prompt")
    if len(ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens; this engine takes up to {max_model_len - 1}.",
            "shorten the prompt, or build with a larger --max-model-len.",
        )


def check_token_range(ids: Sequence[int], *, vocab_size: int, what: str) -> None:
    """Refuse token ids outside the vocabulary (V); the message names the first bad one, and calls the ids ``what``."""
    bad = next((token for token in ids if not isinstance(token, int) or not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"token id {bad!r} of {what} is out of range.", f"use ids from 0 to {vocab_size - 1}."
        )


def expand_per_prompt(values: Any, count: int, what: str) -> list[Any]:
    """``values`` as a list of one item a prompt; a single value (or None) stands for all, another length is refused."""
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise InvalidRequestError(f"{len(values)} {what} were given for {count} prompts.", "give one, or one a prompt.")
    return list(values)


def check_owner_and_priority(owner: object, priority: object) -> None:
    """Refuse an owner that is no text, and a priority that is no integer of 64 bits."""
    if not isinstance(owner, str):
        raise InvalidRequestError(f"owner is {owner!r}.", "give a text.")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError(f"priority is {priority!r}.", "give an integer of 64 bits; lower ones go first.")


def check_match_length(value: object) -> None:
    """Refuse a match length that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"the match length of lookup drafting is {value!r}.", "give an integer of 1 or more.")


def check_acceptance(value: object) -> None:
    """Refuse what is not the name of a rule by which sampled drafts are accepted."""
    if value not in list(RULES):
        raise InvalidRequestError(f"acceptance is {value!r}.", f"choose one of {', '.join(RULES)}.")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """A number of bytes, or a text with a unit: ``"2GiB"``, ``"1.5 GB"``; InvalidRequestError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(value).strip(), re.IGNORECASE)
    unit = None if found is None else _UNITS.get(found[2].lower())
    size = 0 if isinstance(value, bool) or found is None or unit is None else int(float(found[1]) * unit)
    if size < 1:
        raise InvalidRequestError(f"{name} is {value!r}.", "give a number of bytes, or a size such as 2GiB or 500MB.")
    return size

"""Checks of one request against what an engine was built for."""

from collections.abc import Sequence as Seq

from specexport_runtime.errors import InvalidRequestError

DEFAULT_LOOKAHEAD = 4
"""K where nothing else is asked for: the best in most settings of Chen et al. 2023 (figure 1)."""


def check_token_ids(ids: Seq[int], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, has ids outside the vocabulary, or leaves no room for a generated token.

    Args:
        ids: prompt token ids.
        vocab_size: rows of the target's LM head (V).
        max_model_len: most tokens of one sequence.

    Raises:
        InvalidRequestError: says which of the three.
    """
    if not ids:
        raise InvalidRequestError("the prompt is empty.", "give at least one token of text.")
    bad = next((token for token in ids if not isinstance(token, int) or not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"token id {bad!r} of the prompt is out of range.", f"use ids from 0 to {vocab_size - 1}."
        )
    if len(ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens; this engine takes up to {max_model_len - 1}.",
            "shorten the prompt, or build with a larger --max-model-len.",
        )


def resolve_lookahead(requested: int | None, *, built: int, speculation: bool) -> int:
    """The lookahead K of a request; 0 is plain decoding.

    Args:
        requested: what the caller asked for; None takes :data:`DEFAULT_LOOKAHEAD`, or less if less was built.
        built: largest K of the engine; 0 if it has nothing to draft with.
        speculation: False asks for plain decoding.

    Raises:
        InvalidRequestError: the engine cannot do what was asked.
    """
    if not speculation:
        if requested is not None:
            raise InvalidRequestError("speculation is off, but a number of draft tokens was given.", "drop one.")
        return 0
    if requested is None:
        return min(DEFAULT_LOOKAHEAD, built)
    if not built:
        raise InvalidRequestError(
            "this bundle has no draft model.", "build it with --draft, or do not ask for speculative tokens."
        )
    if not 1 <= requested <= built:
        plain = " (turn speculation off for plain decoding)" if requested == 0 else ""
        raise InvalidRequestError(
            f"num_speculative_tokens is {requested}; this engine was built for 1 to {built}.",
            f"choose a number in that range{plain}, or build with a larger --lookahead.",
        )
    return requested

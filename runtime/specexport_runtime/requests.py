"""Checks of one request against what an engine was built for."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from difflib import get_close_matches
from typing import Any

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


def parse_speculative_config(config: Mapping[str, Any], *, draft_source: str | None, built: int) -> int:
    """The default lookahead of an engine from vLLM's speculative-config keys.

    Args:
        config: ``method`` (``"draft_model"``), ``model`` (if given, it must be the bundle's own draft) and
            ``num_speculative_tokens``; all optional.
        draft_source: name of the bundle's draft checkpoint; None if it has no draft.
        built: largest K of the bundle.

    Returns:
        K.

    Raises:
        InvalidRequestError: an unknown key, or a value that this bundle cannot honour.
    """
    known = ("method", "model", "num_speculative_tokens")
    for key in config:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}."
            raise InvalidRequestError(f"speculative_config has an unknown key {key!r}.", fix)
    if draft_source is None:
        raise InvalidRequestError(
            "speculative_config was given, but this bundle has no draft.", "build it with --draft."
        )
    if config.get("method", "draft_model") != "draft_model":
        raise InvalidRequestError(
            f"speculative_config method {config['method']!r} is not available for this bundle.", "use 'draft_model'."
        )
    if config.get("model", draft_source) != draft_source:
        raise InvalidRequestError(
            f"speculative_config names draft {config['model']!r}; this bundle was built with {draft_source!r}.",
            "build a bundle with that draft, or drop the key.",
        )
    return resolve_lookahead(config.get("num_speculative_tokens"), built=built, speculation=True)


def resolve_lookahead(requested: int | None, *, built: int, speculation: bool, default: int = DEFAULT_LOOKAHEAD) -> int:
    """The lookahead K of a request; 0 is plain decoding.

    Args:
        requested: what the caller asked for; None takes ``default``, or less if less was built.
        built: largest K of the engine; 0 if it has nothing to draft with.
        speculation: False asks for plain decoding.
        default: K where nothing else is asked for.

    Raises:
        InvalidRequestError: the engine cannot do what was asked.
    """
    if not speculation:
        if requested is not None:
            raise InvalidRequestError("speculation is off, but a number of draft tokens was given.", "drop one.")
        return 0
    if requested is None:
        return min(default, built)
    if not built:
        raise InvalidRequestError(
            "this bundle has no draft model.", "build it with --draft, or do not ask for speculative tokens."
        )
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise InvalidRequestError(f"num_speculative_tokens is {requested!r}.", "give an integer.")
    if not 1 <= requested <= built:
        plain = " (turn speculation off for plain decoding)" if requested == 0 else ""
        raise InvalidRequestError(
            f"num_speculative_tokens is {requested}; this engine was built for 1 to {built}.",
            f"choose a number in that range{plain}, or build with a larger --lookahead.",
        )
    return requested

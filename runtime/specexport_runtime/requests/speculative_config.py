"""How an engine drafts, from vLLM's speculative-config keys."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from specexport_runtime.drafters.lookup import DEFAULT_COPY_LENGTH, DEFAULT_MATCH_LENGTH
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.requests.checks import check_match_length
from specexport_runtime.requests.drafting import (
    DEFAULT_LOOKAHEAD,
    DEFAULT_SELF_LOOKAHEAD,
    DraftDefaults,
    Lookahead,
    resolve_lookahead,
)

_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min")
_METHODS = ("draft_model", "ngram", "self", "chained", "none")
_WITHOUT_MODEL = ("self", "chained", "none")


def parse_speculative_config(config: Mapping[str, Any], *, draft_source: str | None, built: int) -> DraftDefaults:
    """How an engine drafts, from vLLM's speculative-config keys.

    Args:
        config: ``method`` (``"draft_model"``, ``"ngram"``, and of our own ``"self"``, ``"chained"`` and ``"none"``, the
            drafters of ``requests.DRAFTERS``), ``model`` (if given, it must be the bundle's own draft),
            ``num_speculative_tokens`` (a number, or ``"auto"``), and for ``"ngram"`` ``prompt_lookup_min`` (fewest
            tokens to match); all optional.
        draft_source: name of the bundle's draft checkpoint; None if it has no draft.
        built: largest K of the bundle.

    Raises:
        InvalidRequestError: an unknown key, or a value that this bundle cannot honour. Whether the target can draft
            with its own layers is seen when the engine is made.
    """
    _check_keys(config)
    method = config.get("method", "draft_model")
    if method not in _METHODS:
        raise InvalidRequestError(
            f"speculative_config method {method!r} is not available.", f"use one of {', '.join(_METHODS)}."
        )
    if method == "ngram":
        return _parse_ngram(config, built)
    if "prompt_lookup_min" in config:
        raise InvalidRequestError("prompt_lookup_min needs method 'ngram'.", "add the method, or drop the key.")
    if method in _WITHOUT_MODEL:
        _refuse_model(config, method)
        return _parse_own(config, method, built)
    if draft_source is None:
        raise InvalidRequestError(
            "speculative_config was given, but this bundle has no draft.", "build it with --draft, or use 'ngram'."
        )
    if config.get("model", draft_source) != draft_source:
        raise InvalidRequestError(
            f"speculative_config names draft {config['model']!r}; this bundle was built with {draft_source!r}.",
            "build a bundle with that draft, or drop the key.",
        )
    return DraftDefaults("draft-model", _lookahead(config, built, DEFAULT_LOOKAHEAD))


def _parse_own(config: Mapping[str, Any], method: str, built: int) -> DraftDefaults:
    given = config.get("num_speculative_tokens")
    if method == "self":
        return DraftDefaults("self", _lookahead(config, built, DEFAULT_SELF_LOOKAHEAD))
    if method == "none" and given is not None:
        raise InvalidRequestError("method 'none' drafts no tokens, but num_speculative_tokens was given.", "drop one.")
    return DraftDefaults(method, None if given is None else _lookahead(config, built, DEFAULT_LOOKAHEAD))


def _check_keys(config: Mapping[str, Any]) -> None:
    for key in config:
        if key == "prompt_lookup_max":
            raise InvalidRequestError(
                "speculative_config key 'prompt_lookup_max' is not honoured: the longest match is always used.",
                "drop the key; prompt_lookup_min sets the shortest match.",
            )
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_KEYS)}."
            raise InvalidRequestError(f"speculative_config has an unknown key {key!r}.", fix)


def _parse_ngram(config: Mapping[str, Any], built: int) -> DraftDefaults:
    _refuse_model(config, "ngram")
    match_length = config.get("prompt_lookup_min", DEFAULT_MATCH_LENGTH)
    check_match_length(match_length)
    return DraftDefaults("lookup", _lookahead(config, built, DEFAULT_COPY_LENGTH), match_length)


def _refuse_model(config: Mapping[str, Any], method: str) -> None:
    if "model" in config:
        raise InvalidRequestError(f"speculative_config method {method!r} takes no model.", "drop the key 'model'.")


def _lookahead(config: Mapping[str, Any], built: int, default: int) -> Lookahead:
    requested = config.get("num_speculative_tokens")
    return "auto" if requested == "auto" else resolve_lookahead(requested, built=built, default=default)

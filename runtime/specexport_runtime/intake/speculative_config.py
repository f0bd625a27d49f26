"""How an engine drafts, from vLLM's speculative-config keys."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from specexport_runtime.drafters.base import HEAD
from specexport_runtime.drafters.lookup import DEFAULT_MATCH_LENGTH
from specexport_runtime.drafters.model import DEFAULT_LOOKAHEAD
from specexport_runtime.drafters.registry import KINDS
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.intake.checks import check_match_length
from specexport_runtime.intake.drafting import DraftDefaults, Lookahead, resolve_lookahead

METHODS = {**{name: kind.method for name, kind in KINDS.items()}, "chained": "chained", "auto": "auto", "none": "none"}
"""vLLM's name of each way to draft, and ours where vLLM has none."""
_DRAFTERS = {method: name for name, method in METHODS.items()} | {
    method: name for name, kind in KINDS.items() for method in kind.other_methods
}
_KEYS = ("method", "num_speculative_tokens", *sorted(key for kind in KINDS.values() for key in kind.config_keys))


def parse_speculative_config(config: Mapping[str, Any], *, sources: Mapping[str, str], built: int) -> DraftDefaults:
    """How an engine drafts, from vLLM's speculative-config keys; all are optional."""
    _check_keys(config)
    given = config.get("num_speculative_tokens")
    usual = next((METHODS[name] for name in METHODS if name in sources), next(iter(_DRAFTERS)))
    method = config.get("method", "auto" if given == "auto" and "model" not in config else usual)
    if method not in _DRAFTERS:
        raise InvalidRequestError(
            f"speculative_config method {method!r} is not available.", f"use one of {', '.join(_DRAFTERS)}."
        )
    drafter = _DRAFTERS[method]
    kind = KINDS.get(drafter)
    keys = frozenset[str]() if kind is None else kind.config_keys
    if "prompt_lookup_min" in config and "prompt_lookup_min" not in keys:
        takers = " or ".join(repr(kind.method) for kind in KINDS.values() if "prompt_lookup_min" in kind.config_keys)
        raise InvalidRequestError(f"prompt_lookup_min needs method {takers}.", "add the method, or drop the key.")
    if "model" in keys:
        _check_model(config, sources.get(drafter), drafter)
    elif "model" in config:
        raise InvalidRequestError(f"speculative_config method {method!r} takes no model.", "drop the key 'model'.")
    match_length = config.get("prompt_lookup_min", DEFAULT_MATCH_LENGTH)
    check_match_length(match_length)
    if method == "none" and given is not None:
        raise InvalidRequestError("method 'none' drafts no tokens, but num_speculative_tokens was given.", "drop one.")
    if kind is None and given is None:
        return DraftDefaults(drafter)
    default = DEFAULT_LOOKAHEAD if kind is None else kind.traits.default_lookahead
    lookahead: Lookahead = "auto" if given == "auto" else resolve_lookahead(given, built=built, default=default)
    return DraftDefaults(drafter, lookahead, match_length)


def _check_model(config: Mapping[str, Any], source: str | None, drafter: str) -> None:
    what, flag = ("head", "--head") if drafter == HEAD else ("draft", "--draft")
    if source is None:
        raise InvalidRequestError(
            f"speculative_config was given, but this bundle has no {what}.", f"build it with {flag}, or use 'ngram'."
        )
    if config.get("model", source) != source:
        raise InvalidRequestError(
            f"speculative_config names {what} {config['model']!r}; this bundle was built with {source!r}.",
            f"build a bundle with that {what}, or drop the key.",
        )


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

"""Checks of one request against what an engine was built for."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from difflib import get_close_matches
from typing import Any, NamedTuple

from specexport_runtime.drafters.lookup import DEFAULT_COPY_LENGTH, DEFAULT_MATCH_LENGTH
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sequence import DraftStage

DRAFTERS = ("draft-model", "lookup", "chained", "none")
"""Ways to draft that a request can name; ``chained`` asks lookup first and the draft model where it finds nothing."""

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
    check_token_range(ids, vocab_size=vocab_size, what="the prompt")
    if len(ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens; this engine takes up to {max_model_len - 1}.",
            "shorten the prompt, or build with a larger --max-model-len.",
        )


def check_token_range(ids: Seq[int], *, vocab_size: int, what: str) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        ids: token ids.
        vocab_size: rows of the target's LM head (V).
        what: what they are, for the message.

    Raises:
        InvalidRequestError: names the first bad one.
    """
    bad = next((token for token in ids if not isinstance(token, int) or not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"token id {bad!r} of {what} is out of range.", f"use ids from 0 to {vocab_size - 1}."
        )


def one_each(values: Any, count: int, what: str) -> list[Any]:
    """``values`` as a list of one item a prompt; a single value (or None) stands for all.

    Raises:
        InvalidRequestError: a list of another length.
    """
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise InvalidRequestError(f"{len(values)} {what} were given for {count} prompts.", "give one, or one a prompt.")
    return list(values)


class RequestOptions(NamedTuple):
    """How to draft for one request, as the caller said it; see ``SpecEngine.submit``."""

    drafter: str | None = None
    num_speculative_tokens: int | None = None
    speculation: bool = True


class DraftDefaults(NamedTuple):
    """How an engine drafts for requests that do not say.

    Attributes:
        drafter: one of ``DRAFTERS``; None: the draft model if there is one, else none.
        lookahead: K of the draft model, or tokens copied by lookup; None takes the default of each.
        match_length: fewest tokens that lookup must match.
    """

    drafter: str | None = None
    lookahead: int | None = None
    match_length: int = DEFAULT_MATCH_LENGTH


def parse_speculative_config(config: Mapping[str, Any], *, draft_source: str | None, built: int) -> DraftDefaults:
    """How an engine drafts, from vLLM's speculative-config keys.

    Args:
        config: ``method`` (``"draft_model"`` or ``"ngram"``), ``model`` (if given, it must be the bundle's own draft),
            ``num_speculative_tokens``, and for ``"ngram"`` ``prompt_lookup_min`` (fewest tokens to match); all
            optional.
        draft_source: name of the bundle's draft checkpoint; None if it has no draft.
        built: largest K of the bundle.

    Raises:
        InvalidRequestError: an unknown key, or a value that this bundle cannot honour.
    """
    known = ("method", "model", "num_speculative_tokens", "prompt_lookup_min")
    for key in config:
        if key == "prompt_lookup_max":
            raise InvalidRequestError(
                "speculative_config key 'prompt_lookup_max' is not honoured: the longest match is always used.",
                "drop the key; prompt_lookup_min sets the shortest match.",
            )
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}."
            raise InvalidRequestError(f"speculative_config has an unknown key {key!r}.", fix)
    method = config.get("method", "draft_model")
    if method == "ngram":
        return _parse_ngram(config, built)
    if method != "draft_model":
        raise InvalidRequestError(
            f"speculative_config method {method!r} is not available.", "use 'draft_model' or 'ngram'."
        )
    if "prompt_lookup_min" in config:
        raise InvalidRequestError("prompt_lookup_min needs method 'ngram'.", "add the method, or drop the key.")
    if draft_source is None:
        raise InvalidRequestError(
            "speculative_config was given, but this bundle has no draft.", "build it with --draft, or use 'ngram'."
        )
    if config.get("model", draft_source) != draft_source:
        raise InvalidRequestError(
            f"speculative_config names draft {config['model']!r}; this bundle was built with {draft_source!r}.",
            "build a bundle with that draft, or drop the key.",
        )
    requested = config.get("num_speculative_tokens")
    return DraftDefaults("draft-model", resolve_lookahead(requested, built=built, default=DEFAULT_LOOKAHEAD))


def _parse_ngram(config: Mapping[str, Any], built: int) -> DraftDefaults:
    if "model" in config:
        raise InvalidRequestError("speculative_config method 'ngram' takes no model.", "drop the key 'model'.")
    match_length = config.get("prompt_lookup_min", DEFAULT_MATCH_LENGTH)
    check_match_length(match_length)
    requested = config.get("num_speculative_tokens")
    return DraftDefaults("lookup", resolve_lookahead(requested, built=built, default=DEFAULT_COPY_LENGTH), match_length)


def check_match_length(value: object) -> None:
    """Refuse a match length that is not an integer of at least 1.

    Raises:
        InvalidRequestError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"the match length of lookup drafting is {value!r}.", "give an integer of 1 or more.")


def resolve_lookahead(requested: int | None, *, built: int, default: int) -> int:
    """The lookahead K of a drafter.

    Args:
        requested: what the caller asked for; None takes ``default``, or less if less was built.
        built: largest K of the engine.
        default: K where nothing else is asked for.

    Raises:
        InvalidRequestError: the engine was not built for it.
    """
    if requested is None:
        return min(default, built)
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise InvalidRequestError(f"num_speculative_tokens is {requested!r}.", "give an integer.")
    if not 1 <= requested <= built:
        plain = " (turn speculation off for plain decoding)" if requested == 0 else ""
        raise InvalidRequestError(
            f"num_speculative_tokens is {requested}; this engine was built for 1 to {built}.",
            f"choose a number in that range{plain}, or build with a larger --lookahead.",
        )
    return requested


def resolve_draft_plan(
    drafter: str | None,
    requested: int | None,
    speculation: bool,
    *,
    has_draft: bool,
    built: int,
    defaults: DraftDefaults,
) -> tuple[DraftStage, ...]:
    """The ways to draft for one request, in the order they are tried; empty for plain decoding.

    Args:
        drafter: one of ``DRAFTERS``; None takes the engine's default.
        requested: draft tokens a round: K of the draft model, or tokens copied where lookup is the only drafter.
        speculation: False asks for plain decoding.
        has_draft: the engine has a draft model.
        built: largest K of the engine.
        defaults: the engine's defaults.

    Raises:
        InvalidRequestError: options contradict each other, or the engine cannot do what was asked.
    """
    if drafter is not None and drafter not in DRAFTERS:
        near = get_close_matches(drafter, DRAFTERS, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(DRAFTERS)}."
        raise InvalidRequestError(f"there is no drafter {drafter!r}.", fix)
    if not speculation or drafter == "none":
        if requested is not None or drafter not in (None, "none"):
            raise InvalidRequestError(
                "speculation is off, but a drafter or a number of draft tokens was given.", "drop one."
            )
        return ()
    if drafter is None:
        drafter = defaults.drafter or ("draft-model" if has_draft or requested is not None else None)
        requested = defaults.lookahead if requested is None else requested
    if drafter is None:
        return ()
    if drafter != "lookup" and not has_draft:
        raise InvalidRequestError(
            "this bundle has no draft model.", "build it with --draft, use drafter 'lookup', or do not speculate."
        )
    if drafter == "lookup":
        copied = resolve_lookahead(requested, built=built, default=DEFAULT_COPY_LENGTH)
        return (DraftStage("lookup", copied),)
    model = DraftStage("draft-model", resolve_lookahead(requested, built=built, default=DEFAULT_LOOKAHEAD))
    if drafter == "draft-model":
        return (model,)
    return (DraftStage("lookup", min(DEFAULT_COPY_LENGTH, built)), model)

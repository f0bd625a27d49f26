"""Sampling parameters of one request: every value is checked here, none is silently ignored."""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, cast

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.sampling.cut import cut_field, list_cuts
from specexport_runtime.sampling.min_p import MIN_P
from specexport_runtime.sampling.rng import check_seed
from specexport_runtime.sampling.structured import StructuredOutputs
from specexport_runtime.sampling.thinking_budget import ThinkingBudget

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for, as in OpenAI's API."""

_TOGGLES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Logits are processed in this order, for draft and target alike: ``logit_bias``, ``repetition_penalty``,
    ``frequency_penalty``, ``presence_penalty``, ``temperature``, ``min_p``, ``top_k``, ``top_p``. Each of the last
    three sees the distribution that the one before it left, renormalised.

    Attributes:
        temperature: divides the logits; 0 is greedy (the most likely token, the lowest id on a tie).
        top_k: keep the k most likely tokens (on a tie the lower id); 0 is off.
        top_p: keep the smallest set of most likely tokens with at least this probability in all; 1 is off, 0 is greedy.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
        repetition_penalty: for each token in prompt or output, positive logits are divided by it and negative ones
            multiplied (CTRL, Keskar et al. 2019, section 4.1); 1 is off.
        presence_penalty: subtracted once from the logit of each token in the output; 0 is off.
        frequency_penalty: subtracted once for every time that the token is in the output; 0 is off.
        logit_bias: token id to a number added to its logit; minus infinity bans the token.
        seed: of the request's random numbers, a signed 128-bit integer; None draws a fresh one.
        max_tokens: most tokens to generate.
        stop: a string, or strings, that end the text when they appear in it.
        stop_token_ids: token ids that end the text.
        ignore_eos: go on after the model's end-of-sequence token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text, those of the prompt in front of it too.
        shown_special_tokens: ids of special tokens that stay in the text even so.
        logprobs: give the log-probability of each token, and of this many (0 to 20) of the likeliest ones in its place,
            under the target's raw logits; None gives none.
        prompt_logprobs: the same of each token of the prompt but the first. Such a prompt is read whole, in short
            chunks.
        structured_outputs: the form that the text must have; None for any. Tokens that do not fit are left out before
            everything else that chooses among them.
        thinking_budget: most tokens that the text thinks, and where it thinks; None for any number.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = cut_field(MIN_P)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        self._set("temperature", _check_number("temperature", self.temperature, low=0.0, hint="0 means greedy"))
        self._set("top_k", _check_integer("top_k", self.top_k, low=0, hint="0 turns it off"))
        self._set("top_p", _check_number("top_p", self.top_p, low=0.0, high=1.0, hint="1 turns it off"))
        for name, cut in CUTS.items():
            hint = f"{cut.off:g} turns it off"
            self._set(name, _check_number(name, getattr(self, name), low=cut.low, high=cut.high, hint=hint))
        penalty = _check_number("repetition_penalty", self.repetition_penalty, above=0.0, hint="1 turns it off")
        self._set("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _check_number(name, getattr(self, name), low=-2.0, high=2.0, hint="0 turns it off"))
        self._set("logit_bias", _check_biases(self.logit_bias))
        if self.seed is not None:
            self._set("seed", check_seed(self.seed))
        self._set("max_tokens", _check_integer("max_tokens", self.max_tokens, low=1))
        self._set("stop", _check_strings("stop", self.stop))
        for name in ("stop_token_ids", "shown_special_tokens"):
            self._set(name, _check_token_ids(name, getattr(self, name)))
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                self._set(name, _check_integer(name, count, low=0, high=MAX_LOGPROBS, hint="None gives none"))
        for name, kind in (("structured_outputs", StructuredOutputs), ("thinking_budget", ThinkingBudget)):
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                raise InvalidRequestError(f"{name} is a {type(value).__name__}.", hint=f"give {kind.__name__}(...).")
        for name in _TOGGLES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}.", hint="give True or False.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for callers; here the checked, normalised value goes in

    @property
    def is_greedy(self) -> bool:
        """Always the likeliest token: nothing is drawn."""
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


CUTS = list_cuts(SamplingParams)
"""Rules that leave unlikely tokens out, by the field that holds their number."""


def _check_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    hint: str,
) -> float:
    """A finite float with ``low <= value <= high`` and ``value > above``."""
    if isinstance(value, (bool, str, bytes)):
        raise InvalidRequestError(f"{name} is {value!r}, which is not a number.", hint=f"give a number; {hint}.")
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError):
        message = f"{name} is {value!r}, which is not a number."
        raise InvalidRequestError(message, hint=f"give a number; {hint}.") from None
    if not (math.isfinite(number) and low <= number <= high and number > above):
        left = f"({above:g}" if above > -math.inf else f"[{low:g}"
        right = f"{high:g}]" if high < math.inf else "inf)"
        raise InvalidRequestError(f"{name} is {number:g}.", hint=f"give a number in {left}, {right}; {hint}.")
    return number


def _check_integer(name: str, value: object, *, low: int, high: float = math.inf, hint: str = "") -> int:
    """An integer of at least ``low`` and at most ``high``; a bool or a float is refused."""
    span = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    wanted = f"give an integer {span}{'; ' + hint if hint else ''}."
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise InvalidRequestError(f"{name} is {value!r}, which is not an integer.", hint=wanted) from None
    if isinstance(value, bool) or not low <= number <= high:
        raise InvalidRequestError(f"{name} is {value!r}.", hint=wanted)
    return number


def _check_strings(name: str, value: object) -> tuple[str, ...]:
    """A string or an iterable of strings, none of them empty."""
    if not isinstance(value, (str, Iterable)) or isinstance(value, (bytes, Mapping)):
        raise InvalidRequestError(f"{name} is {value!r}.", hint="give a string or a list of strings.")
    strings = (value,) if isinstance(value, str) else tuple(value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"{name} contains {string!r}.", hint="give strings that are not empty.")
    return strings


def _check_token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise InvalidRequestError(f"{name} is {value!r}.", hint="give a list of token ids.")
    return tuple(_check_integer(f"{name}[{i}]", token, low=0) for i, token in enumerate(value))


def _check_biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias is {value!r}.", hint="give a mapping of token id to number.")
    biases = {}
    for token, bias in value.items():
        token_id = _check_integer("a token id in logit_bias", token, low=0)
        banned = isinstance(bias, float) and bias == -math.inf
        biases[token_id] = (
            bias if banned else _check_number(f"logit_bias[{token_id}]", bias, hint="-inf bans the token")
        )
    return biases

"""What the files of a head leave open, or may say wrongly: each way to read them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specexport.heads.config import HeadConfig
from specexport_runtime.abi import AFTER_NORM

SWAPPED = "embedding and feature joined in the other order"
BEFORE_NORM = "the hidden state before the last norm"
_AFTER_NORM = "the hidden state behind the last norm"


class Reading(NamedTuple):
    """One way to read a head's files."""

    config: HeadConfig  # what it would compute
    change: str = ""  # how it differs from what the files say; empty for that itself


def only_reading(config: HeadConfig, num_layers: int) -> Sequence[Reading]:  # noqa: ARG001
    """The files leave nothing open."""
    return [Reading(config)]


def other_last_states(config: HeadConfig, num_layers: int) -> Sequence[Reading]:
    """Of heads that read one hidden state: those beside it; behind the last comes that behind the norm."""
    told, tap = {num_layers: BEFORE_NORM, AFTER_NORM: _AFTER_NORM}, config.taps[0]
    beside = [*([tap - 1] if tap else []), tap + 1 if tap < num_layers else AFTER_NORM]
    others = [num_layers] if tap == AFTER_NORM else beside
    named = [(other, told.get(other, f"hidden state {other} in the place of {tap}")) for other in others]
    return [Reading(config), *(Reading(replace(config, taps=(other,)), change) for other, change in named)]


def shifted_taps(config: HeadConfig, num_layers: int) -> list[Reading]:
    """All hidden states one layer earlier, and one later."""
    moved = [tuple(tap + shift for tap in config.taps) for shift in (-1, 1)]
    return [
        Reading(replace(config, taps=taps), f"hidden states {list(taps)} in the place of {list(config.taps)}")
        for taps in moved
        if all(0 <= tap <= num_layers for tap in taps)
    ]


def reversed_taps(config: HeadConfig) -> list[Reading]:
    """The hidden states joined the other way round."""
    taps = config.taps[::-1]
    return [Reading(replace(config, taps=taps), f"hidden states in the order {list(taps)}")] if len(taps) > 1 else []


def swapped(config: HeadConfig) -> Reading:
    """Embedding and feature in the other order."""
    return Reading(replace(config, feature_first=not config.feature_first), SWAPPED)


def before_norm(config: HeadConfig, num_layers: int) -> Reading:
    """The last hidden state without its norm."""
    return Reading(replace(config, taps=(num_layers,)), BEFORE_NORM)


def other_flag(config: HeadConfig, name: str) -> Reading:
    """A switch of the configuration turned over."""
    other = not getattr(config, name)
    changes: dict[str, Any] = {name: other}
    return Reading(replace(config, **changes), f"{name} {str(other).lower()}")

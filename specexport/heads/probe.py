"""How often a head's first guess is the target's, on a few hundred tokens: before anything is built of it.

A head that is read wrongly (another layer's hidden states, halves in the other order, a norm too many) writes the same
text, only slowly: every draft is refused. So the acceptance itself is looked at, of the first token of a draft and of
the second, which reads what the head itself handed on. What a file leaves open, or says wrongly, is tried in each way,
and the one that is accepted is taken.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.heads.assistant import Caches, Places, draft_steps, read_caches
from specexport.heads.config import HeadConfig
from specexport.heads.dflash import first_guesses
from specexport.heads.loaded import LoadedHead
from specexport.heads.trace import causal_states, causal_step
from specexport.heads.unroll import unroll
from specexport.trace.layers import tapped
from specexport_runtime.abi import AFTER_NORM
from specexport_runtime.errors import CheckpointError

CLEARLY = 1.25
"""Another reading is taken where its rates are so much higher than those of the reading that the file asks for."""
DEVIATIONS = 3.5
"""Or where it wins so many of the places at which only one of the two is right that chance gives the surplus only this
many standard deviations away: both guess at the same places, so that a small difference can be a sure one."""
FEW = 0.05
"""A difference below this share of all guesses is not looked at."""

BLOCK_STEP, BLOCK_ROWS = 2, 5
"""Where each place takes a block of its own: every second place, and blocks as a draft of 4 tokens has them."""


class Reading(NamedTuple):
    """One way to read a head's files."""

    config: HeadConfig  # what it would compute
    change: str = ""  # how it differs from what the files say; empty for that itself


class Probe(NamedTuple):
    """What a probe found."""

    reading: Reading  # the files' own, or another that is accepted clearly more often
    rate: float  # its share of accepted first guesses
    chance: float  # what one fixed guess would get
    # share of first and of second guesses of each reading, by its ``change``; of a parallel head, the first alone
    rates: Mapping[str, tuple[float, ...]]


def readings_of(config: HeadConfig, num_layers: int) -> list[Reading]:
    """The readings to try, the one of the files first."""
    if config.kind == "mtp":
        return _readings_of_mtp(config, num_layers)
    found = [Reading(config)]
    if config.kind == "assistant":  # transformers has the one that there is, so nothing is left open
        return found
    if config.num_draft_heads:
        told = {num_layers: _BEFORE_NORM, AFTER_NORM: _AFTER_NORM}
        others = (num_layers,) if config.taps == (AFTER_NORM,) else _beside(config.taps[0], num_layers)
        named = [(tap, told.get(tap, f"hidden state {tap} in the place of {config.taps[0]}")) for tap in others]
        return [*found, *(Reading(replace(config, taps=(tap,)), change) for tap, change in named)]
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in config.taps)
        if config.projects and all(0 <= tap <= num_layers for tap in taps):
            found.append(
                Reading(replace(config, taps=taps), f"hidden states {list(taps)} in the place of {list(config.taps)}")
            )
    if config.kind == "eagle3":
        other = not config.norm_before_residual
        found.append(Reading(replace(config, norm_before_residual=other), f"norm_before_residual {str(other).lower()}"))
        if config.mask_token_id is None:
            found.append(_other_output(config))
    if config.projects and len(config.taps) > 1:
        taps = config.taps[::-1]
        found.append(Reading(replace(config, taps=taps), f"hidden states in the order {list(taps)}"))
    if config.kind != "dflash":
        found.append(Reading(replace(config, feature_first=not config.feature_first), _SWAPPED))
    if config.kind == "eagle":
        found.append(Reading(replace(config, taps=(num_layers,)), _BEFORE_NORM))
    return found


def _beside(tap: int, num_layers: int) -> list[int]:
    """The hidden states before and behind one; behind the last comes that behind the norm."""
    return [*([tap - 1] if tap else []), tap + 1 if tap < num_layers else AFTER_NORM]


_SWAPPED = "embedding and feature joined in the other order"
_BEFORE_NORM = "the hidden state before the last norm"
_AFTER_NORM = "the hidden state behind the last norm"


def _other_output(config: HeadConfig) -> Reading:
    other = not config.norm_output
    return Reading(replace(config, norm_output=other), f"norm_output {str(other).lower()}")


def _readings_of_mtp(config: HeadConfig, num_layers: int) -> list[Reading]:
    """All there are: checkpoints say nothing of these, and one wrong choice hides what another is worth."""
    found = []
    for taps in (config.taps, (num_layers,)):
        for first in (config.feature_first, not config.feature_first):
            for output in (config.norm_output, not config.norm_output):
                changes = [
                    _BEFORE_NORM if taps != config.taps else "",
                    _SWAPPED if first != config.feature_first else "",
                    f"norm_output {str(output).lower()}" if output != config.norm_output else "",
                ]
                reading = replace(config, taps=taps, feature_first=first, norm_output=output)
                found.append(Reading(reading, ", ".join(filter(None, changes))))
    return found


def probe_head(model: Any, loaded: LoadedHead, pieces: Sequence[npt.NDArray[np.int64]], num_layers: int) -> Probe:
    """Guess the target's best tokens behind every token of some texts, in each reading.

    ``model`` is the target, a transformers causal language model; ``pieces`` are token ids of the texts.
    """
    readings = readings_of(loaded.config, num_layers)
    taps = sorted({tap for reading in readings for tap in reading.config.taps})
    seen = [_read(model, torch.from_numpy(piece)[None], taps, loaded.config) for piece in pieces]
    rates, right = {}, {}
    for reading in readings:
        hits = [
            _hits(loaded, reading.config, torch.from_numpy(piece)[None], text)
            for piece, text in zip(pieces, seen, strict=True)
        ]
        rates[reading.change] = tuple(float(torch.cat(step).float().mean()) for step in zip(*hits, strict=True))
        right[reading.change] = torch.cat([step for text in hits for step in text])
    score = {change: sum(rate) / len(rate) for change, rate in rates.items()}
    first = readings[0]
    top = max(readings, key=lambda reading: score[reading.change])
    is_much = score[top.change] > CLEARLY * score[""]
    is_sure = _deviations(right[top.change], right[""]) > DEVIATIONS
    clearly = score[top.change] - score[""] > FEW and (is_much or is_sure)
    chosen = top if clearly else first
    every = torch.cat([text.best[1:] for text in seen])
    chance = float(every.bincount().max()) / len(every)
    return Probe(chosen, rates[chosen.change][0], chance, rates)


def _deviations(other: Tensor, first: Tensor) -> float:
    """How far the places that one reading wins are from half of those where the two differ, in standard deviations.

    Each is bool [n]: where the guesses of a reading are right.
    """
    wins, losses = int((other & ~first).sum()), int((first & ~other).sum())
    return (wins - losses) / math.sqrt(wins + losses) if wins + losses else 0.0


def check_probe(probe: Probe, name: str) -> None:
    """Raise a CheckpointError for a head that guesses no better than one fixed token would."""
    if probe.rate <= max(1.5 * probe.chance, probe.chance + FEW):
        raise CheckpointError(
            f"the head {name} guesses {probe.rate:.0%} of this target's tokens, and always the same token would be "
            f"right for {probe.chance:.0%}: it was made for another target, or its files say what its weights are not.",
            "give a head that was trained on this target, or `--no-check` to build it all the same.",
        )


class _Text(NamedTuple):
    """What the target made of a text."""

    best: Tensor  # its best token ids behind each token [T]
    states: Mapping[int, Tensor]  # its hidden states [1, T, H], by tap
    caches: Caches  # keys and values that an assistant reads; none for other heads


def _read(model: Any, ids: Tensor, taps: Sequence[int], config: HeadConfig) -> _Text:
    caches: Caches = ()
    with torch.no_grad(), tapped(model, taps) as found:
        if config.assistant is not None:
            logits, caches = read_caches(model, ids, config)
        else:
            logits = model(input_ids=ids, use_cache=False).logits[0]
    return _Text(logits.argmax(-1), {tap: found[tap] for tap in taps}, caches)


def _hits(loaded: LoadedHead, config: HeadConfig, tokens: Tensor, text: _Text) -> list[Tensor]:
    """Where the first guess is right, and the second: bool, one for each place."""
    head, before = loaded.head, loaded.head.head_config
    head.head_config = config
    found = []
    try:
        with torch.no_grad():
            features = loaded.projection([text.states[tap][:, :-1] for tap in config.taps])
            for logits, places in _guesses(loaded, tokens, features, text.caches):
                rows = logits.argmax(-1)
                ids = rows if loaded.ids is None else torch.from_numpy(loaded.ids).long()[rows]
                found.append(ids == text.best[places])
    finally:
        head.head_config = before
    return found


def _guesses(loaded: LoadedHead, tokens: Tensor, features: Tensor, caches: Caches) -> Iterator[tuple[Tensor, slice]]:
    """Logits [n, N] of the first guesses and of the second, and the places of the text behind which they are.

    A head that fills blocks takes a block for each place, and its second guesses come with the first.
    """
    head, config, length = loaded.head, loaded.head.head_config, tokens.shape[1]
    if config.block_size is not None:
        rows = min(config.block_size, BLOCK_ROWS)
        yield first_guesses(head, tokens[0], features[0], step=BLOCK_STEP, rows=rows), slice(1, None, BLOCK_STEP)
    elif config.hydra is not None:
        from specexport.heads.hydra import first_guesses as hydra_guesses

        states = causal_states(head, tokens[0, 1:], features[0])
        for number in range(min(2, config.num_draft_heads)):
            yield hydra_guesses(head, number, tokens[0], states), slice(1 + number, None)
    elif config.assistant is not None:
        fed = features[0]
        for first in (1, 2):
            places = Places(torch.arange(1, length - first + 1), caches)
            logits, handed_on = draft_steps(head, tokens[0, first:], fed, places)
            fed = handed_on[:-1]
            yield logits, slice(first, None)
    elif config.medusa is not None:
        for number in range(min(2, config.num_draft_heads)):
            logits, _ = causal_step(head, torch.full((length - 1,), number), features[0])
            yield logits[: len(logits) - number], slice(1 + number, None)
    else:
        steps = 2 if config.mask_token_id is None else 1
        for step in unroll(head, tokens, features, torch.tensor([length]), steps):
            yield step.logits[0][step.valid[0]], slice(step.offset, None)

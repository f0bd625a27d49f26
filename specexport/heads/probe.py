"""How often a head's first guess is the target's, on a few hundred tokens: before anything is built of it.

A head that is read wrongly (another layer's hidden states, halves in the other order, a norm too many) writes the same
text, only slowly: every draft is refused. So the acceptance itself is looked at, of the first token of a draft and of
the second, which reads what the head itself handed on. What a file leaves open, or says wrongly, is tried in each way,
and the one that is accepted is taken.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.heads.config import HeadConfig
from specexport.heads.kind import Caches, Reading
from specexport.heads.kinds import find_kind
from specexport.heads.loaded import LoadedHead
from specexport.trace.layers import record_taps
from specexport_runtime.errors import CheckpointError

CLEARLY = 1.25
"""Another reading is taken where its rates are so much higher than those of the reading that the file asks for."""
DEVIATIONS = 3.5
"""Or where it wins so many of the places at which only one of the two is right that chance gives the surplus only this
many standard deviations away: both guess at the same places, so that a small difference can be a sure one."""
FEW = 0.05
"""A difference below this share of all guesses is not looked at."""


class Probe(NamedTuple):
    """What a probe found."""

    reading: Reading  # the files' own, or another that is accepted clearly more often
    rate: float  # its share of accepted first guesses
    chance: float  # what one fixed guess would get
    # share of first and of second guesses of each reading, by its ``change``; of a parallel head, the first alone
    rates: Mapping[str, tuple[float, ...]]


def probe_head(model: Any, loaded: LoadedHead, pieces: Sequence[npt.NDArray[np.int64]], num_layers: int) -> Probe:
    """Guess the target's best tokens after every token of the texts ``pieces``, in each reading."""
    readings = find_kind(loaded.config).readings(loaded.config, num_layers)
    taps = sorted({tap for reading in readings for tap in reading.config.taps})
    seen = [_run_target(model, torch.from_numpy(piece), taps, loaded.config) for piece in pieces]
    rates, right = {}, {}
    for reading in readings:
        hits = [_find_hits(loaded, reading.config, text) for text in seen]
        rates[reading.change] = tuple(float(torch.cat(step).float().mean()) for step in zip(*hits, strict=True))
        right[reading.change] = torch.cat([step for text in hits for step in text])
    score = {change: sum(rate) / len(rate) for change, rate in rates.items()}
    first = readings[0]
    top = max(readings, key=lambda reading: score[reading.change])
    is_much = score[top.change] > CLEARLY * score[""]
    is_sure = _compute_z_score(right[top.change], right[""]) > DEVIATIONS
    clearly = score[top.change] - score[""] > FEW and (is_much or is_sure)
    chosen = top if clearly else first
    every = torch.cat([text.best[1:] for text in seen])
    chance = float(every.bincount().max()) / len(every)
    return Probe(chosen, rates[chosen.change][0], chance, rates)


def _compute_z_score(other: Tensor, first: Tensor) -> float:
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


class _TargetOutputs(NamedTuple):
    """What the target made of a text."""

    tokens: Tensor  # int64 [T]
    best: Tensor  # its best token ids after each token [T]
    states: Mapping[int, Tensor]  # its hidden states [1, T, H], by tap
    caches: Caches  # keys and values that a head reads; none for one that has its own


def _run_target(model: Any, tokens: Tensor, taps: Sequence[int], config: HeadConfig) -> _TargetOutputs:
    with torch.no_grad(), record_taps(model, taps) as found:
        logits, caches = find_kind(config).read_target(model, tokens[None], config)
    return _TargetOutputs(tokens, logits.argmax(-1), {tap: found[tap] for tap in taps}, caches)


def _find_hits(loaded: LoadedHead, config: HeadConfig, text: _TargetOutputs) -> list[Tensor]:
    """Where the first guess is right, and the second: bool, one for each place."""
    head, before = loaded.head, loaded.head.head_config
    head.head_config = config
    found = []
    try:
        with torch.no_grad():
            features = loaded.projection([text.states[tap][:, :-1] for tap in config.taps])
            for logits, places in find_kind(config).guesses(loaded, text.tokens, features[0], text.caches):
                rows = logits.argmax(-1)
                ids = rows if loaded.ids is None else torch.from_numpy(loaded.ids).long()[rows]
                found.append(ids == text.best[places])
    finally:
        head.head_config = before
    return found

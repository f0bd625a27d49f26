"""How often a head's first guess is the target's, on a few hundred tokens: before anything is built of it.

A head that is read wrongly (another layer's hidden states, halves in the other order, a norm too many) writes the same
text, only slowly: every draft is refused. So the acceptance itself is looked at. What a file leaves open, or says
wrongly, is tried in each way, and the one that is accepted is taken.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specexport.frontend.taps import tapped
from specexport.heads.config import HeadConfig
from specexport.heads.dflash import first_guesses
from specexport.heads.load import LoadedHead
from specexport.heads.trace import causal_step
from specexport_runtime.errors import CheckpointError

CLEARLY = 1.25
"""Another reading is taken where its rate is so much higher than that of the reading that the file asks for."""
FEW = 0.05
"""A difference below this share of all guesses is chance."""

BLOCK_STEP, BLOCK_ROWS = 2, 5
"""Where each place takes a block of its own: every second place, and blocks as a draft of 4 tokens has them."""


class Reading(NamedTuple):
    """One way to read a head's files.

    Attributes:
        config: what it would compute.
        change: how it differs from what the files say; empty for that itself.
        swap: the halves of what its first linear layer joins are taken in the other order.
    """

    config: HeadConfig
    change: str = ""
    swap: bool = False


class Probe(NamedTuple):
    """What a probe found.

    Attributes:
        reading: the reading that is accepted most.
        rate: its share of accepted first guesses.
        chance: what one fixed guess would get.
        rates: share of each reading, by what it changes.
    """

    reading: Reading
    rate: float
    chance: float
    rates: Mapping[str, float]


def readings_of(config: HeadConfig, num_layers: int) -> list[Reading]:
    """The readings to try, the one of the files first."""
    found = [Reading(config)]
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in config.taps)
        if config.projects and all(0 <= tap <= num_layers for tap in taps):
            found.append(
                Reading(replace(config, taps=taps), f"hidden states {list(taps)} in the place of {list(config.taps)}")
            )
    if config.kind == "eagle3":
        other = not config.norm_before_residual
        found.append(Reading(replace(config, norm_before_residual=other), f"norm_before_residual {str(other).lower()}"))
    if config.projects and len(config.taps) > 1:
        taps = config.taps[::-1]
        found.append(Reading(replace(config, taps=taps), f"hidden states in the order {list(taps)}"))
    if config.kind != "dflash":
        found.append(Reading(config, "embedding and feature joined in the other order", swap=True))
    if config.kind == "eagle":
        found.append(Reading(replace(config, taps=(num_layers,)), "the hidden state before the last norm"))
    return found


def probe_head(model: Any, loaded: LoadedHead, pieces: Seq[npt.NDArray[np.int64]], num_layers: int) -> Probe:
    """Guess the target's best token behind every token of some texts, in each reading.

    Args:
        model: the target, a transformers causal language model.
        loaded: the head, as its files say.
        pieces: token ids of the texts.
        num_layers: decoder layers of the target.
    """
    readings = readings_of(loaded.config, num_layers)
    taps = sorted({tap for reading in readings for tap in reading.config.taps})
    seen = [_read(model, torch.from_numpy(piece)[None], taps) for piece in pieces]
    step = 1 if loaded.config.block_size is None else BLOCK_STEP
    best = torch.cat([logits.argmax(-1)[1::step] for logits, _ in seen])
    rates = {}
    for reading in readings:
        guesses = [
            _guess(loaded, reading, torch.from_numpy(piece), states)
            for piece, (_, states) in zip(pieces, seen, strict=True)
        ]
        rates[reading.change] = float((torch.cat(guesses) == best).float().mean())
    first = readings[0]
    top = max(readings, key=lambda reading: rates[reading.change])
    clearly = rates[top.change] > CLEARLY * rates[""] and rates[top.change] - rates[""] > FEW
    chosen = top if clearly else first
    chance = float(best.bincount().max()) / len(best)
    return Probe(chosen, rates[chosen.change], chance, rates)


def check_probe(probe: Probe, name: str) -> None:
    """Refuse a head that guesses no better than one fixed token would.

    Raises:
        CheckpointError: it does not.
    """
    if probe.rate <= max(1.5 * probe.chance, probe.chance + FEW):
        raise CheckpointError(
            f"the head {name} guesses {probe.rate:.0%} of this target's tokens, and always the same token would be "
            f"right for {probe.chance:.0%}: it was made for another target, or its files say what its weights are not.",
            "give a head that was trained on this target, or `--no-check` to build it all the same.",
        )


def _read(model: Any, ids: Tensor, taps: Seq[int]) -> tuple[Tensor, dict[int, Tensor]]:
    with torch.no_grad(), tapped(model, taps) as found:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits, {tap: found[tap][0].float() for tap in taps}


def _guess(loaded: LoadedHead, reading: Reading, tokens: Tensor, states: Mapping[int, Tensor]) -> Tensor:
    """The head's best token ids behind each token but the first [T-1]; of a block head, behind every second of them."""
    head, config = loaded.head, reading.config
    before = head.head_config, head.swap
    head.head_config, head.swap = config, reading.swap
    try:
        features = loaded.projection([states[tap][:-1] for tap in config.taps])
        if config.block_size is None:
            logits, _ = causal_step(head, tokens[1:], features)
        else:
            rows = min(config.block_size, BLOCK_ROWS)
            logits = first_guesses(head, tokens, features, step=BLOCK_STEP, rows=rows)
    finally:
        head.head_config, head.swap = before
    best = logits.argmax(-1)
    return best if loaded.ids is None else torch.from_numpy(loaded.ids).long()[best]

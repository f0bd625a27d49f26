"""What ``specexport tune`` found: tokens a second of each K, by batch size and context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SCHEMA = "specexport.tune/2"


class TuneRounds(NamedTuple):
    """What the rounds of one K were like, over all repeats; milliseconds are medians.

    Attributes:
        acceptance_rate: accepted over drafted tokens; None if nothing was drafted.
        mean_accepted_length: tokens of a round with a draft, the target's own included; None without one.
        draft_milliseconds: of one draft step: one more draft token of every sequence. What the draft model spent on
            reading prompts is left out; None without a draft.
        verify_milliseconds: of the target's step in a round; None without a round.
    """

    acceptance_rate: float | None
    mean_accepted_length: float | None
    draft_milliseconds: float | None
    verify_milliseconds: float | None


class TuneCell(NamedTuple):
    """What was measured for one drafter at one batch size and context.

    Attributes:
        drafter: a drafter with a K of its own; ``chained`` uses those of its parts.
        batch_size: sequences decoded at a time.
        context: least prompt length, tokens.
        lookahead: the K that was fastest; 0 is plain decoding.
        tokens_per_second: of every K that was tried, 0 (plain decoding) included: medians.
        rounds: what the rounds of each of them were like.
    """

    drafter: str
    batch_size: int
    context: int
    lookahead: int
    tokens_per_second: Mapping[int, float]
    rounds: Mapping[int, TuneRounds] = {}

    @property
    def speedup(self) -> float:
        """Of the chosen K over plain decoding."""
        return self.tokens_per_second[self.lookahead] / self.tokens_per_second[0]


@dataclass(frozen=True)
class TuneTable:
    """Everything that was measured of a bundle.

    Attributes:
        bundle: name of the bundle.
        build_key: which build of it, as in its manifest.
        machine: which machine, as ``machine_key`` says.
        date: when it was measured, ISO 8601.
        command: the command line that made it.
        settings: what else it was measured with (threads, tokens, repeats, prompts), what draft model the bundle has,
            and how many texts were equal to plain decoding's.
        cells: one for each drafter, batch size and context.
    """

    bundle: str
    build_key: str
    machine: str
    date: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    cells: tuple[TuneCell, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in ("bundle", "build_key", "machine", "date")},
            "command": list(self.command),
            "settings": dict(self.settings),
            "cells": [
                {
                    **cell._asdict(),
                    "tokens_per_second": {str(k): rate for k, rate in sorted(cell.tokens_per_second.items())},
                    "rounds": {str(k): rounds._asdict() for k, rounds in sorted(cell.rounds.items())},
                }
                for cell in self.cells
            ],
        }

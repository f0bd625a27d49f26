"""What ``specexport tune`` found: tokens a second of each K, by batch size and context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SCHEMA = "specexport.tune/2"


class TuneRounds(NamedTuple):
    """What the rounds of one K were like, over all repeats; milliseconds are medians."""

    acceptance_rate: float | None  # accepted over drafted tokens; None if nothing was drafted
    mean_accepted_length: float | None  # tokens of a round with a draft, the target's own included; None without one
    # of one draft step: one more draft token of every sequence, without what the draft model spent on reading prompts;
    # None without a draft
    draft_milliseconds: float | None
    verify_milliseconds: float | None  # of the target's step in a round; None without a round


class TuneCell(NamedTuple):
    """What was measured for one drafter at one batch size and context."""

    drafter: str  # one with its own K; ``chained`` uses those of its parts
    batch_size: int  # sequences decoded at a time
    context: int  # prompt length, tokens
    lookahead: int  # the chosen K: the smallest within 1 % of the fastest; 0 is plain decoding
    tokens_per_second: Mapping[int, float]  # of every K that was tried, 0 (plain decoding) included: medians
    rounds: Mapping[int, TuneRounds] = {}  # of each of these K

    @property
    def speedup(self) -> float:
        """Of the chosen K over plain decoding."""
        return self.tokens_per_second[self.lookahead] / self.tokens_per_second[0]


@dataclass(frozen=True)
class TuneTable:
    """Everything that was measured of a bundle."""

    bundle: str  # its name
    build_key: str  # of the build, as in its manifest
    machine: str  # as ``machine_key`` gives it
    date: str  # of the measurement, UTC, ISO 8601
    command: tuple[str, ...]  # the command line that made it
    # what else it was measured with (threads, tokens, repeats, prompts), the bundle's draft model or head, and how many
    # texts were equal to plain decoding's
    settings: Mapping[str, Any]
    cells: tuple[TuneCell, ...]  # one for each drafter, batch size and context

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

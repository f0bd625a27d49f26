"""Tune profiles: the draft length (K) that was fastest on the user's prompts, by batch size and context.

``specexport tune`` writes one; engines read it. A profile holds for one build of one bundle on one machine; a stale one
is ignored, and a warning says why and what to do.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.machine import machine_key
from specexport_runtime.user_cache import cache_folder, is_private

SCHEMA = "specexport.tune/1"
_FORM = "give a file that `specexport tune` wrote."
_log = logging.getLogger(__name__)


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
        rounds: what the rounds of each of them were like; empty in older profiles.
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
class TuneProfile:
    """A table of the fastest K.

    Attributes:
        bundle: name of the bundle.
        build_key: which build of it, as in its manifest.
        machine: which machine, as ``user_cache.machine_key`` says.
        date: when it was measured, ISO 8601.
        command: the command line that made it.
        settings: what else it was measured with (threads, tokens, repeats, prompts), what draft model the bundle has,
            and how many texts were equal to plain decoding's: for people.
        cells: one for each drafter, batch size and context.
    """

    bundle: str
    build_key: str
    machine: str
    date: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    cells: tuple[TuneCell, ...]

    def lookahead(self, drafter: str, num_rows: int, context: int) -> int | None:
        """The K to draft with.

        Between measured batch sizes the next larger one counts, since drafting pays less in larger batches; beyond the
        largest, that one. A measured context counts from its length on up to the next; below the smallest, that one.

        Args:
            drafter: a drafter with a K of its own; ``chained`` uses those of its parts.
            num_rows: sequences that are decoded at the moment.
            context: tokens of the sequence.

        Returns:
            K, 0 for plain decoding; None where this drafter was not measured.
        """
        cells = [cell for cell in self.cells if cell.drafter == drafter]
        if not cells:
            return None
        sizes = sorted({cell.batch_size for cell in cells})
        size = next((size for size in sizes if size >= num_rows), sizes[-1])
        row = sorted((cell for cell in cells if cell.batch_size == size), key=lambda cell: cell.context)
        return next((cell for cell in reversed(row) if cell.context <= context), row[0]).lookahead

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded."""
        return {
            "schema": SCHEMA,
            "bundle": self.bundle,
            "build_key": self.build_key,
            "machine": self.machine,
            "date": self.date,
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

    @classmethod
    def from_json(cls, data: Any) -> "TuneProfile":
        """What :meth:`to_json` gave.

        Raises:
            ValueError: something is missing, of another type, or out of its range.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, not {SCHEMA!r}")
        try:
            cells = tuple(_read_cell(cell) for cell in data["cells"])
            texts = {name: _text(data, name) for name in ("bundle", "build_key", "machine", "date")}
            command = tuple(str(part) for part in data["command"])
            return cls(**texts, command=command, settings=dict(data["settings"]), cells=cells)
        except KeyError as error:
            raise ValueError(f"it has no {error.args[0]!r}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a field has another type ({error})") from error


def _text(data: Mapping[str, Any], name: str) -> str:
    if not isinstance(data[name], str):
        raise ValueError(f"{name!r} is {data[name]!r}")
    return str(data[name])


def _read_cell(data: Mapping[str, Any]) -> TuneCell:
    rates = {int(k): float(rate) for k, rate in data["tokens_per_second"].items()}
    rounds = {int(k): _read_rounds(each) for k, each in data.get("rounds", {}).items()}
    cell = TuneCell(
        _text(data, "drafter"), int(data["batch_size"]), int(data["context"]), int(data["lookahead"]), rates, rounds
    )
    if not cell.drafter:
        raise ValueError("it names no drafter")
    if cell.batch_size < 1 or cell.context < 0 or cell.lookahead < 0:
        raise ValueError(f"a cell is out of range ({cell})")
    return cell


def _read_rounds(data: Mapping[str, Any]) -> TuneRounds:
    values = {name: data[name] for name in TuneRounds._fields}
    return TuneRounds(**{name: None if value is None else float(value) for name, value in values.items()})


def default_path(bundle: Path, *, writable: bool = False) -> Path | None:
    """Where the profile of the bundle in this folder lies: in the user's cache; None where that cannot be used.

    Args:
        bundle: bundle folder.
        writable: make the folder; the caller means to write.
    """
    folder = cache_folder("tune", writable=writable)
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(os.fsencode(bundle.resolve())).hexdigest()[:32]}.json"


def load_profile(
    path: Path | None, *, bundle: Path, build_key: str, drafters: Collection[str] | None = None
) -> TuneProfile | None:
    """The profile of a bundle, if there is one that holds.

    Args:
        path: the file; None looks where ``specexport tune`` puts it.
        bundle: bundle folder.
        build_key: its manifest's.
        drafters: those that a profile may name; None for any.

    Returns:
        None where there is none. A stale one, measured on another machine or with another build, and a damaged one in
        the user's cache are ignored with a warning.

    Raises:
        InvalidRequestError: the named file cannot be read, or is no profile.
    """
    place = default_path(bundle) if path is None else path
    if place is None or (path is None and not place.is_file()):
        return None
    mend = f"Fix: measure again with `specexport tune {bundle} --prompts FILE`."
    try:
        profile = _read_file(place, trusted=path is not None)
        for cell in profile.cells:
            if drafters is not None and cell.drafter not in drafters:
                raise ValueError(f"it names a drafter {cell.drafter!r}")
    except OSError as error:
        if path is not None:
            reason = error.strerror or str(error)
            raise InvalidRequestError(f"tune profile {path} cannot be read ({reason}).", _FORM) from error
        _log.warning("Tune profile %s cannot be read (%s) and is ignored. %s", place, error.strerror or error, mend)
        return None
    except (ValueError, RecursionError) as error:
        if path is not None:
            raise InvalidRequestError(f"tune profile {path} is malformed: {error}.", _FORM) from error
        _log.warning("Tune profile %s is malformed (%s) and is ignored. %s", place, error, mend)
        return None
    stale = _staleness(profile, build_key)
    if stale is not None:
        _log.warning("Tune profile %s is stale and is ignored: it was measured %s. %s", place, stale, mend)
        return None
    return profile


def _read_file(path: Path, *, trusted: bool) -> TuneProfile:
    with path.open(encoding="utf-8") as file:
        if not trusted and not is_private(os.fstat(file.fileno())):
            raise PermissionError(0, "others may write to it")
        try:
            data = json.load(file)
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON (line {error.lineno})") from None
    return TuneProfile.from_json(data)


def _staleness(profile: TuneProfile, build_key: str) -> str | None:
    """What differs from now; None if nothing."""
    different = []
    if profile.build_key != build_key:
        different.append("with another build of the bundle")
    if profile.machine != machine_key():
        different.append("on another machine, or with another kernel, onnxruntime, numpy or number of cores")
    return " and ".join(different) or None

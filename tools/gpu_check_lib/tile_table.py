"""From the sweep's rows to the tuning table: ``specexport/kernels/measured.py`` is written anew."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specexport.kernels.measured import MEASURED, SOURCES
from specexport.kernels.tuning import TileConfig, next_power_of_two
from tools.gpu_check_lib.rows import Row

PLACE = Path(__file__).resolve().parents[2] / "specexport" / "kernels" / "measured.py"
WORTH = 0.97
"""A candidate must take at most so much of the time of the table's own tiles: less is noise."""


class Entry(NamedTuple):
    """A line of the table: its key, its tiles, and the share of the old tiles' time that they take."""

    key: tuple[int, int, int, bool]
    tiles: TileConfig
    share: float


def read_results(folder: Path) -> tuple[list[Row], str]:
    """Rows of a run, and when and on which GPU it was made.

    ValueError: there are none, or they are a dry run's.
    """
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, calls, is_dry = [Row(**row) for row in found["rows"]], found["calls"], found["dry"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of `gpu_check.py run`: {error}") from error
    if is_dry:
        raise ValueError(f"{path} is a dry run's: it has measured nothing.")
    gpu = next((row.data["gpu"] for row in rows if "gpu" in row.data), "a GPU without a name")
    return rows, f"{gpu}, {calls[-1]['time']}"


def best_tiles(rows: Iterable[Row]) -> list[Entry]:
    """What the sweep found to be faster than the table.

    A candidate counts if it was timed behind every length. Its score is the sum of its times, each as a share of the
    best one behind that length. Tiles of at most 48 KiB are candidates for the larger set too. ValueError: there is no
    sweep among the rows.
    """
    sweeps = [row.data for row in rows if "ranked" in row.data]
    if not sweeps:
        raise ValueError("the report has no rows of kernels.sweep.")
    entries = []
    for small in (True, False):
        chosen = [data for data in sweeps if data["small"] or not small]
        own = next((_tiles(data["own"]) for data in sweeps if data["small"] == small), None)
        times: dict[int, dict[TileConfig, float]] = {}
        for data in chosen:
            here = times.setdefault(data["past"], {})
            here |= {_tiles(item["tiles"]): item["milliseconds"] for item in data["ranked"]}
        everywhere = set.intersection(*(set(here) for here in times.values()))
        if own is None or not everywhere:
            continue
        best = min(everywhere, key=lambda tiles: sum(here[tiles] / min(here.values()) for here in times.values()))
        shares = [here[best] / here[own] for here in times.values() if own in here]
        if best == own or not shares or max(shares) > WORTH:
            continue
        data = sweeps[0]
        key = (data["sm"], max(next_power_of_two(data["head_size"]), 16), best.block_m, small)
        entries.append(Entry(key, best, max(shares)))
    return entries


def _tiles(values: Mapping[str, Any]) -> TileConfig:
    return TileConfig(**values)


def write_table(entries: Sequence[Entry], source: str, place: Path = PLACE) -> None:
    """Write the module anew: what it has, and the entries instead of the old ones with their keys.

    ``source`` names the GPU and the day.
    """
    table = MEASURED | {entry.key: (entry.tiles[1], entry.tiles[2], entry.tiles[3]) for entry in entries}
    sources = SOURCES | {entry.key[0]: source for entry in entries}
    before = PLACE.read_text(encoding="utf-8").splitlines()
    lines = []
    for line in before:  # everything but the two tables stays
        if line.startswith("MEASURED:"):
            lines += _literal(line, table)
        elif line.startswith("SOURCES:"):
            lines += _literal(line, sources)
        elif not line.startswith((" ", "}")):
            lines.append(line)
    place.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _literal(line: str, table: Mapping[Any, Any]) -> list[str]:
    """A dictionary as ruff formats it, one entry a line."""
    name = line.partition(" = ")[0]
    if not table:
        return [f"{name} = {{}}"]
    entries = [f"    {key!r}: {json.dumps(value) if isinstance(value, str) else repr(value)}," for key, value in
               sorted(table.items())]  # fmt: skip
    return [f"{name} = {{", *entries, "}"]

"""``specexport list`` and ``specexport remove``: what the user's cache keeps."""

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from specexport.atomic import tree_size
from specexport.report import Column, print_json, print_report, terminal_table
from specexport.run.bundles import CachedBundle, list_cached_bundles, remove_cached_bundle, remove_unfinished_builds
from specexport_runtime.cli.errors import suggest
from specexport_runtime.errors import UserInputError
from specexport_runtime.user_cache import cache_root

OTHERS = {
    "engines": "engines that `specexport build` keeps",
    "costs": "learned costs of steps",
    "checked": "records of checked files",
    "checkpoints": "places of checkpoints",
    "suffixes": "texts to draft from",
    "rtx-kernels": "compiled GPU kernels",
    "chat": "entered lines of conversations",
}
"""What lies in the cache besides bundles, by folder."""
_DAY_S = 86400


def _by_name() -> dict[str, CachedBundle]:
    """All bundles by a name that no other has."""
    found = list_cached_bundles()
    count = Counter(kept.wanted.name for kept in found)
    return {
        kept.wanted.name + (f"@{kept.wanted.id[:4]}" if count[kept.wanted.name] > 1 else ""): kept for kept in found
    }


def _measure_other_caches() -> dict[str, int]:
    """Bytes of all else in the cache, by folder."""
    folders = {name: _root() / name for name in OTHERS}
    return {name: tree_size(folder) for name, folder in folders.items() if folder.is_dir()}


def _root() -> Path:
    try:
        return cache_root()
    except RuntimeError as error:
        raise UserInputError(f"there is no cache ({error}).", "set SPECEXPORT_CACHE_DIR to a folder.") from error


def _show(size: int) -> str:
    unit, by = next((unit for unit in (("GB", 1e9), ("MB", 1e6)) if size >= unit[1] / 10), ("kB", 1e3))
    return f"{size / by:.{0 if by == 1e3 else 1}f} {unit}"


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
def list_kept(as_json: bool) -> None:
    """Show the bundles that `run`, `serve`, `generate` and `chat` built, and what else is in the user's cache."""
    root = _root()
    remove_unfinished_builds()
    bundles, others = _by_name(), _measure_other_caches()
    sizes = {name: tree_size(kept.folder) for name, kept in bundles.items()}
    if as_json:
        rows = [
            {
                "name": name,
                "bundle": str(kept.bundle),
                **kept.wanted.__dict__,
                "bytes": sizes[name],
                "last_used": kept.last_used,
            }
            for name, kept in bundles.items()
        ]
        print_json({"folder": str(root), "bundles": rows, "others": others})
        return
    columns: list[Column[tuple[str, CachedBundle]]] = [
        Column("name", lambda row: row[0], left=True, fold=True),
        Column("built from", lambda row: row[1].wanted.target, left=True, fold=True),
        Column("draft", lambda row: row[1].wanted.draft, left=True, fold=True),
        Column("options", lambda row: _options(row[1]), left=True, shown=any(map(_options, bundles.values()))),
        Column("size", lambda row: _show(sizes[row[0]])),
        Column("last used", lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row[1].last_used))),
    ]
    lines = [f"{_show(size)} of {OTHERS[name]}" for name, size in others.items()]
    table = terminal_table(columns, bundles.items()) if bundles else None
    total = _show(sum(sizes.values()) + sum(others.values()))
    print_report(table, [*lines, f"{root}: bundles: {len(bundles)}, {total} in all"])


def _options(kept: CachedBundle) -> str | None:
    given: dict[str, Any] = {"quantize": kept.wanted.quantize, "max-model-len": kept.wanted.max_model_len}
    return " ".join(f"--{name} {value}" for name, value in given.items() if value is not None) or None


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="Every bundle, and all else that the cache keeps.")
@click.option("--unused-for", type=float, metavar="DAYS", help="Bundles that were last used longer ago.")
def remove(names: tuple[str, ...], everything: bool, unused_for: float | None) -> None:
    """Remove bundles from the user's cache by the names that `specexport list` shows. What runs them goes on."""
    if bool(names) + everything + (unused_for is not None) != 1:
        raise UserInputError("it is not clear what to remove.", "give NAMEs, --all or --unused-for DAYS.")
    if unused_for is not None and not unused_for >= 0:
        raise UserInputError(f"--unused-for {unused_for:g} is no number of days.", "give 0 or more.")
    root = _root()
    remove_unfinished_builds()
    bundles = _by_name()
    for name in names:
        if name not in bundles:
            near = suggest(name, bundles)
            raise UserInputError(
                f"no bundle {name} is kept.", f"did you mean {near}?" if near else "see `specexport list`."
            )
    before = time.time() - (unused_for or 0) * _DAY_S
    chosen = {name: bundles[name] for name in names or bundles if names or bundles[name].last_used <= before}
    try:
        for name, kept in chosen.items():
            size = tree_size(kept.folder)
            remove_cached_bundle(kept)
            click.echo(f"removed {name} ({_show(size)})")
        for name, size in _measure_other_caches().items() if everything else ():
            shutil.rmtree(root / name)
            click.echo(f"removed {OTHERS[name]} ({_show(size)})")
    except OSError as error:
        raise UserInputError(
            f"{root} cannot be cleared ({error.strerror}).", "remove what you want yourself."
        ) from error

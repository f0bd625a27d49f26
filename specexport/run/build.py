"""Building a bundle into the user's cache, alone among all processes that want the same one."""

import re
import shutil
import sys
from pathlib import Path

import click

from specexport.run.bundles import (
    BundleSpec,
    alone,
    bundles_folder,
    check_cached_bundle,
    find_file_states,
    read_cached_bundle,
    remove_unfinished_builds,
    write_record,
)
from specexport.run.estimate import show_estimate
from specexport_runtime.bundle.manifest import MANIFEST_NAME
from specexport_runtime.errors import UserInputError
from specexport_runtime.user_cache import ROOT_VARIABLE

_WEIGHTS = (".gguf", ".safetensors")


def build_into_cache(wanted: BundleSpec) -> None:
    """Build what is wanted unless it is kept by now; returns when it is. Prints what happens to standard error."""
    folder = bundles_folder() / wanted.id
    with alone(folder, lambda: _say(f"{wanted.name} is being built by another process: waiting for it")):
        kept = read_cached_bundle(folder)
        fault = None if kept is None else check_cached_bundle(kept).fault
        if kept is not None and fault is None:
            return
        remove_unfinished_builds()
        files = {role: find_file_states(place) for role, place in wanted.places.items()}
        if fault is not None:
            _say(f"{fault}: {wanted.name} is built again, unless all contents are the same")
        try:
            folder.mkdir(exist_ok=True)
            _build(wanted, folder, files)
        except UserInputError as error:
            if str(folder) not in error.message:
                raise
            fix = f"free some space (`specexport list` shows what is kept), or set {ROOT_VARIABLE} to another disk."
            message = re.sub(rf"{re.escape(str(folder))}[^\s,:]*", str(folder.parent.parent), error.message)
            raise UserInputError(message, fix) from error
        finally:
            if read_cached_bundle(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)


def _build(wanted: BundleSpec, folder: Path, files: dict[str, dict[str, list[int]]]) -> None:
    from specexport.compile.pipeline import build_bundle
    from specexport.host import set_malloc_threshold
    from specexport.recipe import BuildRecipe

    bundle = folder / wanted.name
    if bundle.exists() and not (bundle / MANIFEST_NAME).exists():  # which a build refuses to replace
        shutil.rmtree(bundle)
    recipe = BuildRecipe(
        target=wanted.target,
        draft=wanted.draft,
        output=str(bundle),
        quantize=wanted.quantize,
        max_model_len="auto" if wanted.max_model_len is None else wanted.max_model_len,
    )
    sizes = {
        role: sum(state[0] for path, state in states.items() if path.endswith(_WEIGHTS))
        for role, states in files.items()
    }
    set_malloc_threshold()
    with show_estimate(sys.stderr, wanted.name, sizes) as progress:
        build_bundle(recipe, progress=progress, force=True, use_cache=False)
        write_record(folder, wanted, files)


def _say(line: str) -> None:
    click.echo(line, err=True)

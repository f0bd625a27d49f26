"""Writing a bundle, and telling what stands in its place already."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specexport.atomic import place_behind_links, remove_leftovers, write_json
from specexport.checkpoint.vocabulary import read_vocabulary
from specexport.compile.built import TOKENIZER_NAME, BuiltModel, entry_in_bundle
from specexport.compile.vocabulary import draftable_size, sha256_of
from specexport_runtime.bundle.files import check_files, hash_files
from specexport_runtime.bundle.held import held
from specexport_runtime.bundle.manifest import MANIFEST_NAME, Manifest, VocabularyInfo, load_manifest
from specexport_runtime.errors import BundleError, IncompatibleError, OutputExistsError

CHAT_TEMPLATE_NAME = "chat_template.jinja"


def check_output(output: Path, *, force: bool) -> bool:
    """Whether a bundle stands in the output folder; OutputExistsError if something else does."""
    place_behind_links(output)
    if output.parent.is_dir():
        remove_leftovers(output)
    if not output.exists():
        return False
    if not output.is_dir():
        raise OutputExistsError(f"{output} exists and is not a folder.", "choose another folder with -o.")
    if not any(output.iterdir()):
        return False
    if (output / MANIFEST_NAME).is_file():
        return True
    if force:
        # --force replaces bundles; it must never be the way to lose a home folder.
        raise OutputExistsError(
            f"{output} is not empty and is not a bundle, so --force does not replace it.",
            "choose another folder with -o, or empty this one yourself.",
        )
    raise OutputExistsError(f"{output} exists and is not empty.", "choose another folder with -o.")


def find_up_to_date(output: Path, build_key: str) -> Manifest | None:
    """The manifest of the bundle in ``output`` if it is whole and was built from exactly the same input."""
    try:
        with held(output):
            manifest = load_manifest(output)
            if manifest.build_key != build_key:
                return None
            check_files(output, manifest.files)
    except (BundleError, IncompatibleError):
        return None
    return manifest


def make_output_exists_error(output: Path, asked: Mapping[str, Any]) -> OutputExistsError:
    """The error for a bundle that stands in the way and is not up to date; says what differs."""
    fix = "pass --force to replace it, or choose another folder with -o."
    try:
        with held(output):
            manifest = load_manifest(output)
            check_files(output, manifest.files)
    except (BundleError, IncompatibleError) as error:
        return OutputExistsError(f"{output} holds a bundle that cannot be used ({error.message})", fix)
    differences = [
        f"{key} is {manifest.recipe.get(key)}, asked for {value}"
        for key, value in asked.items()
        if value != "auto" and manifest.recipe.get(key) != value
    ]
    reason = "; ".join(differences) or "its checkpoints, the compiler or the tools have changed"
    return OutputExistsError(f"{output} holds another bundle ({reason}).", fix)


def write_bundle(
    folder: Path,
    *,
    settings: Mapping[str, Any],  # the recipe with all that it came to
    build_key: str,  # hash of all that decides the result
    tools: Mapping[str, str],
    models: Mapping[str, BuiltModel],  # by role; ``"target"`` gives the tokenizer
) -> Manifest:
    """Write everything but the engines, which are in ``folder/<role>`` already; OSError on a full disk."""
    target = models["target"]
    (folder / TOKENIZER_NAME).write_bytes(target.tokenizer_json)
    if target.chat_template is not None:
        (folder / CHAT_TEMPLATE_NAME).write_text(target.chat_template, encoding="utf-8")
    files = {f"{role}/{name}": entry for role, built in models.items() for name, entry in built.files.items()}
    files |= hash_files(folder, [path.name for path in folder.iterdir() if path.is_file()])
    manifest = Manifest(
        name=settings["name"],
        build_key=build_key,
        recipe=dict(settings),
        tools=dict(tools),
        vocabulary=_vocabulary_info(models),
        max_model_len=settings["max_model_len"],
        lookahead=settings["lookahead"],
        models={role: entry_in_bundle(built, role) for role, built in models.items()},
        files=files,
        max_num_seqs=settings["max_num_seqs"],
        max_num_tokens=settings["max_num_tokens"],
    )
    manifest.write(folder)
    return manifest


def write_bundle_json(
    bundle: Path, before: Manifest, name: str, data: Any, change: Callable[[Manifest], Manifest] = lambda same: same
) -> Manifest:
    """Put a JSON file into a bundle, and its hash into the manifest, which is given back with ``change``.

    No load goes on meanwhile. Whenever this is interrupted, the bundle stays valid, with the old file, without one, or
    with the new one.
    UserInputError or OSError if it cannot be written.
    """
    files = {path: entry for path, entry in before.files.items() if path != name}
    with held(bundle, alone=True):
        if len(files) < len(before.files):
            replace(before, files=files).write(bundle)  # the old file is about to go
        write_json(bundle / name, data)
        done = change(replace(before, files=files | hash_files(bundle, [name])))
        done.write(bundle)
    return done


def _vocabulary_info(models: Mapping[str, BuiltModel]) -> VocabularyInfo:
    target = models["target"]
    vocabularies = [read_vocabulary(built.tokenizer_json, where=built.entry.source.name) for built in models.values()]
    return VocabularyInfo(
        size=draftable_size(vocabularies, [built.entry.vocab_size for built in models.values()]),
        tokenizer_sha256=sha256_of(target.tokenizer_json),
        bos_token_id=target.bos_token_id,
        # A checkpoint may name ids that its model has no row for; nothing can end with one.
        eos_token_ids=tuple(token for token in target.eos_token_ids if 0 <= token < target.entry.vocab_size),
        special_tokens=dict(target.special_tokens),
    )

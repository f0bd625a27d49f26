"""Bundle metadata: ``manifest.json``, reading it, and refusing what does not fit.

Compiler and runtime use these classes: a field's type is its rule (``specexport_runtime.schema``).
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from specexport_runtime.abi import ABI_VERSION, ADAPTER_IDS
from specexport_runtime.bundle.entry import (
    MAX_ADAPTERS,
    MAX_LOOKAHEAD,
    MAX_MODEL_LEN,
    MAX_NUM_TOKENS,
    ModelEntry,
    NumSeqs,
    TokenId,
    VocabSize,
)
from specexport_runtime.bundle.files import FileEntry, find_file_fault
from specexport_runtime.errors import BundleError, IncompatibleError
from specexport_runtime.schema import InnerPath, MisfitError, from_json, map_paths, one_of, to_json, whole

SCHEMA_VERSION = 16
MANIFEST_NAME = "manifest.json"
DEFAULT_NUM_SEQS = 8
_REBUILD = "build it again with `specexport build`."
Role = Annotated[str, one_of("target", "draft", "head")]


@dataclass(frozen=True)
class VocabularyInfo:
    """Vocabulary and tokenizer identity."""

    # Ids that the tokenizer can produce and every model knows, but a draft with another vocabulary: only ids below it
    # are drafted.
    size: VocabSize
    tokenizer_sha256: str  # of ``tokenizer.json``
    bos_token_id: int | None
    eos_token_ids: tuple[TokenId, ...]  # any of them ends a generation
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by name (``bos_token``), for chat templates


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says about itself (``manifest.json``)."""

    name: str
    build_key: str  # hash of all that decides the result: recipe, weights, compiler sources, tool versions
    recipe: Mapping[str, Any]  # the resolved one
    tools: Mapping[str, str]  # versions of the tools that built it
    vocabulary: VocabularyInfo
    max_model_len: Annotated[int, whole(2, MAX_MODEL_LEN)]  # most tokens (prompt and generated) of one sequence
    lookahead: Annotated[int, whole(1, MAX_LOOKAHEAD)]  # largest K the bundle was built and verified for
    models: Mapping[Role, ModelEntry]  # "draft" is a draft model, "head" a draft head
    files: Mapping[InnerPath, FileEntry]  # every other file of the bundle
    verify: Mapping[str, Any] | None = None  # summary of the last ``specexport verify``
    max_num_seqs: NumSeqs | None = None  # decoded at a time, unless a load says otherwise; None: ``default_num_seqs``
    max_num_tokens: Annotated[int, whole(1, MAX_NUM_TOKENS)] | None = None  # of one step; None: the runtime's choice
    schema_version: int = SCHEMA_VERSION
    abi_version: int = ABI_VERSION

    @property
    def default_num_seqs(self) -> int:
        """Sequences that are decoded at a time where nothing else is asked for: what it was built for, else 8."""
        limits = [entry.engine.limits for entry in self.models.values()]
        built = [each.max_num_seqs for each in limits if each is not None]
        return self.max_num_seqs or min(built, default=DEFAULT_NUM_SEQS)

    @property
    def lends_caches(self) -> bool:
        """Whether a draft head reads the target's KV caches."""
        return any(entry.attention.target_layers for entry in self.models.values())

    def to_json(self) -> dict[str, Any]:
        """JSON form, with ``manifest_sha256`` over everything else."""
        plain: dict[str, Any] = json.loads(json.dumps(to_json(self)))
        return plain | {"manifest_sha256": _digest(plain)}

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder`` in one step (temporary file, then rename)."""
        temporary = folder / f".{MANIFEST_NAME}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(temporary, folder / MANIFEST_NAME)
        finally:
            temporary.unlink(missing_ok=True)


def _digest(data: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``folder/manifest.json`` alone; BundleError, or IncompatibleError for another schema or ABI."""
    path = folder / MANIFEST_NAME
    is_checkpoint = os.path.isfile(folder / "config.json") or (folder.suffix == ".gguf" and os.path.isfile(folder))
    if is_checkpoint and not os.path.lexists(path):
        raise BundleError(
            f"{folder} is a checkpoint, and no bundle yet.",
            f"run `specexport build {folder} -o NEW_FOLDER`, then give NEW_FOLDER.",
        )
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that no folder can have
        raise BundleError(f"there is no folder {folder}.", "give the bundle folder that `specexport build -o` wrote.")
    if not os.path.lexists(path):
        raise BundleError(f"{folder} has no {MANIFEST_NAME}, so it is not a bundle.", _REBUILD)
    if (fault := find_file_fault(path)) is not None:
        raise BundleError(f"{path} {fault[0]}.", fault[1] or _REBUILD)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema, abi = int(data["schema_version"]), int(data["abi_version"])
        digest = _digest(data)
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}).", "give a readable bundle.") from error
    except RecursionError:
        raise BundleError(f"{path} is nested too deeply.", _REBUILD) from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise BundleError(f"{path} cannot be read ({error}).", _REBUILD) from error
    if schema != SCHEMA_VERSION:
        newer = schema > SCHEMA_VERSION
        fix = "upgrade specexport (`pip install -U specexport`)." if newer else _rebuild_in(folder)
        raise IncompatibleError(f"{path}: schema_version is {schema}, this runtime reads {SCHEMA_VERSION}.", fix)
    if abi != ABI_VERSION:
        raise IncompatibleError(
            f"{path}: abi_version is {abi}, this runtime speaks {ABI_VERSION}.", _rebuild_in(folder)
        )
    if data.pop("manifest_sha256", None) != digest:
        raise BundleError(f"{path} was altered: manifest_sha256 does not match its content.", _REBUILD)
    try:
        manifest = from_json(Manifest, data)
        _check_agreement(manifest)
    except MisfitError as error:
        raise BundleError(f"{path} does not follow its schema: {error}.", _REBUILD) from error
    return manifest


def _rebuild_in(folder: Path) -> str:
    return f"build it again: `specexport build … -o {folder} --force`, as it was built."


def _check_agreement(manifest: Manifest) -> None:
    """Refuse what each part may say, but not together with the others."""
    vocabulary = manifest.vocabulary
    for role, entry in manifest.models.items():
        if entry.max_positions is not None and manifest.max_model_len > entry.max_positions:
            raise MisfitError(
                "max_model_len", manifest.max_model_len, f"within {role}'s {entry.max_positions} positions"
            )
        if entry.token_map is not None and (role != "draft" or entry.cut_lm_head is None):
            raise MisfitError(f"token_map of models.{role}", entry.token_map.path, "null: only drafts speak by a map")
        if vocabulary.size > entry.vocab_size and entry.token_map is None:
            raise MisfitError("vocabulary.size", vocabulary.size, f"within {role}'s vocabulary of {entry.vocab_size}")
        beyond = [token for token in vocabulary.eos_token_ids if role == "target" and token >= entry.vocab_size]
        if beyond:
            raise MisfitError("an id of vocabulary.eos_token_ids", beyond[0], f"below {entry.vocab_size}")
        experts = entry.parameters.experts
        if experts is not None and experts.per_token > experts.per_layer:
            raise MisfitError(f"experts of models.{role}", experts, "no more for a token than a layer has")
        map_paths(entry, partial(_check_listed, manifest, role))
        _check_vocabulary_and_layers(role, entry)
        _check_borrowed_caches(manifest, role, entry)
        _check_adapters(role, entry)


def _check_listed(manifest: Manifest, role: str, path: str) -> str:
    if path not in manifest.files:
        raise MisfitError(f"a file of models.{role}", path, "among the files")
    return path


def _check_vocabulary_and_layers(role: str, entry: ModelEntry) -> None:
    """Refuse an LM head that cannot have been cut so, layers that no checkpoint can have had, and a target without."""
    rows, dropped = entry.lm_head_rows, [layer.number for layer in entry.dropped_layers]
    if role == "target" and entry.cut_lm_head is not None:
        raise MisfitError("cut_lm_head of models.target", entry.cut_lm_head, "null: only a draft's LM head may be cut")
    if rows > entry.vocab_size:
        raise MisfitError(f"cut_lm_head of models.{role}", rows, f"within its vocabulary of {entry.vocab_size}")
    if role == "target" and dropped:
        raise MisfitError("dropped_layers of models.target", dropped, "empty: only a draft may lack layers")
    num_layers = len(entry.attention.layers) + len(dropped)
    if len(set(dropped)) < len(dropped) or any(layer >= num_layers for layer in dropped):
        raise MisfitError(f"dropped_layers of models.{role}", dropped, "different layers of its checkpoint")


def _check_borrowed_caches(manifest: Manifest, role: str, entry: ModelEntry) -> None:
    """Refuse a head that reads other caches than the target has."""
    own, lent = entry.attention, entry.attention.target_layers
    if not lent:
        return
    where, target = f"target_layers of models.{role}", manifest.models.get("target")
    if role != "head" or target is None:
        raise MisfitError(where, lent, "empty: only a draft head reads caches of a target")
    layers = target.attention.layers
    there = tuple(layers[number] for number in lent if number < len(layers))
    if len(there) < len(lent) or there != own.layers or target.attention.cache_dtype != own.cache_dtype:
        raise MisfitError(where, lent, "layers of the target whose caches are of the sizes in `layers`")


def _check_adapters(role: str, entry: ModelEntry) -> None:
    """Refuse adapters that no build makes: of a draft, too many, two of a name, or one merged among others."""
    where, names = f"adapters of models.{role}", [adapter.name for adapter in entry.adapters]
    if names and role != "target":
        raise MisfitError(where, names, "empty: only a target has adapters")
    if len(names) > MAX_ADAPTERS or len(set(names)) < len(names):
        raise MisfitError(where, names, f"{MAX_ADAPTERS} different names at most")
    if len(names) > 1 and len(entry.chosen_adapters) < len(names):
        raise MisfitError(where, names, "one where it is merged")
    if bool(entry.chosen_adapters) != (ADAPTER_IDS.name in entry.engine.inputs):
        raise MisfitError(
            where, names, f"there to choose from where the engine takes {ADAPTER_IDS.name}, and only there"
        )

"""Opening a bundle folder: checks, tokenizer, chat template. Its engines are opened by ``executors.open``."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.bundle.entry import MAX_NUM_SEQS
from specexport_runtime.bundle.files import check_files, file_state
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.bundle.tokenizer_load import load_tokenizer
from specexport_runtime.errors import BundleError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
WEIGHTS = "[!.]*.data"
"""Names of files of weights, beside their graphs."""


class ChangedError(BundleError):
    """A bundle's files are others than when its load began."""


class Bundle(NamedTuple):
    """A bundle that passed its checks, with the limits that the load asked for."""

    folder: Path
    manifest: Manifest
    tokenizer: "Tokenizer"
    chat_template: str | None  # Jinja source
    max_model_len: int  # most tokens of one sequence
    max_num_seqs: int  # sequences that run at a time
    num_rows: int  # cache rows: max_num_seqs, and the rows that only keep prefixes
    states: Mapping[str, object]  # of its files, before they were hashed

    def check_unchanged(self) -> None:
        """Once its files are open: ChangedError if they are not the ones that were hashed."""
        for name, state in self.states.items():
            if file_state(self.folder / name) != state:
                raise ChangedError(f"{self.folder}: {name} changed while the bundle was loaded.", "load it again.")


def check_num_seqs(count: int, name: str = "max_num_seqs") -> None:
    """Refuse a number of cache rows that is out of range (InvalidRequestError); the message calls it ``name``."""
    if not 1 <= count <= MAX_NUM_SEQS:
        raise InvalidRequestError(f"{name} is {count}.", f"choose a number from 1 to {MAX_NUM_SEQS}.")


def _check_links(folder: Path, manifest: Manifest) -> None:
    """Refuse links to weights whose content nothing vouches for: a graph could make logits of any file."""
    for name in {str(PurePosixPath(name).parent) for name in manifest.files}:
        for path in (folder / name).glob(WEIGHTS):
            if path.is_symlink() and path.relative_to(folder).as_posix() not in manifest.files:
                raise BundleError(f"{folder}: {path.name} is a link that the manifest does not name.", "remove it.")


def load_bundle(
    folder: Path, *, max_model_len: int | None = None, max_num_seqs: int | None = None, prefix_rows: int = 0
) -> Bundle:
    """Open ``folder``, checking versions and the hash of each file that was not checked here before."""
    manifest = load_manifest(folder)
    if max_model_len is not None and not 2 <= max_model_len <= manifest.max_model_len:
        raise InvalidRequestError(
            f"max_model_len is {max_model_len}; this bundle allows 2 to {manifest.max_model_len}.",
            "choose a number in that range, or build with a larger --max-model-len.",
        )
    if max_num_seqs is None:
        max_num_seqs = manifest.default_num_seqs
    check_num_seqs(max_num_seqs)
    states = {name: file_state(folder / name) for name in manifest.files}
    known = check_files(folder, manifest.files, remember=True)
    _check_links(folder, manifest)
    if "target" not in manifest.models:
        raise BundleError(f"{folder}: the manifest names no target model.", "build it again.")
    template = folder / CHAT_TEMPLATE_NAME
    return Bundle(
        folder,
        manifest,
        load_tokenizer(folder / TOKENIZER_NAME, background=known),
        template.read_text(encoding="utf-8") if CHAT_TEMPLATE_NAME in manifest.files else None,
        max_model_len or manifest.max_model_len,
        max_num_seqs,
        max_num_seqs + prefix_rows,
        states,
    )

"""Where a checkpoint's files are, and the hash over them; only named kinds of files are read, never pickles."""

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.bundle.files import FOLLOW_LINKS, find_file_fault, sha256_file
from specexport_runtime.errors import CheckpointError

_CONFIG = "config.json"
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_PART = re.compile(r".+-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
SMALLEST_SPLIT = 2
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONVERT = (
    "convert the weights to safetensors: load them once where you trust them and call "
    'model.save_pretrained(folder) there. A file of tensors alone, as of heads: python -c "import sys, torch; from '
    "safetensors.torch import save_file; save_file({k: v.clone() for k, v in torch.load(sys.argv[1], "
    "weights_only=True).items()}, 'model.safetensors')\" FILE."
)


class Source(NamedTuple):
    """A checkpoint on this machine."""

    name: str  # hub id, or the name of the folder or file; never a machine path
    folder: Path
    gguf_file: str | None  # in the folder, the first part of one that is split; None for other checkpoints
    files: tuple[Path, ...]  # of the checkpoint, sorted by name; the parts of a split file in their order


def resolve_source(source: str, revision: str | None = None, *, remote_code: bool = False) -> Source:
    """Find a checkpoint's files, fetching them for a hub id; CheckpointError if nothing usable is there."""
    path = Path(source).expanduser()
    if path.is_file():
        return _gguf_source(path)
    if path.is_dir():
        return _folder_source(path, Path(os.path.abspath(path)).name, remote_code)
    if path.is_symlink():
        raise CheckpointError(f"checkpoint {source} is a link that leads to nothing.", FOLLOW_LINKS)
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"checkpoint {source}: there is no such folder or file.",
            "give a Hugging Face folder, a .gguf file or a hub id.",
        )
    return _folder_source(_fetch(source, revision, remote_code), source, remote_code)


def read_object(source: Source, name: str, *, missing_ok: bool = False) -> dict[str, Any]:
    """What a JSON file of a checkpoint says; CheckpointError if it cannot be read, or holds no object."""
    path = source.folder / name
    if missing_ok and not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it holds no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{source.name}: {name} cannot be read ({type(error).__name__}: {error}).", f"fetch {name} again."
        ) from error
    return found


_BY_LENGTH = ("dynamic", "longrope", "su", "yarn")  # Phi-3 says longrope in all three ways
PACKED_METHODS = ("gptq", "awq", "compressed-tensors")
"""``quant_method`` of the folders whose weights can be read."""
PACKED_PARTS = {
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "input_scale",
}  # fmt: skip
"""What the tensors of a packed weight are named."""


def may_hold_quantized(source: Source) -> bool:
    """Whether a checkpoint may hold quantized weights that can be kept: it is a GGUF file, or its config says so."""
    if source.gguf_file is not None:
        return True
    try:
        config = json.loads((source.folder / _CONFIG).read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] in PACKED_METHODS
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the loader says what is wrong with a config
        return False


def turns_by_length(source: Source) -> bool:
    """Whether a checkpoint may have rotary tables that depend on the length: its config has a word of them."""
    if source.gguf_file is not None:  # one that has is refused
        return False
    try:
        config = (source.folder / _CONFIG).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return any(f'"{word}"' in config for word in _BY_LENGTH)


def hash_checkpoint(source: str, revision: str | None = None, *, remote_code: bool = False) -> str:
    """SHA-256 over a checkpoint's files (names and contents), with its Python files if those run; loads no weights."""
    return hash_source(resolve_source(source, revision, remote_code=remote_code))


def hash_source(source: Source) -> str:
    """SHA-256 over the names and contents of a source's files."""
    digest = hashlib.sha256()
    for path in source.files:
        digest.update(os.fsencode(f"{path.name}\0{_hash_file(path, *file_state(path))}\n"))
    return digest.hexdigest()


def file_state(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


@functools.lru_cache(maxsize=256)
def _hash_file(path: Path, *_: int) -> str:
    """The hash of a file as it is: a build asks for it before and after it reads, and large ones take half a minute."""
    return sha256_file(path)


def _gguf_source(path: Path) -> Source:
    if path.suffix.lower() == ".gguf":
        parts = gguf_parts(path)
        return Source(parts[0].name, path.parent, parts[0].name, parts)
    if any(path.match(pattern) for pattern in _PICKLED):
        raise CheckpointError(f"{path.name} may be pickled, and loading a pickle can run code.", _CONVERT)
    raise CheckpointError(f"{path.name} is a file, but not a .gguf file.", "give the folder that holds config.json.")


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of a split GGUF file, whichever is given; names decide before links are followed."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) < SMALLEST_SPLIT:
        return (path,)
    count, (begin, end) = int(match["count"]), match.span("number")
    names = [f"{path.name[:begin]}{number:05d}{path.name[end:]}" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        part = path.with_name(name)
        if not part.is_file():
            raise CheckpointError(
                f"{path.name} is one of {count} parts, and part {number}, {name}, is not beside it.",
                "put all parts into one folder, under the names they were published with.",
            )
    return tuple(path.with_name(name) for name in names)


def _folder_source(folder: Path, name: str, remote_code: bool) -> Source:
    if not any(folder.iterdir()):
        raise CheckpointError(f"checkpoint folder {name} is empty.", "give a folder with config.json and safetensors.")
    ggufs = sorted(folder.glob("*.gguf"))
    if not os.path.lexists(folder / _CONFIG):
        hint = f"give the file itself: {ggufs[0]}" if ggufs else "give the folder that holds config.json."
        raise CheckpointError(f"checkpoint folder {name} has no {_CONFIG}.", hint)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
        if pickled:
            raise CheckpointError(f"{name} has pickled weights only ({pickled[0]}), which can run code.", _CONVERT)
        raise CheckpointError(f"checkpoint {name} has no safetensors weights.", _CONVERT)
    patterns = (*_WANTED, "*.py") if remote_code else _WANTED
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    for file in files:
        if (fault := find_file_fault(file)) is not None:
            raise CheckpointError(f"{name}: {file.name} {fault[0]}.", fault[1] or "fetch the checkpoint again.")
    return Source(name, folder, None, tuple(files))


def _fetch(repo_id: str, revision: str | None, remote_code: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = [*_WANTED, "*.py"] if remote_code else list(_WANTED)
    where = f"{repo_id} at revision {revision}" if revision else repo_id
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{where} is gated.", "accept its licence on the hub and set HF_TOKEN.") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        hint = "check the spelling, or give a local folder."
        raise CheckpointError(f"{where} is neither a local folder nor on the model hub.", hint) from error
    except (OSError, RuntimeError) as error:  # no network, offline mode with nothing cached, a broken download
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{where} is not a local folder, and the model hub could not be reached ({reason}).",
            "check the network, or download the checkpoint elsewhere and give its folder.",
        ) from error
    return Path(folder)

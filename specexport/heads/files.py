"""A draft head's files: its configuration, and its tensors by their names in our form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.checkpoint.source import Source
from specexport.heads.config import TargetFacts
from specexport_runtime.errors import CheckpointError

MORE = "more."
"""What names of tensors beside the layers begin with, and a number, in modules after the first of several."""
CONFIG_NAME = "config.json"
OTHER_TARGET = "give a head that was made for this target."
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class HeadFiles:
    """A head as it lies on disk."""

    name: str  # in reports; never a machine path
    # ``config.json``; of a module in the target's checkpoint, what it says of the language model
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of each tensor, by the name in our form
    stored: Mapping[str, tuple[Path, str]]  # file and name in it of each tensor

    def tensor(self, name: str) -> Any:
        """One tensor, as torch has it."""
        from safetensors import safe_open

        path, key = self.stored[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)


def read_tensor_index(
    source: Source, our_name: Callable[[str], str | None]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[Path, str]]]:
    """Shape, file and name there of each tensor of a source, by our name; ``our_name`` gives None if not wanted."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, tuple[Path, str]] = {}
    for path in (path for path in source.files if path.suffix == ".safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    name = our_name(key)
                    if name is not None:
                        shapes[name], stored[name] = tuple(file.get_slice(key).get_shape()), (path, key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source.name}: {path.name} cannot be read ({error}).", "fetch the head again: the file is damaged."
            ) from error
    return shapes, stored


def our_name(key: str) -> str | None:
    """A tensor's name in our form: the first layer among the layers. ``key`` has no prefix for the model."""
    name = "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key
    return None if name in _IGNORED else name


def is_named(files: HeadFiles) -> bool:
    """Whether the configuration says by a name of speculators which kind it is."""
    return files.values.get("speculators_model_type") is not None


def read_size(
    files: HeadFiles, values: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """A whole number of a configuration; CheckpointError for anything else."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1 << 24:
        raise CheckpointError(f"{files.name}: {CONFIG_NAME} has {value!r} for {key}, no size.", "fetch the head again.")
    return value


def check_target(files: HeadFiles, target: TargetFacts, *, width: int, vocab_size: int) -> None:
    """Refuse a head of other sizes than its target's: what it reads, and how many tokens it knows."""
    if width != target.hidden_size:
        raise CheckpointError(
            f"the head {files.name} reads hidden states of {width} values, and the target's have {target.hidden_size}.",
            OTHER_TARGET,
        )
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head {files.name} is for a vocabulary of {vocab_size} tokens, and the target has "
            f"{target.vocab_size}.",
            OTHER_TARGET,
        )

"""LoRA adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``, read without PEFT.

A layer ``y = W x`` becomes ``y = W x + s B (A x)`` with A [r, K] and B [N, r] (Hu et al. 2021, equation 3); s is
``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` (rsLoRA, Kalajdzievski 2023). Whatever else a configuration may ask for
is refused by name: an adapter that is honoured by half is another adapter.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specexport.checkpoint.source import Source, hash_source
from specexport_runtime.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ABOUT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Settings that are honoured here, or that change nothing of an adapter once it is trained. Others must be off."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")
_CONVERT = (
    'convert it where you trust it: python -c "import sys, torch; from safetensors.torch import save_file; '
    "save_file({k: v.clone() for k, v in torch.load(sys.argv[1], weights_only=True).items()}, "
    f"'{WEIGHTS}')\" FILE."
)


@dataclass(frozen=True)
class LoraSource:
    """An adapter on this machine, its configuration checked."""

    name: str  # as requests call it
    folder: Path  # with its two files
    source: str  # name of the folder, for reports and the manifest
    sha256: str  # over both files
    config: Mapping[str, Any] = field(repr=False)  # ``adapter_config.json``

    @property
    def where(self) -> str:
        """The adapter in words, for messages."""
        return f"LoRA adapter {self.name} ({self.source})"


def find_adapter(name: str, folder: str) -> LoraSource:
    """An adapter's folder, its configuration checked, no tensor read; CheckpointError for what is not honoured."""
    path = Path(folder).expanduser()
    where = f"LoRA adapter {name} ({path.resolve().name})"
    if not path.is_dir():
        raise CheckpointError(f"{where}: there is no such folder.", f"give a folder with {CONFIG} and {WEIGHTS}.")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{where} has no {CONFIG}.", "give the folder that PEFT's save_pretrained wrote.")
    if not (path / WEIGHTS).is_file():
        pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
        if pickled:
            raise CheckpointError(f"{where} is pickled ({pickled[0]}), and loading a pickle can run code.", _CONVERT)
        raise CheckpointError(f"{where} has no {WEIGHTS}.", "give the folder that PEFT's save_pretrained wrote.")
    source = Source(path.name, path, None, (path / CONFIG, path / WEIGHTS))
    return LoraSource(name, path, path.resolve().name, hash_source(source), _read_config(path / CONFIG, where))


def _read_config(path: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {CONFIG} cannot be read ({error}).", "fetch the adapter again.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{where} is of type {kind!r}, not LORA.", "give a LoRA adapter.")
    _check_config(config, where)
    return config


def _check_config(config: Mapping[str, Any], where: str) -> None:
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise CheckpointError(
            f"{where} is for task {config['task_type']!r}.", "give an adapter of a causal language model."
        )
    if config.get("bias", "none") not in (None, "none"):
        raise _unsupported_error(where, f"bias {config['bias']!r}", "train it with bias 'none'")
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise _unsupported_error(
            where,
            f"init_lora_weights {config['init_lora_weights']!r}, which changes the base model's weights too",
            "save it with path_initial_model_for_weight_conversion",
        )
    for key, value in config.items():
        if key not in _ABOUT and value:
            fix = _HOW_TO_DO_WITHOUT.get(key, "train it without, or merge it with PEFT and build the merged checkpoint")
            raise _unsupported_error(where, f"{key} {_short(value)}", fix)
    numbers = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
    for pattern in ("rank_pattern", "alpha_pattern"):
        found = config.get(pattern) or {}
        if not isinstance(found, dict):
            raise damaged_adapter_error(where, f"{pattern} is {_short(found)}")
        numbers |= {f"{pattern} of {key!r}": value for key, value in found.items()}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise damaged_adapter_error(where, f"{key} is {_short(value)}")
    modules = config.get("target_modules")
    if not modules or not (isinstance(modules, str) or _is_string_list(modules)):
        raise damaged_adapter_error(where, f"target_modules is {_short(modules)}")
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        for text in [config[key]] if isinstance(config.get(key), str) else config.get(key) or ():
            _check_pattern(text, where, key)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_pattern(text: Any, where: str, key: str) -> None:
    try:
        re.compile(text)
    except (re.error, TypeError) as error:
        raise damaged_adapter_error(where, f"{key} has {_short(text)}, which is no pattern ({error})") from error


_HOW_TO_DO_WITHOUT = {
    "use_dora": "merge it with PEFT (merge_and_unload) and build the merged checkpoint",
    "modules_to_save": "merge it with PEFT (merge_and_unload) and build the merged checkpoint",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _unsupported_error(where: str, what: str, fix: str) -> CheckpointError:
    return CheckpointError(f"{where} has {what}, which is not honoured here.", f"{fix}.")


def damaged_adapter_error(where: str, what: str) -> CheckpointError:
    """The error for an adapter that PEFT would not have written so."""
    return CheckpointError(f"{where}: {what}.", "save the adapter again with PEFT's save_pretrained.")

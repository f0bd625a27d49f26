"""Reading what people have: folders of safetensors, GGUF files, packed integers, LoRA adapters.

Importing this package imports neither torch nor transformers; its functions do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.source import hash_checkpoint

if TYPE_CHECKING:
    from specexport.checkpoint.lengths import hold_length
    from specexport.checkpoint.load import count_layers, load_checkpoint, round_weights
    from specexport.checkpoint.lora_fit import low_ranks, merge_adapter, read_adapter, with_adapter

__all__ = [
    "Checkpoint",
    "count_layers",
    "hash_checkpoint",
    "hold_length",
    "load_checkpoint",
    "low_ranks",
    "merge_adapter",
    "read_adapter",
    "round_weights",
    "with_adapter",
]

_MODULES = {
    "count_layers": "specexport.checkpoint.load",
    "hold_length": "specexport.checkpoint.lengths",
    "load_checkpoint": "specexport.checkpoint.load",
    "low_ranks": "specexport.checkpoint.lora_fit",
    "merge_adapter": "specexport.checkpoint.lora_fit",
    "read_adapter": "specexport.checkpoint.lora_fit",
    "round_weights": "specexport.checkpoint.load",
    "with_adapter": "specexport.checkpoint.lora_fit",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A function of a module that imports torch, on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

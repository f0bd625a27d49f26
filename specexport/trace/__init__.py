"""From a loaded model to an ONNX graph of a packed step, or a reason why there is none.

Importing this package imports neither torch nor transformers; its functions do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexport.trace.calibrate import activation_ranges, cache_ranges
    from specexport.trace.check import reference_logits, trace_checkpoint
    from specexport.trace.prune import choose_layers, drop_layers

__all__ = [
    "activation_ranges",
    "cache_ranges",
    "choose_layers",
    "drop_layers",
    "reference_logits",
    "trace_checkpoint",
]

_MODULES = {
    "activation_ranges": "specexport.trace.calibrate",
    "cache_ranges": "specexport.trace.calibrate",
    "choose_layers": "specexport.trace.prune",
    "drop_layers": "specexport.trace.prune",
    "reference_logits": "specexport.trace.check",
    "trace_checkpoint": "specexport.trace.check",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A function of a module that imports torch, on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

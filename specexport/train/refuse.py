"""Targets that no pruned draft can be made of."""

from typing import Any

from specexport_runtime.errors import UnsupportedModelError

HINT = "train a head instead: --kind eagle3 or mtp."


def refuse_pruning(model: Any, reason: str) -> UnsupportedModelError:
    """The error for such a target (returned, not raised)."""
    name = f"{getattr(model.config, 'model_type', '?')} ({type(model).__name__})"
    return UnsupportedModelError(f"no pruned draft can be made of {name}: {reason}.", HINT)

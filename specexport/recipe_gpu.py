"""The part of a recipe that only GPU backends read: architectures, lowering, and the step sizes an engine is built for.

Imports the error tree only.
"""

import re
from collections.abc import Iterable
from typing import Any

from specexport_runtime.errors import RecipeError

TENSORRT_BACKENDS = ("tensorrt", "tensorrt-rtx")
LOWERINGS = {"tensorrt": ("plugin", "native", "native-grouped"), "tensorrt-rtx": ("native", "native-grouped")}
"""Lowerings each backend can build; the first is what ``"auto"`` means."""

DEFAULT_MAX_NUM_SEQS = 8
DEFAULT_MAX_NUM_TOKENS = 512
_LIMITS = {"max_num_seqs": (1, 256), "max_num_tokens": (1, 8192)}
_SM = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.IGNORECASE)


def normalize_architectures(values: object) -> tuple[str, ...]:
    """GPU architectures as plain digits, each once: ``89``, ``"sm_89"`` and ``"8.9"`` are all ``"89"``.

    Raises:
        RecipeError: a value is no compute capability.
    """
    items: Iterable[Any] = values if isinstance(values, (list, tuple)) else [values]
    found = []
    for item in items:
        match = _SM.fullmatch(str(item))
        if match is None or isinstance(item, bool):
            raise RecipeError(f"sm {item!r} is not a compute capability.", "give one like 89 (8.9 and sm89 work too).")
        found.append(match[1] + match[2])
    return tuple(dict.fromkeys(found))


def check_gpu_options(recipe: Any) -> None:
    """Check the fields that only GPU backends read.

    Raises:
        RecipeError: one is given for a backend that would ignore it, or is out of its range.
    """
    if recipe.backend not in TENSORRT_BACKENDS:
        ignored = [name for name in ("sm", "max_num_seqs", "max_num_tokens", "gpu_memory_gb") if getattr(recipe, name)]
        ignored += ["lowering"] * (recipe.lowering != "auto")
        if ignored:
            raise RecipeError(
                f"{ignored[0]} is given, and backend {recipe.backend} fixes nothing of the kind when it builds.",
                f"leave {ignored[0]} out, or build with --backend tensorrt-rtx.",
            )
        return
    lowerings = LOWERINGS[recipe.backend]
    if recipe.lowering not in ("auto", *lowerings):
        raise RecipeError(
            f"lowering {recipe.lowering!r} cannot be built for backend {recipe.backend}.",
            f"use one of: auto, {', '.join(lowerings)}.",
        )
    for name, (low, high) in _LIMITS.items():
        value = getattr(recipe, name)
        if value is not None and not low <= value <= high:
            raise RecipeError(f"{name} is {value}, outside {low} to {high}.", f"give {name} in that range.")
    if recipe.gpu_memory_gb is not None and recipe.gpu_memory_gb <= 0:
        raise RecipeError(f"gpu_memory_gb is {recipe.gpu_memory_gb}.", "give the GPU's memory in GB, for example 24.")


def gpu_defaults(recipe: Any) -> dict[str, Any]:
    """Concrete values for what a GPU recipe left open; empty for other backends."""
    if recipe.backend not in TENSORRT_BACKENDS:
        return {}
    return {
        "lowering": LOWERINGS[recipe.backend][0] if recipe.lowering == "auto" else recipe.lowering,
        "max_num_seqs": recipe.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        "max_num_tokens": recipe.max_num_tokens or DEFAULT_MAX_NUM_TOKENS,
    }

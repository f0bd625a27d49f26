"""The GPU of this machine, as builds ask for it."""

import subprocess

from specexport.backends.base import ANY_ARCHITECTURE, PartRecipe
from specexport.host import query_gpus


def query_gpu_architecture() -> str | None:
    """Architecture of the first GPU of this machine, for example ``"89"``; None without one."""
    try:
        found = query_gpus("compute_cap")
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].replace(".", "") if found else None


def find_gpu_unchecked_reason(recipe: PartRecipe) -> str | None:
    """Why engines for a GPU cannot be compared with eager transformers here; None if they can."""
    present = query_gpu_architecture()
    if present is None:
        return f"not checked: {recipe.backend} engines run on a GPU only, and there is none here"
    if recipe.sm and present not in recipe.sm and ANY_ARCHITECTURE not in recipe.sm:
        return f"not checked: no engine is for this machine's GPU (sm{present})"
    if recipe.max_num_seqs == 1:
        return "not checked: the check runs two sequences, the engine takes one"
    return None

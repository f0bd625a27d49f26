"""Packs a bundle's weights into this machine's cache while it is built, so that the first load finds them there."""

import logging
from pathlib import Path

from specexport.host import memory_bytes

_log = logging.getLogger(__name__)
_SESSIONS = 2.5
"""Memory that packing takes, in the size of the weights: ONNX Runtime holds them as they are and packed, and more."""


def prepack_bundle(folder: Path) -> None:
    """Open each engine that runs on this machine's CPU once, as its first load would.

    That checks and remembers the bundle's hashes, and fills ``prepacked`` in the user's cache. Engines of a GPU, small
    ones, those that this machine has no memory to pack, and a cache that cannot be used are left alone. A bundle stands
    without it, so what goes wrong is a warning.

    Args:
        folder: the bundle.
    """
    from specexport_runtime.bundle.opened import load_bundle
    from specexport_runtime.errors import SpecexportError
    from specexport_runtime.executors.open import backend_of, open_executor
    from specexport_runtime.executors.prepacked import MIN_WEIGHT_BYTES, is_enabled

    try:
        bundle = load_bundle(folder, max_num_seqs=1)
        for role, entry in bundle.manifest.models.items():
            backend = backend_of(entry.backend)
            beside = Path(entry.path).parent
            weights = [file.size for name, file in bundle.manifest.files.items() if Path(name).parent == beside]
            if not is_enabled() or backend is None or backend.on_gpu or sum(weights) < MIN_WEIGHT_BYTES:
                continue
            if (obstacle := _too_large(sum(weights))) is not None:
                _log.warning("%s: the %s's weights are not packed now: %s.", folder, role, obstacle)
            else:
                open_executor(bundle, role, spin=False).close()
    except (SpecexportError, OSError) as error:
        _log.warning("%s: its weights could not be packed for this machine (%s); the first load does.", folder, error)


def _too_large(num_bytes: int) -> str | None:
    """Why weights of this size are not packed here; None if there is memory for it."""
    _, available, limit = memory_bytes()
    free = min(available, limit or available)
    if not free or num_bytes * _SESSIONS <= free:
        return None
    return f"that takes {num_bytes * _SESSIONS / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"

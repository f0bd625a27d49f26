"""Packs a bundle's weights into this machine's cache while it is built, so that the first load finds them there."""

import logging
from pathlib import Path

_log = logging.getLogger(__name__)


def prepack_bundle(folder: Path) -> None:
    """Open each engine that runs on this machine's CPU once, as its first load would.

    That checks and remembers the bundle's hashes, and fills ``prepacked`` in the user's cache. Engines of a GPU, small
    ones and a cache that cannot be used are left alone. A bundle stands without it, so what goes wrong is a warning.

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
            if is_enabled() and backend is not None and not backend.on_gpu and sum(weights) >= MIN_WEIGHT_BYTES:
                open_executor(bundle, role, spin=False).close()
    except (SpecexportError, OSError) as error:
        _log.warning("%s: its weights could not be packed for this machine (%s); the first load does.", folder, error)

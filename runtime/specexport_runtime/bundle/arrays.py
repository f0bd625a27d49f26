"""Arrays that lie beside an engine."""

from pathlib import Path
from typing import Any

import numpy as np

from specexport_runtime.errors import BundleError

REBUILD = "build it again with `specexport build`."


def read_array(path: Path) -> Any:
    """What an ``.npy`` file holds, unchecked; BundleError if it cannot be read or holds pickles."""
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BundleError(f"{path} cannot be read ({error}).", REBUILD) from error

"""What a parallel draft head is fed in the place of tokens that nobody knows yet: one token id, and one feature."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.arrays import REBUILD, read_array
from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.errors import BundleError

MASK_NAME = "mask_feature.npy"
"""File in the head's folder: float32 [E]."""


class MaskInput(NamedTuple):
    """The stand-in for a token that is not known.

    Attributes:
        token: its id.
        feature: what comes with it, float32 [E].
    """

    token: int
    feature: npt.NDArray[np.float32]


def load_mask(folder: Path, entry: ModelEntry) -> MaskInput | None:
    """The stand-in of a head; None for one that drafts token after token.

    Args:
        folder: what the entry's paths are relative to.
        entry: the head's manifest entry.

    Raises:
        BundleError: the file is no feature of the head's size, or the token is none of its vocabulary.
    """
    if entry.mask_token_id is None or entry.mask_path is None:
        return None
    path = folder / entry.mask_path
    feature = read_array(path)
    sound = isinstance(feature, np.ndarray) and feature.dtype == np.float32 and feature.shape == (entry.feature_size,)
    if not sound or not np.isfinite(feature).all() or entry.mask_token_id >= entry.vocab_size:
        raise BundleError(
            f"{path}: it is no feature of {entry.feature_size} numbers, or its token is unknown.", REBUILD
        )
    return MaskInput(entry.mask_token_id, feature)

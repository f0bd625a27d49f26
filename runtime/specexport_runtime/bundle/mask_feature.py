"""What a parallel draft head is fed in the place of tokens that are not known yet: one token id, and one feature."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.arrays import REBUILD, read_array
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import BundleError

MASK_NAME = "mask_feature.npy"
"""File in the head's folder: float32 [E]."""


class MaskInput(NamedTuple):
    """The stand-in for a token that is not known."""

    token: int  # its id
    feature: npt.NDArray[np.float32]  # [E], what comes with it
    # Of a head that fills blocks (DFlash): most tokens of a block, the newest and those to guess. None for a head whose
    # entries all have a token and a feature (P-EAGLE).
    block_size: int | None = None

    @property
    def most(self) -> int | None:
        """Most tokens that a step can draft; None for no limit."""
        return None if self.block_size is None else self.block_size - 1


def load_mask(folder: Path, entry: ModelEntry) -> MaskInput | None:
    """The stand-in of a head; None for one that drafts token after token.

    The entry's paths are relative to ``folder``. BundleError if the file is no feature of the head's size, or the token
    is not in its vocabulary.
    """
    head, size = entry.draft_head, entry.engine.feature_size
    if head is None or head.mask_token_id is None:
        return None
    token = head.mask_token_id
    if head.block_size is not None and token < entry.vocab_size:
        return MaskInput(token, np.zeros(size, np.float32), head.block_size)
    if head.mask_path is None:
        raise BundleError(f"{folder}: token {token} stands for unknown ones without a feature.", REBUILD)
    path = folder / head.mask_path
    feature = read_array(path)
    sound = isinstance(feature, np.ndarray) and feature.dtype == np.float32 and feature.shape == (size,)
    if not sound or not np.isfinite(feature).all() or token >= entry.vocab_size:
        raise BundleError(f"{path}: it is no feature of {size} numbers, or its token is unknown.", REBUILD)
    return MaskInput(token, feature)

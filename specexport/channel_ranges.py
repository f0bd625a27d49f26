"""What was measured of a model on texts: of a linear layer's inputs, and of what attention keeps."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatVector = npt.NDArray[np.float32]
MASSIVE = 3.0
"""First tokens over all others. SmolLM2-135M has 195, 41 and 5 before three ``down_proj``, and 2.2 before the next."""


class ChannelRanges(NamedTuple):
    """Of each input channel, over some texts."""

    largest: FloatVector  # largest magnitude, float32 [K], without the first token of each text
    first: FloatVector  # largest magnitude at the first tokens, float32 [K]
    squares: FloatVector  # mean square over all tokens, float32 [K]

    @property
    def massive(self) -> bool:
        """Whether a first token is out of all proportion here ("massive activations", Sun et al. 2024).

        Attention of all later tokens rests on that token, by way of a few channels thousands of times as large as
        usual. An error of a weight that they meet is as many times as large as usual.
        """
        return bool(self.first.max() > MASSIVE * self.largest.max())


class CacheRange(NamedTuple):
    """How large the entries of a layer's caches get."""

    keys: FloatVector  # largest magnitude of each channel, after rotation; float32 [H * D]
    values: FloatVector  # the same of the values

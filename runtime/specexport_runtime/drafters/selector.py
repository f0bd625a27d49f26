"""A selector over the likeliest tokens of each place of a block, by the token in front of it (DFlash 2).

The score of token b at place t is its logit plus ``sum_r A[x]_r (W h_t)_r C[b]_r``, x being the token in front, h_t the
place's hidden state. Scores are of a place's few likeliest tokens; the others are never drafted.
"""

from collections.abc import Sequence

import numpy as np

from specexport_runtime.bundle.arrays import CorrectionTables
from specexport_runtime.sampling.distribution import Float32Array
from specexport_runtime.sampling.truncation import check_peak, top_k_indices


class Selector:
    """The tables: ``predecessors`` A [V, r] by token id, ``successors`` C [N, r] by logit row, ``projection`` W [r, E].

    ``most`` is how many tokens of a place have a score.
    """

    def __init__(self, tables: CorrectionTables) -> None:
        self.predecessors, self.successors = tables.arrays["predecessors"], tables.arrays["successors"]
        self.projection, self.most = tables.arrays["projection"], tables.most

    def begin(self, logits: Float32Array, states: Float32Array, newest: int) -> "_Selection":
        """See ``Corrector.begin``."""
        return _Selection(self, logits, states @ self.projection.T, newest)


class _Selection:
    """One draft; ``queries`` [K, r] are the places' hidden states, projected."""

    def __init__(self, selector: Selector, logits: Float32Array, queries: Float32Array, newest: int) -> None:
        self._selector, self._logits, self._queries, self._newest = selector, logits, queries, newest

    def logits(self, drafted: Sequence[int]) -> Float32Array:
        """See ``Correction.logits``."""
        selector, place = self._selector, len(drafted)
        row, before = self._logits[place], drafted[-1] if drafted else self._newest
        check_peak(float(row.max()), row)
        best = top_k_indices(row, selector.most) if selector.most < len(row) else np.arange(len(row))
        table = selector.predecessors
        pair = table[before if before < len(table) else 0] * self._queries[place]
        found = np.full(len(row), -np.inf, np.float32)
        found[best] = row[best] + selector.successors[best] @ pair
        return found

    def confidence(self, drafted: Sequence[int]) -> float | None:  # noqa: ARG002
        """None: a selector has no estimate."""
        return None

"""A Markov head: the logits of each place of a block, corrected by the token in front of it (DSpark).

With w = W1[x] of the token x in front of a place and h the place's hidden state, what is added to its logits is

- vanilla: ``W2 w``
- gated: ``W2 (sigmoid(G [h; w]) * w)``
- rnn: ``W2 tanh(o)`` with ``(g, c, o) = J [s; w; h]``, and then ``s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``; s = 0
  in front of the first place.

W2 has a row for each token, so the product with it, one a place, reads far more memory than all else here. It is not
taken of several places at once for guessed tokens in front: of seven it costs three times as much as of one.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from specexport_runtime.bundle.arrays import CorrectionTables
from specexport_runtime.sampling.distribution import Float32Array
from specexport_runtime.sampling.truncation import check_peak


class Markov:
    """The tables ``w1`` [V, r] and ``w2`` [N, r], and those of ``gate``, ``joint`` and ``confidence`` that there are.

    Each of these is a matrix, and beside it ``gate_bias``, ``joint_bias`` or ``confidence_bias``.
    """

    def __init__(self, tables: CorrectionTables) -> None:
        arrays = tables.arrays
        self.w1, self.w2 = arrays["w1"], arrays["w2"]
        self.gate, self.joint, self.confidence = (_linear(arrays, name) for name in ("gate", "joint", "confidence"))

    def begin(self, logits: Float32Array, states: Float32Array, newest: int) -> "_Walk":
        """See ``Corrector.begin``."""
        return _Walk(self, logits, states, newest)


class _Walk:
    """One draft, and what a head of type rnn remembers in front of each place that was looked at."""

    def __init__(self, markov: Markov, logits: Float32Array, states: Float32Array, newest: int) -> None:
        self._markov, self._logits, self._states, self._newest = markov, logits, states, newest
        self._before: list[int] = []  # the tokens in front of these places
        self._memory = [np.zeros(markov.w1.shape[1], np.float32)]
        self._vectors: list[Float32Array] = []  # what W2 is multiplied with

    def logits(self, drafted: Sequence[int]) -> Float32Array:
        """See ``Correction.logits``."""
        known, row = [self._newest, *drafted], self._logits[len(drafted)]
        check_peak(float(row.max()), row)
        same = next((at for at, pair in enumerate(zip(self._before, known, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            del self._before[same:], self._memory[same + 1 :], self._vectors[same:]
        for token in known[len(self._before) :]:
            self._advance(token)
        corrected: Float32Array = row + self._markov.w2[: len(row)] @ self._vectors[len(drafted)]
        return corrected

    def confidence(self, drafted: Sequence[int]) -> float | None:
        """See ``Correction.confidence``: it reads the place's hidden state, and the token in front as the head does."""
        linear = self._markov.confidence
        if linear is None:
            return None
        state = self._states[len(drafted)]
        matrix, _ = linear
        if matrix.shape[1] > len(state):
            state = np.concatenate([state, self._embedded(drafted[-1] if drafted else self._newest)])
        return float(_sigmoid(_apply(linear, state))[0])

    def _advance(self, token: int) -> None:
        """Look at the next place, with ``token`` in front of it."""
        markov, state, memory = self._markov, self._states[len(self._before)], self._memory[-1]
        vector = own = self._embedded(token)
        if markov.gate is not None:
            vector = _sigmoid(_apply(markov.gate, np.concatenate([state, own]))) * own
        if markov.joint is not None:
            keep, new, out = np.split(_apply(markov.joint, np.concatenate([memory, own, state])), 3)
            keep, vector = _sigmoid(keep), np.tanh(out)
            memory = keep * memory + (1 - keep) * np.tanh(new)
        self._before.append(token)
        self._memory.append(memory)
        self._vectors.append(vector)

    def _embedded(self, token: int) -> Float32Array:
        table = self._markov.w1
        row: Float32Array = table[token if token < len(table) else 0]
        return row


_Linear = tuple[Float32Array, Float32Array | None]


def _linear(arrays: Mapping[str, Float32Array], name: str) -> _Linear | None:
    return (arrays[name], arrays.get(f"{name}_bias")) if name in arrays else None


def _apply(linear: _Linear, given: Float32Array) -> Float32Array:
    matrix, bias = linear
    product: Float32Array = matrix @ given
    return product if bias is None else product + bias


def _sigmoid(values: Float32Array) -> Float32Array:
    found: Float32Array = 0.5 * (1.0 + np.tanh(0.5 * values))
    return found

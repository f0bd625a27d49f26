"""A Markov head: the logits of each place of a block, corrected by the token in front of it (DSpark).

With w = W1[x] of the token x in front of a place and h the place's hidden state, what is added to its logits is

- vanilla: ``W2 w``
- gated: ``W2 (sigmoid(G [h; w]) * w)``
- rnn: ``W2 tanh(o)`` with ``(g, c, o) = J [s; w; h]``, and then ``s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``; s = 0
  in front of the first place.

W2 has a row for each token, so the product with it reads far more memory than all else here. It is taken of all places
at once, as if each token in front were the likeliest one that is known so far, and again from the first place on where
that was another one. So a draft takes one product, and one more for each wrong guess, instead of one a place. What
comes of it does not depend on the guesses.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from specexport_runtime.bundle.arrays import CorrectionTables
from specexport_runtime.sampling.distribution import Float32Array
from specexport_runtime.sampling.truncation import check_peak


class Markov:
    """The tables ``w1`` [V, r] and ``w2`` [N, r], and those of ``gate``, ``joint`` and ``confidence`` that there are.

    Each of these is a matrix, and beside it ``gate_bias``, ``joint_bias`` or ``confidence_bias``. ``ids`` [N] are the
    token ids of the logits' rows; None where a row is its token's id.
    """

    def __init__(self, tables: CorrectionTables, ids: "np.ndarray | None" = None) -> None:
        arrays = tables.arrays
        self.w1, self.w2, self.ids = arrays["w1"], np.ascontiguousarray(arrays["w2"]), ids
        self.gate, self.joint, self.confidence = (_linear(arrays, name) for name in ("gate", "joint", "confidence"))

    def begin(self, logits: Float32Array, states: Float32Array, newest: int) -> "_Walk":
        """See ``Corrector.begin``."""
        return _Walk(self, logits, states, newest)


class _Walk:
    """One draft: which token stands in front of each place, known or guessed, and what follows of it."""

    def __init__(self, markov: Markov, logits: Float32Array, states: Float32Array, newest: int) -> None:
        self._markov, self._logits, self._states, self._newest = markov, logits, states, newest
        count, self._rank = len(logits), markov.w1.shape[1]
        self._guesses: list[int] = []  # the likeliest token of each place
        self._before = [-1] * count  # the token in front of each place that what is below follows from
        self._corrected = np.empty_like(logits)
        self._memory = np.zeros((count + 1, self._rank), np.float32)  # s in front of each place

    def logits(self, drafted: Sequence[int]) -> Float32Array:
        """See ``Correction.logits``."""
        place, known = len(drafted), [self._newest, *drafted]
        if not self._guesses:
            check_peak(float(self._logits.max()), self._logits.ravel())
            self._guesses = self._likeliest(self._logits)
        for at in range(place + 1):
            if self._before[at] != known[at]:
                self._follow(at, known)
                break
        row: Float32Array = self._corrected[place]
        return row

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

    def _follow(self, first: int, known: Sequence[int]) -> None:
        """Correct the places from ``first`` on; behind the ``known`` tokens, as if the guessed ones came."""
        whole = [*known, *self._guesses[len(known) - 1 : -1]]
        vectors = np.stack([self._vector(place, whole[place]) for place in range(first, len(whole))])
        self._before[first:] = whole[first:]
        np.matmul(vectors, self._markov.w2[: self._logits.shape[1]].T, out=self._corrected[first:])
        self._corrected[first:] += self._logits[first:]
        self._guesses[first:] = self._likeliest(self._corrected[first:])

    def _vector(self, place: int, before: int) -> Float32Array:
        """What W2 is multiplied with [r], for the token in front of a place."""
        markov, state, own = self._markov, self._states[place], self._embedded(before)
        if markov.gate is not None:
            return _sigmoid(_apply(markov.gate, np.concatenate([state, own]))) * own
        if markov.joint is not None:
            memory = self._memory[place]
            keep, new, out = np.split(_apply(markov.joint, np.concatenate([memory, own, state])), 3)
            keep = _sigmoid(keep)
            self._memory[place + 1] = keep * memory + (1 - keep) * np.tanh(new)
            found: Float32Array = np.tanh(out)
            return found
        return own

    def _embedded(self, token: int) -> Float32Array:
        table = self._markov.w1
        row: Float32Array = table[token if token < len(table) else 0]
        return row

    def _likeliest(self, logits: Float32Array) -> list[int]:
        rows, ids = logits.argmax(axis=1), self._markov.ids
        found: list[int] = (rows if ids is None else ids[rows]).tolist()
        return found


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

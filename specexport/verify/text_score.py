"""What a model makes of a text, token by token, alone and beside another model.

The loss says how likely the text is. The divergence says how far the next-token distributions are from the other
model's, whatever comes next: it is a sum over far more than one token a place, and so much more certain.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.bundle.cut_head import CutHead
from specexport_runtime.executors.base import Float32Array, Int32Array

NUM_LIKELIEST = 64
"""Tokens of each distribution that are kept to compare with; all others count as one. What that hides of a divergence
is never negative, and little: these hold nearly all of a trained model's probability."""


class Likeliest(NamedTuple):
    """A model's likeliest next tokens at each of n places."""

    ids: Int32Array  # [n, k], the likeliest first
    logs: Float32Array  # [n, k], logarithms of their probabilities


class TextScore(NamedTuple):
    """What a model makes of a text."""

    loss: float  # mean of -ln p(token | tokens before it), in nats
    likeliest: Likeliest | None = None  # its distributions, to compare others with; None if it was compared itself
    # mean Kullback-Leibler divergence from the other model's, in nats; None if not compared
    divergence: float | None = None
    agreement: float | None = None  # share of the places where both have the same likeliest token; None if not compared


class TextScorer:
    """Adds up a score, a step's logits at a time.

    With ``head``, an LM head that was cut, distributions are over its tokens, and places where another token comes are
    left out. ``reference`` holds the other model's distributions at the same places; None keeps this one's.
    """

    def __init__(self, head: CutHead | None = None, reference: Likeliest | None = None) -> None:
        self._head, self._reference = head, reference
        self._loss, self._divergence, self._agreed, self._count = 0.0, 0.0, 0, 0
        self._kept: list[tuple[npt.NDArray[np.int32], Float32Array]] = []

    def add(self, logits: Float32Array, tokens: Seq[int]) -> None:
        """Read n places: logits [n, V], or [n, N] from an engine with a cut head, and the n tokens that came."""
        for row, token in zip(logits, tokens, strict=True):
            if self._head is None:
                self._read(row, token)
            elif token in self._head.ids:
                own = row if len(row) == len(self._head.ids) else row[self._head.ids]
                self._read(own, int(self._head.ids.searchsorted(token)))

    def _read(self, row: Float32Array, token: int) -> None:
        wide = row.astype(np.float64)
        highest = wide.max()
        logs = wide - (highest + np.log(np.exp(wide - highest).sum()))
        self._loss -= float(logs[token])
        if self._reference is None:
            size = min(NUM_LIKELIEST, len(logs))
            ids = np.argpartition(logs, len(logs) - size)[-size:]
            ids = ids[np.argsort(-logs[ids], kind="stable")]
            self._kept.append((ids.astype(np.int32), logs[ids].astype(np.float32)))
        else:
            ids, theirs = self._reference.ids[self._count], self._reference.logs[self._count].astype(np.float64)
            self._divergence += _divergence(theirs, logs[ids])
            self._agreed += int(logs.argmax() == ids[0])
        self._count += 1

    def result(self) -> TextScore:
        """The score of all places so far; there must be one."""
        loss = self._loss / self._count
        if self._reference is not None:
            return TextScore(loss, None, self._divergence / self._count, self._agreed / self._count)
        ids, logs = zip(*self._kept, strict=True)
        return TextScore(loss, Likeliest(np.stack(ids), np.stack(logs)))


def _divergence(theirs: npt.NDArray[np.float64], ours: npt.NDArray[np.float64]) -> float:
    """Of two distributions over some tokens, by logarithms, with all other tokens as one."""
    likely = np.exp(theirs)
    rest, our_rest = (max(1.0 - float(np.exp(logs).sum()), 1e-12) for logs in (theirs, ours))
    return float(likely @ (theirs - ours)) + rest * float(np.log(rest / our_rest))

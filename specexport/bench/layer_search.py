"""Which layers drafts should leave out: greedy removal, then changes of single parts and whole layers.

Draft & Verify (Zhang et al. 2024) looks for such a choice with a Bayesian search of 1,000 trials. A choice is judged
here by reading texts once, and those of one family are close to their neighbours, so a few hundred readings find one:

- first the starts: early exits (the first layers of all: LayerSkip, Elhoushi et al. 2024), and what others propose;
- then parts are removed one at a time, each time the one that costs the least speed; few are tried again each time,
  those that cost least when they were tried last;
- then the best of all is changed, a part or a layer at a time, for as long as that helps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specexport.bench.layer_costs import LayerPromise
from specexport_runtime.executors.base import BoolArray

Judge = Callable[[Sequence[BoolArray]], list[LayerPromise]]
"""What choices promise, each a mask [2N] of the parts that are on."""

_TRIED = 4  # of the parts that may go next, in each step
_PATIENCE = 1 / 4  # of all parts, that are removed without a better choice
_BETTER = 1.001  # what counts as better, of the speed before
_ROUNDS = 3  # of changes at most


class LayerSelection(NamedTuple):
    """A choice of layers."""

    mask: BoolArray  # [2N], the parts that are on
    promise: LayerPromise


class LayerSearch:
    """One search over the parts of a target; ``kinds`` [2N] are what they are, empty where a layer has none."""

    def __init__(self, kinds: Sequence[str], judge: Judge) -> None:
        self._gates = [gate for gate, kind in enumerate(kinds) if kind]
        self._all: BoolArray = np.array([bool(kind) for kind in kinds])
        self._judge = judge
        self._known: dict[bytes, LayerSelection] = {}

    @property
    def num_tried(self) -> int:
        """Choices that were judged."""
        return len(self._known)

    def run(self, proposed: Sequence[BoolArray] = ()) -> LayerSelection:
        """The best choice that was found; ``proposed`` ones are among those judged."""
        self.best([*proposed, *self.exits()])
        self._remove()
        self._change()
        return self._best

    def exits(self) -> Iterator[BoolArray]:
        """Drafts of the first layers alone."""
        for kept in range(2, len(self._all), 2):
            mask = self._all.copy()
            mask[kept:] = False
            yield mask

    def best(self, masks: Iterable[BoolArray]) -> LayerSelection | None:
        """The best of some choices that keep something; None if none does."""
        fitting = [mask for mask in masks if mask.any()]
        new = {mask.tobytes(): mask for mask in fitting if mask.tobytes() not in self._known}
        for (key, mask), promise in zip(new.items(), self._judge(list(new.values())), strict=True):
            self._known[key] = LayerSelection(mask, promise)
        found = (self._known[mask.tobytes()] for mask in fitting)
        return max(found, key=lambda each: each.promise.speedup, default=None)

    @property
    def _best(self) -> LayerSelection:
        """The best choice that leaves something out."""
        choices = (found for found in self._known.values() if not found.mask[self._gates].all())
        return max(choices, key=lambda found: found.promise.speedup)

    def _remove(self) -> None:
        """Remove part after part from the whole target, until nothing better has come for a while."""
        mask, left, waited = self._all, list(self._gates), 0
        self.best([mask, *(_changed(mask, (gate,)) for gate in left)])
        kept = {gate: self._share(mask, gate) for gate in left}  # of the speed, when it was last tried
        while len(left) > 1 and waited < 1 + _PATIENCE * len(self._gates):
            before = self._best.promise.speedup
            tried = sorted(left, key=lambda gate: -kept[gate])[:_TRIED]
            found = self.best(_changed(mask, (gate,)) for gate in tried)
            if found is None:
                break
            kept |= {gate: self._share(mask, gate) for gate in tried}
            mask = found.mask
            left = [gate for gate in left if mask[gate]]
            waited = 0 if found.promise.speedup > before else waited + 1

    def _change(self) -> None:
        """Change the best choice by one part or layer, for as long as that makes it better."""
        pairs = [(gate, gate + 1) for gate in range(0, len(self._all), 2) if self._all[gate] and self._all[gate + 1]]
        changes = [*((gate,) for gate in self._gates), *pairs]
        for _ in range(_ROUNDS):
            before = self._best.promise.speedup
            for at in range(0, len(changes), _TRIED):
                mask = self._best.mask
                self.best(_changed(mask, change) for change in changes[at : at + _TRIED])
            if self._best.promise.speedup < before * _BETTER:
                break

    def _share(self, mask: BoolArray, gate: int) -> float:
        """What is left of the speed of ``mask`` without a part of it; both were judged."""
        after, before = (self._known[each.tobytes()].promise.speedup for each in (_changed(mask, (gate,)), mask))
        return after / before


def _changed(mask: BoolArray, gates: Sequence[int]) -> BoolArray:
    changed = mask.copy()
    changed[list(gates)] ^= True
    return changed

"""What a draft head would draw from after a context and any path: ``LogitTree`` for models that read features."""

import numpy as np

from specexport.verify.logit_tree import LogitTree, Path
from specexport_runtime.bundle.cut_head import CutHead
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor, Float32Array, as_featured, as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork


class HeadTree(LogitTree):
    """Logits of a head after ``context`` and a path that it drafted itself.

    Args:
        target: the target's engine, whose features of the context are true ones. Its cache row 0 is used.
        head: the head's. Cache row 0 belongs to the tree until its last new path.
        context: token ids, at least two.
        vocab_size: ids below it have a logit; None takes the head's.
        lm_head: the token ids of the head's LM head, if that was cut.
    """

    def __init__(
        self,
        target: Executor,
        head: Executor,
        context: list[int],
        *,
        vocab_size: int | None = None,
        lm_head: CutHead | None = None,
    ) -> None:
        self._runner = ModelRunner(head)
        self._known = head.vocab_size if lm_head is None else lm_head.vocab_size
        self.vocab_size = vocab_size or self._known
        self._head = lm_head
        self._rows: dict[Path, Float32Array] = {}
        features = _features(target, context[:-1])
        fed = self._stand_in(context[1:])
        self._runner.prefill(0, fed[:-1], features[:-1])
        self._last, self._feature = fed[-1:], features[-1:]
        self._start = len(fed) - 1

    def __call__(self, path: Path) -> Float32Array:
        """Logits [V'] of the token after the context and ``path``."""
        row = self._rows.get(path)
        if row is None:
            logits = self._roll_out(path)
            whole = logits if self._head is None else self._head.widen(logits)
            row = self._rows[path] = whole[: self.vocab_size].copy()
        return row

    def _roll_out(self, path: Path) -> Float32Array:
        """One step for each token, each fed what the one before handed on; then all of them are forgotten."""
        executor = as_head(self._runner.executor)
        if executor is None:
            raise SpecexportError("a head tree needs the engine of a draft head.")
        tokens, feature = self._last, self._feature
        logits = np.empty(0, np.float32)
        try:
            for token in (*self._stand_in(path), None):
                logits = self._runner.step(0, [RowWork(tokens, 1, feature)])[0].copy()
                self._runner.kv.commit(0, self._runner.kv.kv_len(0) + 1)
                if token is not None:
                    tokens, feature = [token], executor.next_features.copy()
        finally:
            self._runner.kv.commit(0, self._start)
        return logits


def _features(target: Executor, tokens: list[int]) -> Float32Array:
    """Features [n, E] of a text."""
    featured = as_featured(target)
    if featured is None:
        raise SpecexportError("a head tree needs a target that gives features.")
    runner = ModelRunner(target)
    featured.want_features(True)
    try:
        runner.step(0, [RowWork(tokens, 1)])
        return featured.features.copy()
    finally:
        featured.want_features(False)

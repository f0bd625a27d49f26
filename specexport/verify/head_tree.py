"""What a draft head would draw from after a context and any path: ``LogitTree`` for models that read features."""

from collections.abc import Sequence as Seq

import numpy as np

from specexport.verify.logit_tree import LogitTree, Path
from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.bundle.cut_head import CutHead
from specexport_runtime.bundle.mask_feature import MaskInput
from specexport_runtime.drafters.at_once import draft_work, entry_tokens
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor, Float32Array, as_featured, as_head
from specexport_runtime.packing.batch import ModelRunner, RowWork


class HeadTree(LogitTree):
    """Logits of a head after ``context`` and a path that it drafted itself."""

    def __init__(
        self,
        target: Executor,  # gives true features of the context; its cache row 0 is used
        head: Executor,  # its cache row 0 belongs to the tree until its last new path
        context: Seq[int],  # token ids, at least two
        *,
        vocab_size: int | None = None,  # ids below it have a logit; None takes the head's
        lm_head: CutHead | None = None,  # the token ids of the head's LM head, if that was cut
        # of a head that drafts all tokens in one step: what it reads for unknown tokens; its logits of a place then do
        # not depend on the path
        mask: MaskInput | None = None,
        places: int = 1,  # tokens that such a head drafts in one step
    ) -> None:
        self._target, self._mask = target, mask
        own = as_head(head)
        self._num_heads = 0 if own is None else own.num_draft_heads
        self._reads_draft = own is not None and own.reads_draft
        self._places = places if mask is None or mask.most is None else min(places, mask.most)
        self._at_once: Float32Array | None = None
        super().__init__(head, context, vocab_size=vocab_size, head=lm_head)

    def _begin(self, context: Seq[int]) -> None:
        features = _features(self._target, context[:-1])
        fed = entry_tokens(self._stand_in(context[1:]), self._mask)
        if self._reads_draft:
            fed = [*[CONTEXT_ID] * (len(fed) - 1), *fed[-1:]]
        if not self._num_heads or self._reads_draft:
            self._runner.prefill(0, fed[:-1], features[:-1])
        self._last, self._feature, self._newest = fed[-1:], features[-1:], self._stand_in(context[-1:])[0]

    def _logits(self, path: Path) -> Float32Array:
        """What the head gives behind a path; of a parallel one, the logits of its place, in rounds of whole drafts."""
        if self._reads_draft:
            return self._continue(path)
        if self._num_heads:
            return self._guess(path)
        if self._mask is None:
            return self._follow(path)
        if self._at_once is None:
            work = draft_work(self._last, self._feature, self._newest, self._places, self._mask).work
            self._at_once = np.array(self._runner.step(0, [work]))
        place: Float32Array = self._at_once[len(path) % self._places]
        return place

    def _follow(self, path: Path) -> Float32Array:
        """One step for each token, each fed what the one before handed on; then all of them are forgotten."""
        executor = as_head(self._runner.executor)
        if executor is None:
            raise SpecexportError("a head tree needs the engine of a draft head.")
        tokens, feature, start = self._last, self._feature, self._runner.kv.kv_len(0)
        logits = np.empty(0, np.float32)
        try:
            for token in (*self._stand_in(path), None):
                logits = self._runner.step(0, [RowWork(tokens, 1, feature)])[0].copy()
                self._runner.kv.commit(0, self._runner.kv.kv_len(0) + 1)
                if token is not None:
                    tokens, feature = [token], executor.next_features.copy()
        finally:
            self._runner.kv.commit(0, start)
        return logits

    def _continue(self, path: Path) -> Float32Array:
        """What the Hydra head of a place says of the path to it; behind the last head, that of its last tokens."""
        executor = as_head(self._runner.executor)
        if executor is None:
            raise SpecexportError("a head tree needs the engine of a draft head.")
        logits: Float32Array = self._runner.step(0, [RowWork(self._last, 1, self._feature)])[0].copy()
        if path:
            state, tokens = executor.next_features.copy(), [self._newest, *self._stand_in(path)][-self._num_heads :]
            logits = self._runner.step(0, [RowWork(tokens, 1, np.tile(state, (len(tokens), 1)))])[0].copy()
        return logits

    def _guess(self, path: Path) -> Float32Array:
        """What a Medusa head says of its place, whatever the tokens before it; behind the last head, that one's."""
        number = min(len(path), self._num_heads - 1)
        logits: Float32Array = self._runner.step(0, [RowWork([number], 1, self._feature)])[0]
        return logits


def _features(target: Executor, tokens: Seq[int]) -> Float32Array:
    """Features [n, E] of a text. It writes what a tree of the target over the same context has in its row already."""
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

"""Exact next-token distributions after a context and any continuation of it, each logit row computed once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specexport_runtime.abi import CONTEXT_ID
from specexport_runtime.bundle.arrays import CutHead, MaskInput
from specexport_runtime.bundle.token_map import TokenMap
from specexport_runtime.drafters.at_once import make_entry_tokens, make_parallel_work
from specexport_runtime.drafters.correction import make_corrector
from specexport_runtime.drafters.in_turn import make_modules_work
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import Executor
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.sampling.distribution import Float32Array, Float64Array, HostDistribution
from specexport_runtime.sampling.sampler import Sampler

Path = tuple[int, ...]
"""Tokens after the context."""

Conditional = Callable[[Path], HostDistribution]
"""The distribution of the token after the context and a path."""

MIN_EXPECTED = 10.0
"""Least expected draws of a cell: Cochran's rule asks for 5, and more makes small p-values exact."""


class LogitTree:
    """Logits after ``context`` (token ids, at least one) and a path, from the engine.

    Cache row 0 belongs to the tree until its last new path: nothing else may run meanwhile. Ids below ``vocab_size``
    have a logit; None takes the engine's. ``cut_head`` holds the token ids of an LM head that was cut: the others have
    the logit -inf.
    """

    def __init__(
        self,
        executor: Executor,
        context: Sequence[int],
        *,
        vocab_size: int | None = None,
        cut_head: CutHead | None = None,
        token_map: TokenMap | None = None,  # of a draft with another vocabulary than the context's
    ) -> None:
        self._runner, self._map = ModelRunner(executor), token_map
        self._known = executor.vocab_size if cut_head is None else cut_head.vocab_size
        self.vocab_size = vocab_size or self._known
        self._cut_head = cut_head
        self._rows: dict[Path, Float32Array] = {}
        self._begin(context)

    def __call__(self, path: Path) -> Float32Array:
        """Logits [V'] of the token after the context and ``path``."""
        row = self._rows.get(path)
        if row is None:
            logits = self._logits(path)
            whole = logits if self._cut_head is None else self._cut_head.widen(logits)
            row = self._rows[path] = whole[: self.vocab_size].copy()
        return row

    def _begin(self, context: Sequence[int]) -> None:
        """Read the context, all but its last token."""
        lead = [] if self._map is None else self._map.get_lead(context)
        *self._before, last = lead + self._to_draft_tokens(context)
        self._last = [last]
        self._runner.prefill(0, self._before)

    def _logits(self, path: Path) -> Float32Array:
        """What the engine gives after ``path``. Nothing is committed, so every path starts at the context."""
        tokens = self._last + self._to_draft_tokens(path)
        pending = self._runner.executor.num_pending
        extra = max(0, len(tokens) - pending) if pending else 0
        if extra:  # more than may wait beside a state: these enter it, and the context is read again afterwards
            self._runner.prefill(0, tokens[:extra])
        logits: Float32Array = self._runner.step(0, [RowWork(tokens[extra:], 1, drafts=len(tokens) - extra)])[0]
        if extra:
            logits = logits.copy()
            self._runner.release_row(0)
            self._runner.prefill(0, self._before)
        return logits

    def _to_draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        if self._map is not None:
            return self._map.spell(tokens)[0]
        # A draft cannot embed padding ids of a larger target: any stand-in keeps the drafts lossless.
        return [token if token < self._known else 0 for token in tokens]


def make_conditional(tree: LogitTree, sampler: Sampler) -> Conditional:
    """The processed distributions of a tree; the sampler's committed tokens are the tree's context."""
    known: dict[Path, HostDistribution] = {}

    def distribution(path: Path) -> HostDistribution:
        found = known.get(path)
        if found is None:
            found = known[path] = sampler.distribution(tree(path), path)
        return found

    return distribution


class _Node(NamedTuple):
    distribution: HostDistribution
    children: dict[int, int | None]
    """Own cell of each token that has one; None where the token leads to a node."""
    rest: int | None
    """Cell of the other possible tokens."""


IMPOSSIBLE = -1
"""Cell number of an outcome that has probability 0."""


class Partition:
    """Continuations of ``depth`` tokens, grouped into cells of exact probability large enough for a chi-square test.

    The cells depend on the distribution alone, never on what was drawn. A token with enough mass for ``num_samples``
    draws is followed into the next position; the others of its position share a cell; small cells are joined at the
    end.
    """

    def __init__(self, target: Conditional, depth: int, num_samples: int) -> None:
        self._target, self._depth = target, depth
        self._min_mass = MIN_EXPECTED / num_samples
        self._nodes: dict[Path, _Node] = {}
        self._masses: list[float] = []
        self._expand((), 1.0)
        self._joined = self._join_small()
        masses = np.bincount(self._joined, weights=self._masses).astype(np.float64)
        self.probabilities: Float64Array = masses / masses.sum()

    def _new_cell(self, mass: float) -> int:
        self._masses.append(mass)
        return len(self._masses) - 1

    def _expand(self, path: Path, mass: float) -> None:
        distribution = self._target(path)
        masses = mass * distribution.probs
        heavy = np.flatnonzero(masses >= self._min_mass)
        children: dict[int, int | None] = {}
        for index in heavy:
            token = int(index if distribution.token_ids is None else distribution.token_ids[index])
            if len(path) + 1 < self._depth:
                children[token] = None
                self._expand((*path, token), float(masses[index]))
            else:
                children[token] = self._new_cell(float(masses[index]))
        rest = mass - float(masses[heavy].sum())
        possible = int(np.count_nonzero(distribution.probs)) > len(heavy)
        self._nodes[path] = _Node(distribution, children, self._new_cell(max(rest, 0.0)) if possible else None)

    def _join_small(self) -> list[int]:
        """New number of each cell: all small ones share one, with the smallest large one if they stay small."""
        order = sorted(range(len(self._masses)), key=self._masses.__getitem__)
        pooled, joined = 0.0, 0
        while joined < len(order) and (
            self._masses[order[joined]] < self._min_mass or (joined and pooled < self._min_mass)
        ):
            pooled += self._masses[order[joined]]
            joined += 1
        numbers = [0] * len(order)
        first = 1 if joined else 0
        for number, cell in enumerate(order[joined:], start=first):
            numbers[cell] = number
        return numbers

    def cell(self, tokens: Sequence[int]) -> int:
        """Cell of an outcome of at least ``depth`` tokens; ``IMPOSSIBLE`` if it has probability 0."""
        path: Path = ()
        while True:
            node = self._nodes[path]
            token = tokens[len(path)]
            if token in node.children:
                cell = node.children[token]
                if cell is not None:
                    return self._joined[cell]
                path = (*path, token)
            elif node.rest is not None and node.distribution.probability(token) > 0.0:
                return self._joined[node.rest]
            else:
                return IMPOSSIBLE


class HeadTree(LogitTree):
    """Logits of a head after ``context`` and a path that it drafted itself."""

    def __init__(
        self,
        target: Executor,  # gives true features of the context; its cache row 0 is used
        head: Executor,  # its cache row 0 belongs to the tree until its last new path
        context: Sequence[int],  # token ids, at least two
        *,
        vocab_size: int | None = None,  # ids below it have a logit; None takes the head's
        cut_head: CutHead | None = None,  # the token ids of its LM head, if that was cut
        # of a head that drafts all tokens in one step: what it reads for unknown tokens; its logits of a place then do
        # not depend on the path, unless the head corrects them
        mask: MaskInput | None = None,
        places: int = 1,  # tokens that such a head drafts in one step
    ) -> None:
        self._target, self._mask = target, mask
        self._num_heads, self._reads_draft = head.num_draft_heads, head.reads_draft
        self._num_modules = head.num_modules
        self._places = places if mask is None or mask.most is None else min(places, mask.most)
        self._at_once: tuple[Float32Array, Float32Array] | None = None  # logits [K, N], what is handed on [K, E]
        self._corrector = make_corrector(mask)
        super().__init__(head, context, vocab_size=vocab_size, cut_head=cut_head)

    def _begin(self, context: Sequence[int]) -> None:
        features = _compute_features(self._target, context[:-1])
        fed = make_entry_tokens(self._to_draft_tokens(context[1:]), self._mask)
        if self._reads_draft:
            fed = [*[CONTEXT_ID] * (len(fed) - 1), *fed[-1:]]
        if self._num_modules:  # entries read later tokens too: all of them are read with each path
            self._last, self._feature = fed, features
            return
        if not self._num_heads or self._reads_draft:
            self._runner.prefill(0, fed[:-1], features[:-1])
        self._last, self._feature, self._newest = fed[-1:], features[-1:], self._to_draft_tokens(context[-1:])[0]

    def _logits(self, path: Path) -> Float32Array:
        """What the head gives after a path; of a parallel one, the logits of its place, in rounds of whole drafts."""
        if self._reads_draft:
            return self._run_hydra_head(path)
        if self._num_heads:
            return self._guess(path)
        if self._num_modules:
            return self._run_module(path)
        if self._mask is None:
            return self._run_draft_steps(path)
        if self._at_once is None:
            work = make_parallel_work(self._last, self._feature, self._newest, self._places, self._mask).work
            logits = np.array(self._runner.step(0, [work]))
            self._at_once = logits, self._runner.executor.next_features.copy()
        logits, states = self._at_once
        begin = len(path) - len(path) % self._places
        if self._corrector is None:
            place: Float32Array = logits[len(path) - begin]
            return place
        newest = path[begin - 1] if begin else self._newest
        return self._corrector.begin(logits, states, newest).logits(path[begin:])

    def _run_draft_steps(self, path: Path) -> Float32Array:
        """One step for each token, each fed what the one before handed on; then all of them are forgotten."""
        executor = self._runner.executor
        if not executor.reads_features:
            raise SpecexportError("a head tree needs the engine of a draft head.")
        tokens, feature, start = self._last, self._feature, self._runner.kv.kv_len(0)
        logits = np.empty(0, np.float32)
        try:
            for token in (*self._to_draft_tokens(path), None):
                logits = self._runner.step(0, [RowWork(tokens, 1, feature)])[0].copy()
                self._runner.kv.commit(0, self._runner.kv.kv_len(0) + 1)
                if token is not None:
                    tokens, feature = [token], self._runner.executor.next_features.copy()
        finally:
            self._runner.kv.commit(0, start)
        return logits

    def _run_hydra_head(self, path: Path) -> Float32Array:
        """What the head of a place says of the path to it; after the last head, that of its last tokens."""
        logits: Float32Array = self._runner.step(0, [RowWork(self._last, 1, self._feature)])[0].copy()
        if path:
            state = self._runner.executor.next_features.copy()
            tokens = [self._newest, *self._to_draft_tokens(path)][-self._num_heads :]
            logits = self._runner.step(0, [RowWork(tokens, 1, np.tile(state, (len(tokens), 1)))])[0].copy()
        return logits

    def _run_module(self, path: Path) -> Float32Array:
        """What the module of a place says of the path to it, in rounds of whole drafts."""
        drafted = path[len(path) - len(path) % self._num_modules :]
        work = make_modules_work([*self._last, *self._to_draft_tokens(drafted)], self._feature)
        logits: Float32Array = self._runner.step(0, [work])[0].copy()
        return logits

    def _guess(self, path: Path) -> Float32Array:
        """What the head of a place says, whatever the tokens before it; after the last head, that one."""
        number = min(len(path), self._num_heads - 1)
        logits: Float32Array = self._runner.step(0, [RowWork([number], 1, self._feature)])[0]
        return logits


def _compute_features(target: Executor, tokens: Sequence[int]) -> Float32Array:
    """Features [n, E] of a text. It writes what a tree of the target over the same context has in its row already."""
    if not target.gives_features:
        raise SpecexportError("a head tree needs a target that gives features.")
    runner = ModelRunner(target)
    target.want_features(True)
    try:
        runner.step(0, [RowWork(tokens, 1)])
        return target.features.copy()
    finally:
        target.want_features(False)

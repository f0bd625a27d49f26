"""A deterministic tiny model in plain numpy, for tests of anything that drives an engine: ours and our users'.

It is strict on purpose. Its logits are computed from the token ids found *in its cache*, so a wrong position, a stale
entry or a lost rollback changes the output, and inputs that break the contract raise.
"""

import time

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import CONTEXT_ID, PADDED_STEP_INPUTS, STEP_INPUTS, StepShape
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.base import BoolArray, Float32Array, StepBuffers, StepOutput, Want
from specexport_runtime.executors.host_rows import HostRowsMixin
from specexport_runtime.executors.logit_rows import argmax_ids

ENTRY_BYTES = 64
"""What a cache entry is said to take."""
_POISON = -2
_DRAFTED = -10  # token t of a draft is handed on as -10 - t
_ADAPTER = 1_000_000  # times its number, beside the number of a mask: who wrote an entry
_BLOCK = -3  # an entry of a block, which must not outlive its step


class FakeExecutor(HostRowsMixin):
    """An executor whose next-token logits are a fixed random function of the last ``context`` tokens.

    Args:
        vocab_size: V.
        num_rows: cache rows.
        kv_capacity: entries of each row.
        context: how many of the last tokens decide the logits.
        seed: two executors with one seed and ``noise`` 0 agree everywhere.
        noise: standard deviation of a second random function added to the logits; a noisy copy of a target is a draft
            that is right most of the time.
        sharpness: standard deviation of the logits.
        negate: turn the logits upside down: an adversarial draft that is always wrong under greedy decoding.
        num_gates: parts that can be switched off. Logits without some of them are the full ones plus ``gate_noise`` of
            a third random function, of the tokens and of which parts are off. An entry that was written with parts off
            serves steps with the same parts off, and no others.
        gate_noise: its standard deviation.
        gives_features: the executor of a target for a draft head: a token's feature is the ids
            of the last ``context`` tokens.
        reads_features: the executor of a draft head: its logits are a function of the feature and
            the token that an entry has, and of nothing else, so that a wrong feature shows. Fed what it handed on, it
            is as good; with ``noise`` it is not.
        num_draft_heads: with ``reads_features``, the executor of so many heads, asked by number: head i gives the
            logits of token i+2 after a feature's tokens, if those in between are the likeliest.
        reads_draft: each of them reads what those before it guessed: its logits are a function of the feature and of
            the tokens that its row ends in, and of nothing else.
        fills_blocks: it is a head that fills blocks: entries have a feature, or are of a block, and each place's logits
            are a function of the whole context, of the block's first token, and of what the places before it guess.
        page_entries: entries of a page of its memory, of which each takes ``ENTRY_BYTES``.
        lender: with ``reads_features``, the executor of a head without a cache, which reads this one's: a step has one
            token a row, and its logits are a function of the lender's entries, of what was drafted after them, which
            is what it hands on, and of the token.
        num_adapters: LoRA adapters to choose from: with each of them logits are another function. An entry that was
            written with one serves steps with the same one, and no others.
    """

    copies_rows = True
    # Attributes in the place of properties: each step sets them.
    features: Float32Array = np.zeros((0, 0), np.float32)
    next_features: Float32Array = features

    def __init__(
        self,
        vocab_size: int,
        num_rows: int,
        kv_capacity: int,
        *,
        context: int = 6,
        seed: int = 0,
        noise: float = 0.0,
        sharpness: float = 2.0,
        negate: bool = False,
        num_gates: int = 0,
        gate_noise: float = 0.4,
        gives_features: bool = False,
        reads_features: bool = False,
        num_draft_heads: int = 0,
        reads_draft: bool = False,
        fills_blocks: bool = False,
        page_entries: int = 8,
        lender: "FakeExecutor | None" = None,
        num_adapters: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_rows = num_rows
        self.kv_capacity = kv_capacity
        self.calls: list[StepShape] = []
        """Shape of every executed step."""
        self.gives_back, self._page = True, page_entries
        self._context, self._seed, self._noise = context, seed, noise
        self._sharpness = -sharpness if negate else sharpness
        self._cache = np.full((num_rows, kv_capacity), _POISON, np.int64)
        self.num_gates, self._gate_noise = num_gates, gate_noise
        self.masks: list[tuple[bool, ...] | None] = []
        """What was on in every executed step; None where everything was."""
        self._mask: tuple[bool, ...] | None = None
        # The mask that each entry was written with, as a number; 0 is everything on.
        self._mask_numbers: dict[tuple[bool, ...] | None, int] = {None: 0, (True,) * num_gates: 0}
        self._writers = np.zeros((num_rows, kv_capacity), np.int64)
        self.num_adapters = num_adapters
        self._wants_similarity = False
        self._similarity: Float32Array = np.zeros((num_gates // 2, 0), np.float32)
        self.gives_features, self.reads_features = gives_features, reads_features
        self._fills_blocks = fills_blocks
        self._lender, self.borrows_cache = lender, lender is not None
        self.feature_size = context if gives_features or reads_features else 0
        self.num_draft_heads, self.reads_draft = num_draft_heads, reads_draft
        self._wants_features = False
        self.features = self.next_features = np.zeros((0, self.feature_size), np.float32)
        self._memo: dict[tuple[object, ...], Float32Array] = {}
        self._shape: StepShape | None = None
        self._buffers: StepBuffers | None = None
        self.attach_library()

    def logits_after(
        self, tokens: npt.ArrayLike, mask: tuple[bool, ...] | None = None, adapter: int = 0
    ) -> Float32Array:
        """Logits [V], float32, for the token that follows ``tokens``, with the parts of ``mask`` on (None: all)."""
        key = tuple(int(token) for token in np.asarray(tokens)[-self._context :])
        if (key, mask, adapter) not in self._memo:
            shifted = [*[0] * adapter, *(token + 1 for token in key)]
            logits = np.random.default_rng([self._seed, *shifted]).normal(0, abs(self._sharpness), self.vocab_size)
            noise = np.random.default_rng([self._seed, 7, *shifted]).normal(0, 1, self.vocab_size)
            values = np.sign(self._sharpness) * logits + self._noise * noise
            if mask is not None and not all(mask):
                random = np.random.default_rng([self._seed, 8, *mask, *shifted])
                values = values + self._gate_noise * random.normal(0, 1, self.vocab_size)
            self._memo[key, mask, adapter] = values.astype(np.float32)
        return self._memo[key, mask, adapter]

    def set_layers(self, mask: BoolArray | None) -> None:
        """See ``Executor.set_layers``."""
        _require(mask is None or mask.shape == (self.num_gates,), f"the mask has {self.num_gates} values")
        self._mask = None if mask is None else tuple(mask.tolist())
        self._mask_numbers.setdefault(self._mask, len(self._mask_numbers))

    def measure_similarity(self, wanted: bool) -> None:
        """See ``Executor.measure_similarity``."""
        _require(self.num_gates > 0, "only an engine with gates measures similarity")
        self._wants_similarity = wanted

    @property
    def similarity(self) -> Float32Array:
        """Similarity [N, T] of the last step; [N, 0] if it was not measured."""
        return self._similarity.copy()

    def compute_similarity(self, tokens: npt.ArrayLike) -> Float32Array:
        """What an engine with gates measures for ``tokens`` [N, T]: a fixed function of layer and token id."""
        layers, ids = np.arange(self.num_gates // 2)[:, None], np.asarray(tokens, np.int64)[None]
        return (1.0 - 0.01 * ((3 * layers + ids) % 7)).astype(np.float32)

    def want_features(self, wanted: bool) -> None:
        """See ``Executor.want_features``."""
        _require(self.gives_features, "only a target with a draft head gives features")
        self._wants_features = wanted

    def prepare(self, shape: StepShape) -> StepBuffers:
        """Fresh arrays full of poison, so that every value must be filled."""
        if min(shape.num_seqs, shape.num_tokens, shape.num_logit_rows) < 1:
            raise SpecexportError(f"an empty step: {shape}.")
        if shape.first_row + shape.num_seqs > self.num_rows:
            raise SpecexportError(f"{shape} does not fit {self.num_rows} rows.")
        self._shape = shape
        inputs = PADDED_STEP_INPUTS if shape.kv_span else STEP_INPUTS
        self._buffers = StepBuffers(*(np.full(shape.shape_of(spec), -7, spec.dtype) for spec in inputs))
        if self.reads_features:
            poison = np.full((shape.num_tokens, self.feature_size), np.nan, np.float32)
            self._buffers = self._buffers._replace(token_features=poison)
        if self.num_adapters:
            self._buffers = self._buffers._replace(adapter_ids=np.full(shape.num_tokens, -7, np.int64))
        if self.takes_trees:
            self._buffers = self._buffers._replace(parents=np.ones(shape.num_tokens, np.int64))
        return self._buffers

    def execute(self, want: Want = "logits") -> StepOutput:
        """Run the prepared step on the token cache; returns logits [R, V] float32, or their argmax [R].

        Raises:
            SpecexportError: an input breaks the contract.
        """
        start = time.perf_counter()
        shape, buffers = self._shape, self._buffers
        if shape is None or buffers is None:
            raise SpecexportError("execute() was called before prepare().")
        self.calls.append(shape)
        self.masks.append(self._mask)
        measured = buffers.input_ids if self._wants_similarity else buffers.input_ids[:0]
        _require(not len(measured) or self._mask is None, "similarity is measured with everything on")
        self._similarity = self.compute_similarity(measured)
        after: dict[int, Float32Array] = {}
        given = shape.num_tokens if self._wants_features else 0
        self.features = np.full((given, self.feature_size), -1, np.float32)
        handed = np.zeros((shape.num_tokens, self.feature_size), np.float32)
        for offset in range(shape.num_seqs):
            after.update(self._run_row(shape, buffers, offset, handed))
        self._shape = None
        rows = [int(row) for row in buffers.logit_rows]
        _require(all(row in after for row in rows), f"logit_rows {rows} are not rows of the step")
        self.engine_seconds += time.perf_counter() - start
        logits = np.stack([after[row] for row in rows])
        self.next_features = handed[rows]
        return logits if want == "logits" else argmax_ids(logits)

    def _run_row(
        self, shape: StepShape, buffers: StepBuffers, offset: int, handed: Float32Array
    ) -> dict[int, Float32Array]:
        begin, end = (int(value) for value in buffers.cu_new_tokens[offset : offset + 2])
        kv_len, count = int(buffers.kv_lens[offset, 0]), end - begin
        cache = self._cache[shape.first_row + offset]
        _require(0 <= begin <= end <= shape.num_tokens, "cu_new_tokens must not decrease")
        start, stop = int(buffers.row_starts[offset, 0]), int(buffers.row_ends[offset, 0])
        _require(0 <= start < stop <= shape.num_tokens, "row_starts and row_ends name tokens of the step")
        _require(count == 0 or (start, stop) == (begin, end), "row_starts and row_ends name the row's own tokens")
        total = kv_len + stop - start
        _require(int(buffers.row_totals[offset, 0]) == total, "row_totals is kv_lens + row_ends - row_starts")
        _require(total <= self.kv_capacity, "the row must fit the cache")
        tile = buffers.pad_index[offset, 0]
        _require(tile[:count].tolist() == list(range(begin, end)), "pad_index names the row's own tokens")
        _require(bool(((tile >= 0) & (tile < shape.num_tokens)).all()), "pad_index names tokens of the step")
        slots = (offset * shape.max_new_tokens + np.arange(count)).tolist()
        _require(buffers.unpad_index[begin:end].tolist() == slots, "unpad_index is the inverse of pad_index")
        if self._lender is not None:
            return self._run_borrowed(self._lender, shape.first_row + offset, buffers, (begin, end, kv_len), handed)
        tokens = buffers.input_ids[start:stop]
        least = CONTEXT_ID if self._fills_blocks or self.reads_draft else 0
        _require(bool(((tokens >= least) & (tokens < self.vocab_size)).all()), "input_ids lie in the vocabulary")
        cache[kv_len:total] = tokens
        writers, number = self._writers[shape.first_row + offset], self._mask_numbers[self._mask]
        adapter = self._adapter_of(buffers, start, stop)
        writers[kv_len:total] = number + _ADAPTER * adapter
        positions = buffers.positions[begin:end].tolist()
        known = (
            list(range(kv_len))
            if buffers.kv_positions is None
            else self._list_known_entries(buffers.kv_positions[offset, 0], kv_len)
        )
        _require(not (cache[known] == _POISON).any(), f"row {offset}: kv_len {kv_len} covers entries never written")
        whole = np.isin(writers[known] % _ADAPTER, (0, number)).all()
        _require(bool(whole), f"row {offset}: kv_len {kv_len} covers entries written with other parts on")
        same = (writers[known] // _ADAPTER == adapter).all()
        _require(bool(same) or not count, f"row {offset}: kv_len {kv_len} covers entries of another adapter")
        paths = _list_paths(buffers, begin, count)
        wanted = [len(known) + len(path) - 1 for path in paths]
        _require(positions == wanted, f"row {offset} goes on at {len(known)}, each token after its parent")
        if buffers.kv_positions is not None:
            own = buffers.kv_positions[offset, 0, kv_len : kv_len + count].tolist()
            _require(own == positions, "kv_positions holds the step's own tokens")
        rows = [known + [kv_len + j for j in path] for path in paths]
        if buffers.token_features is not None:
            features = buffers.token_features[begin:end]
            _require(bool(np.isfinite(features).all()), f"row {offset} has a feature for each token")
            if self.reads_draft:
                return self._run_sequential_heads(cache, kv_len, begin, tokens[:count], features, handed)
            if self.num_draft_heads:
                return self._run_parallel_heads(features, tokens, begin, count)
            if self._fills_blocks:
                return self._fill_block(cache, kv_len, begin, tokens[:count], features)
            contexts = [
                [*feature.astype(int).tolist(), int(token)] for feature, token in zip(features, tokens, strict=False)
            ]
            return {
                begin + j: self._hand_on(handed, begin + j, [token for token in context if token >= 0])
                for j, context in enumerate(contexts)
            }
        if self._wants_features:
            for j, row in enumerate(rows):
                self._write_feature(self.features, begin + j, cache[row])
        own = (adapter,) if adapter else ()  # models of one's own may know of none
        return {begin + j: self.logits_after(cache[row], self._mask, *own) for j, row in enumerate(rows)}

    def _adapter_of(self, buffers: StepBuffers, start: int, stop: int) -> int:
        """The adapter of a row's tokens, which have one together; 0 without adapters."""
        if buffers.adapter_ids is None:
            return 0
        found = set(buffers.adapter_ids[start:stop].tolist())
        _require(len(found) == 1, f"tokens of one row have one adapter, not {sorted(found)}")
        adapter = int(found.pop())
        _require(0 <= adapter <= self.num_adapters, f"there are {self.num_adapters} adapters, not {adapter}")
        return adapter

    def _run_borrowed(
        self,
        lender: "FakeExecutor",
        row: int,
        buffers: StepBuffers,
        spans: tuple[int, int, int],
        handed: Float32Array,
    ) -> dict[int, Float32Array]:
        """Logits of a row's one token after the lender's entries; nothing of an idle row, and nothing is written."""
        begin, end, kv_len = spans
        if begin == end or buffers.token_features is None:
            return {}
        known = lender._cache[row, :kv_len]
        _require(end == begin + 1, "a row has one token")
        _require(not (known == _POISON).any(), f"row {row}: kv_len {kv_len} covers entries never written")
        _require(int(buffers.positions[begin]) == kv_len, "the token stands after the lender's entries")
        feature, true = buffers.token_features[begin], np.zeros((1, self.feature_size), np.float32)
        self._write_feature(true, 0, known)
        drafted = [int(_DRAFTED - value) for value in feature if value <= _DRAFTED]
        _require(bool(drafted) or feature.tolist() == true[0].tolist(), "a draft begins with the last entry's feature")
        drafted.append(int(buffers.input_ids[begin]))
        self._write_feature(handed, begin, [_DRAFTED - token for token in drafted])
        return {begin: self.logits_after([*known.tolist(), *drafted])}

    def _run_parallel_heads(
        self, features: Float32Array, numbers: npt.NDArray[np.int64], begin: int, count: int
    ) -> dict[int, Float32Array]:
        """Logits of the heads ``numbers``, each over its own feature."""
        _require(bool((numbers[:count] < self.num_draft_heads).all()), "tokens are numbers of heads")
        found = {}
        for j in range(count):
            context = [token for token in features[j].astype(int).tolist() if token >= 0]
            for _ in range(int(numbers[j]) + 1):
                context.append(int(self.logits_after(context).argmax()))
            found[begin + j] = self.logits_after(context)
        return found

    def _run_sequential_heads(
        self,
        cache: npt.NDArray[np.int64],
        kv_len: int,
        begin: int,
        tokens: npt.NDArray[np.int64],
        features: Float32Array,
        handed: Float32Array,
    ) -> dict[int, Float32Array]:
        """Logits of a row of heads that read the draft: at its last entry, of the head for the tokens it ends in."""
        count = len(tokens)
        known = int((tokens == CONTEXT_ID).sum())
        _require(bool((tokens[:known] == CONTEXT_ID).all()), "context comes before the tokens")
        _require(count - known <= self.num_draft_heads, "a head reads one token more than the one before it")
        _require(not (cache[:kv_len] == _BLOCK).any(), "what later heads read is not committed")
        if count - known > 1:
            _require(known == 0, "later heads are fed what the first was handed")
            _require(bool((features == features[0]).all()), "all heads of a draft read one hidden state")
            cache[kv_len : kv_len + count] = _BLOCK
        nothing = np.zeros(self.vocab_size, np.float32)
        after = {begin + j: nothing for j in range(count)}
        if count > known:
            self._write_feature(handed, begin + count - 1, features[-1].astype(int))
            context = [*features[-1].astype(int).tolist(), *tokens[known:].tolist()]
            after[begin + count - 1] = self.logits_after([token for token in context if token >= 0])
        return after

    def _fill_block(
        self,
        cache: npt.NDArray[np.int64],
        kv_len: int,
        begin: int,
        tokens: npt.NDArray[np.int64],
        features: Float32Array,
    ) -> dict[int, Float32Array]:
        """Logits of a row's context entries, which mean nothing, and of its block."""
        count = len(tokens)
        known = int((tokens == CONTEXT_ID).sum())
        _require(not (cache[:kv_len] == _BLOCK).any(), "no entry of a block is committed")
        _require(bool((tokens[:known] == CONTEXT_ID).all()), "context comes before the block")
        cache[kv_len : kv_len + known] = features[:known, -1]
        cache[kv_len + known : kv_len + count] = _BLOCK
        nothing = np.zeros(self.vocab_size, np.float32)
        after = {begin + j: nothing for j in range(known)}
        context = [*cache[: kv_len + known].tolist(), *tokens[known : known + 1].tolist()]
        for j in range(known, count):
            if j == known:
                after[begin + j] = nothing
                continue
            after[begin + j] = self.logits_after(context)
            context.append(int(after[begin + j].argmax()))
        return after

    def _hand_on(self, handed: Float32Array, at: int, context: list[int]) -> Float32Array:
        """A head's logits for ``context``, and what it hands on after it."""
        self._write_feature(handed, at, context)
        return self.logits_after(context)

    def _write_feature(self, features: Float32Array, at: int, tokens: npt.ArrayLike) -> None:
        """The feature after ``tokens``: the last of them, -1 where there are fewer."""
        last = np.asarray(tokens)[-self.feature_size :]
        features[at] = -1
        features[at, self.feature_size - len(last) :] = last

    @staticmethod
    def _list_known_entries(kv_positions: npt.NDArray[np.int64], entries: int) -> list[int]:
        """Entries that hold tokens, among the first ``entries``; the positions must count up from 0."""
        held = kv_positions[:entries]
        known = np.flatnonzero(held >= 0)
        _require(held[known].tolist() == list(range(len(known))), "kv_positions counts up from 0")
        return [int(entry) for entry in known]

    def move_row(self, source: int, destination: int, kv_len: int) -> None:
        """Copy the first ``kv_len`` entries; the rest of the destination is poisoned."""
        self._cache[destination] = _POISON
        self._cache[destination, :kv_len] = self._cache[source, :kv_len]
        self._writers[destination] = self._writers[source]

    def copy_row(self, source: int, destination: int, kv_len: int, floor: int = 0) -> None:  # noqa: ARG002
        """As :meth:`move_row`, which leaves the source as it is."""
        self.move_row(source, destination, kv_len)

    def swap_rows(
        self,
        one: int,
        other: int,
        kv_lens: tuple[int, int],
        floors: tuple[int, int] = (0, 0),  # noqa: ARG002
    ) -> None:
        """Exchange the first entries of two rows; the rest of both is poisoned."""
        rows, lens = [one, other], (kv_lens[1], kv_lens[0])
        self._cache[rows], self._writers[rows] = self._cache[rows[::-1]], self._writers[rows[::-1]]
        for row, kv_len in zip(rows, lens, strict=True):
            self._cache[row, kv_len:] = _POISON

    def clear_row(self, row: int) -> None:
        """Poison the row."""
        self._cache[row] = _POISON

    def row_bytes(self, entries: int) -> int:
        """See ``Executor.row_bytes``."""
        return -(-entries // self._page) * self._page * ENTRY_BYTES

    def release_pages(self, row: int, kept: int) -> None:
        """See ``Executor.release_pages``: these pages are poisoned."""
        self._cache[row, -(-kept // self._page) * self._page :] = _POISON

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages in which anything was written."""
        pages = [(row != _POISON).nonzero()[0] // self._page for row in self._cache]
        return sum(len(set(written.tolist())) for written in pages) * self._page * ENTRY_BYTES

    def move_entries(self, row: int, entries: npt.NDArray[np.int64], start: int = 0) -> None:
        """See ``Executor.move_entries``; what lies after them is poisoned."""
        kept, end = self._cache[row, entries], start + len(entries)
        self._cache[row, start:] = _POISON
        self._cache[row, start:end] = kept
        self._writers[row, start:end] = self._writers[row, entries]

    def close(self) -> None:
        """Nothing to release."""


def _list_paths(buffers: StepBuffers, begin: int, count: int) -> list[list[int]]:
    """Of each new token of a row, the row's new tokens up to it."""
    if buffers.parents is None:
        return [list(range(j + 1)) for j in range(count)]
    paths: list[list[int]] = []
    for j, distance in enumerate(buffers.parents[begin : begin + count].tolist()):
        _require(1 <= distance <= j + 1, "a token's parent stands before it in its row")
        paths.append([*(paths[j - distance] if distance <= j else []), j])
    return paths


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise SpecexportError(f"the step breaks the contract: {rule}.")

"""The build's own proof of a draft head: its engine in ragged steps, against the head in torch.

The reference is a causal head in ragged steps; an assistant over random keys and values, by transformers' own
attention; a head that fills blocks in steps of context and blocks, each block forgotten again; or Hydra heads, first
ones and later ones behind each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specexport.compile.built import EngineCheck
from specexport.rounding import logit_tolerance
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import CheckFailedError

if TYPE_CHECKING:
    from specexport.heads.assistant import AssistantHead
    from specexport.heads.config import HeadConfig
    from specexport.heads.hydra import HydraHeads
    from specexport.heads.modules import DraftHead

CHECK_CAPACITY = 32
CHECK_LENS, CHECK_STEPS = (11, 8), ((5, 2), (3, 1), (1, 3), (1, 1), (1, 1))
"""Tokens of the two sequences, in all and in each step: several, one, and one of each row alone."""
QUANTIZED_ERROR = 0.25
"""Most of what a quantized head hands on that may be error, as a share of its size; a graph that is wrong is off by as
much as it is large."""

_LENS = ((11, 7), (1, 31), (5, 0), (0, 20), (19, 8))
"""Entries of the two rows in each step; an idle row has none."""

BLOCK_STEPS = (((5, 3), (2, 2)), ((1, 3), (3, 4)), ((2, 2), (1, 3)))
"""New context entries and tokens of the block, of each row in each step."""

READ = ((5, 2), (1, 3), (2, 1))
"""New features of each row in each step of first heads. Behind it come steps of later ones, as in a draft."""

Equations = Callable[[np.ndarray, Sequence[int]], tuple[np.ndarray, np.ndarray]]
"""Logits [N] and the hidden state handed on [H], for all features of a sequence [n, H] and the tokens that the head
reads: the newest and the guessed ones."""


class CheckedRow(NamedTuple):
    """What one sequence is fed in a step, and what comes of it in torch."""

    tokens: np.ndarray  # input ids, int64 [n]
    features: np.ndarray  # float32 [n, E]
    kept: int  # how many of these entries are committed
    logits: np.ndarray  # of the last r entries, which want logits [r, N]
    handed_on: np.ndarray  # of the same [r, E]


class LentRows(NamedTuple):
    """What a head that reads the target's caches finds in them."""

    caches: Mapping[str, np.ndarray]  # by name [2, 1, H, L, D]
    lens: Sequence[tuple[int, int]]  # entries of the two rows, in each step

    def lend(self, layers: Sequence[int]) -> dict[str, np.ndarray]:  # noqa: ARG002 - it has those that are asked for
        """See ``CacheLender.lend``."""
        return dict(self.caches)


class HeadReference(NamedTuple):
    """What a head is checked against."""

    steps: Sequence[Sequence[CheckedRow]]  # the two rows of each step
    lent: LentRows | None = None  # of a head without a cache


def causal_reference(
    tokens: Sequence[np.ndarray],
    features: Sequence[np.ndarray],
    logits: Sequence[np.ndarray],
    handed_on: Sequence[np.ndarray],
) -> HeadReference:
    """Ragged steps of a causal head, from what it computes of each whole sequence of ``CHECK_LENS`` tokens.

    Of each sequence: token ids int64 [n], features float32 [n, E], logits [n, N] and what it hands on [n, E].
    """
    steps, done = [], [0, 0]
    for counts in CHECK_STEPS:
        spans = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        steps.append(
            [
                CheckedRow(tokens[row][span], features[row][span], counts[row], logits[row][span], handed_on[row][span])
                for row, span in enumerate(spans)
            ]
        )
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return HeadReference(steps)


def check_head(folder: Path, entry: ModelEntry, reference: HeadReference) -> EngineCheck:
    """Run a head's engine in ragged steps; raises CheckFailedError if what it gives differs from torch."""
    from specexport_runtime.executors.base import EngineRequest
    from specexport_runtime.executors.open import backend_of
    from specexport_runtime.packing.batch import ModelRunner, RowWork
    from specexport_runtime.packing.kv import BorrowedKv, KvArena

    backend = backend_of(entry.backend)
    assert backend is not None  # noqa: S101 - it has just been built for it
    request = EngineRequest(
        folder=folder,
        entry=entry,
        role="head",
        num_rows=2,
        kv_capacity=CHECK_CAPACITY,
        lookahead=1,
        spin=False,
        cuda_graphs=False,
        lender=reference.lent,
    )
    lengths = KvArena(2, CHECK_CAPACITY)
    executor = backend.open(request)
    try:
        kv = None if reference.lent is None else BorrowedKv(lengths)
        runner = ModelRunner(executor, kv=kv)
        if not executor.reads_features:
            raise CheckFailedError("the new engine is no draft head's.")
        found: dict[str, list[np.ndarray]] = {"logits": [], "handed_on": []}
        wanted: dict[str, list[np.ndarray]] = {"logits": [], "handed_on": []}
        for step, rows in enumerate(reference.steps):
            for index, count in enumerate(() if reference.lent is None else reference.lent.lens[step]):
                lengths.release(index)
                lengths.write(index, [count])
                lengths.commit(index, count)
            work = [RowWork(row.tokens.tolist(), len(row.logits), row.features) for row in rows]
            found["logits"].append(np.array(runner.step(0, work)))
            found["handed_on"].append(executor.next_features.copy())
            wanted["logits"] += [row.logits for row in rows]
            wanted["handed_on"] += [row.handed_on for row in rows]
            for index, row in enumerate(rows):
                runner.kv.commit(index, runner.kv.kv_len(index) + row.kept)
    finally:
        executor.close()
    return EngineCheck(
        max(_compare(entry, name, np.concatenate(found[name]), np.concatenate(wanted[name])) for name in found)
    )


def _compare(entry: ModelEntry, name: str, found: np.ndarray, wanted: np.ndarray) -> float:
    error, scale = float(np.abs(found - wanted).max()), max(1.0, float(np.abs(wanted).max()))
    if entry.quantize is not None:
        ratio = float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-6)
        fits = ratio <= QUANTIZED_ERROR
    else:
        fits = error <= logit_tolerance(entry.dtype, len(entry.attention.layers)).largest * scale
    if not fits:  # a NaN must fail
        raise CheckFailedError(
            f"the head's engine differs from torch: {name.replace('_', ' ')} by {error:.3g} of {scale:.3g}.",
            "report this head; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )
    return error


def assistant_reference(head: "AssistantHead", config: "HeadConfig") -> HeadReference:
    """Steps of one token a row, and what the assistant computes of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.assistant import Places, draft_steps, shape_of

    generator = np.random.default_rng(21)
    caches = {}
    for i, (heads, k_dim, v_dim) in enumerate(shape_of(config).geometries):
        for name, size in ((f"k_cache.{i}", k_dim), (f"v_cache.{i}", v_dim)):
            caches[name] = generator.standard_normal((2, 1, heads, CHECK_CAPACITY, size), np.float32)
    steps = []
    for lens in _LENS:
        rows = []
        for row, entries in enumerate(lens):
            tokens = generator.integers(0, config.vocab_size, min(entries, 1))
            fed = generator.standard_normal((len(tokens), config.feature_size), np.float32)
            own = [torch.from_numpy(cache[row]).to(head.dtype) for cache in caches.values()]
            places = Places(torch.full((len(tokens),), entries), list(zip(own[::2], own[1::2], strict=True)))
            logits, handed_on = np.zeros((0, config.vocab_size), np.float32), fed
            if len(tokens):
                found = draft_steps(head, torch.from_numpy(tokens), torch.from_numpy(fed), places)
                logits, handed_on = (each.float().numpy() for each in found)
            rows.append(CheckedRow(tokens, fed, 0, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps, LentRows(caches, _LENS))


def block_reference(head: "DraftHead", config: "HeadConfig") -> HeadReference:
    """Steps with random features and tokens, and what the head computes of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.dflash import block_states
    from specexport_runtime.abi import CONTEXT_ID

    generator = np.random.default_rng(21)
    dtype = head.dtype
    known = [np.zeros((0, config.feature_size), np.float32) for _ in BLOCK_STEPS[0]]
    steps = []
    for sizes in BLOCK_STEPS:
        rows = []
        for row, (context, width) in enumerate(sizes):
            fresh = generator.normal(0, 1, (context, config.feature_size)).astype(np.float32)
            known[row] = np.concatenate([known[row], fresh])
            block = generator.integers(0, config.vocab_size, width)
            with torch.no_grad():
                features = torch.from_numpy(known[row]).to(dtype)
                starts = torch.tensor([len(features)])
                states = block_states(head, features, starts, torch.from_numpy(block)[None])[0]
                logits, handed_on = (each.float().numpy() for each in head.read(states))
            tokens = np.concatenate([np.full(context, CONTEXT_ID), block])
            fed = np.concatenate([fresh, np.zeros((width, config.feature_size), np.float32)])
            rows.append(CheckedRow(tokens, fed, context, logits, handed_on))
        steps.append(rows)
    return HeadReference(steps)


def hydra_reference(head: "HydraHeads", config: "HeadConfig") -> HeadReference:
    """Steps with random features and tokens, and what the heads compute of them in torch, a sequence at a time."""
    import torch

    from specexport.heads.trace import causal_states

    def compute(features: np.ndarray, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        given = torch.from_numpy(features).to(head.dtype)
        with torch.no_grad():
            state = causal_states(head, torch.zeros(len(given), dtype=torch.int64), given)[-1:]
            logits = head.guess(len(tokens) - 1, state, head.embed_tokens(torch.tensor([list(tokens)])))
        return logits[0].float().numpy(), state[0].float().numpy()

    return hydra_steps(compute, config.num_draft_heads, config.feature_size, config.vocab_size)


def hydra_steps(compute: Equations, num_heads: int, feature_size: int, vocab_size: int) -> HeadReference:
    """Steps with random features [n, E] and tokens, and what ``compute`` says of them."""
    from specexport_runtime.abi import CONTEXT_ID

    generator = np.random.default_rng(21)
    known = [np.zeros((0, feature_size), np.float32) for _ in READ[0]]
    steps = []
    for counts in READ:
        fresh = [generator.normal(0, 1, (count, feature_size)).astype(np.float32) for count in counts]
        known = [np.concatenate(pair) for pair in zip(known, fresh, strict=True)]
        windows = [generator.integers(0, vocab_size, num_heads) for _ in counts]
        rows = []
        for row, window in enumerate(windows):
            logits, handed_on = compute(known[row], window[:1].tolist())
            context = [CONTEXT_ID] * (counts[row] - 1)
            tokens = np.array([*context, window[0]])
            rows.append(CheckedRow(tokens, fresh[row], counts[row], logits[None], handed_on[None]))
        steps.append(rows)
        for width in range(2, num_heads + 1):
            depths = (width, max(2, width - 1))  # rows ask different heads
            later = []
            for row, depth in enumerate(depths):
                tokens = windows[row][:depth]
                logits, handed_on = compute(known[row], tokens.tolist())
                later.append(CheckedRow(tokens, np.tile(handed_on, (depth, 1)), 0, logits[None], handed_on[None]))
            steps.append(later)
    return HeadReference(steps)

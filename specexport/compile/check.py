"""The build's own proof: a new engine's logits against eager transformers, in steps of every kind.

A prefill and a ragged verify step; in full, longer texts, and with another cache one token at a time. The padded-KV
graph is held to the same numbers, with padding entries in one of its two cache rows.

A float engine is compared logit by logit. One with quantized weights or caches is another function; what it computes is
compared with the float model on a text, see :mod:`specexport.compile.closeness`.

``specexport verify`` proves much more; this one is quick enough to run in every build and catches a wrong trace,
pass or lowering before a bundle exists.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specexport.backends.base import PartRecipe
from specexport.backends.registry import find_backend
from specexport.compare import Differences, OutputRun, Reference, Rows, compare_logits
from specexport.compile.built import EngineCheck
from specexport.compile.closeness import Closeness, log_softmax, measure_closeness
from specexport.compile.tokenizer import load_tokenizer
from specexport.recipe import NO_CHECK
from specexport.rounding import LogitTolerance, logit_tolerance
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import CacheLender, EngineRequest, Executor, Float32Array, Int64Array
from specexport_runtime.machine import available_cores

PREFILL_LENS = (6, 3)
VERIFY_LENS = (3, 5)
"""Tokens of the two sequences in each step: unequal in both, so that rows, padding and positions are told apart."""

TEXTS = (
    """def read_settings(path):
    \"\"\"Read a file of lines like `name = value` into a dictionary.\"\"\"
    settings = {}
    with open(path) as file:
        for line in file:
            name, _, value = line.partition("=")
            settings[name.strip()] = value.strip()
    return settings
""",
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed its stairs to light the lamp, "
    "and the ships that came home from the north could see it from far away. When the storm came in the night, he did "
    "not sleep at all.",
)
TEXT_LENS, FULL_TEXT_LENS = (20, 12), (64, 48)
"""Tokens of the texts that quantized engines read: what they lose shows only where the float model knows something."""


def build_check_sequences(vocab_size: int) -> list[Int64Array]:
    """The two token sequences that float engines are checked with: fixed, spread over the whole vocabulary."""
    lengths = [prefill + verify for prefill, verify in zip(PREFILL_LENS, VERIFY_LENS, strict=True)]
    return _draw_random_tokens(vocab_size, lengths)


def build_text_sequences(
    tokenizer_json: bytes, vocab_size: int, max_positions: int | None = None, *, full: bool = False
) -> list[Int64Array]:
    """Two token sequences, code and prose, for rounded engines; random tokens where a vocabulary lacks texts."""
    lengths = [min(length, max_positions or length) for length in (FULL_TEXT_LENS if full else TEXT_LENS)]
    tokenizer = load_tokenizer(tokenizer_json)
    found = [tokenizer.encode(text).ids[:length] for text, length in zip(TEXTS, lengths, strict=True)]
    if [len(ids) for ids in found] != lengths or max(map(max, found)) >= vocab_size:
        return _draw_random_tokens(vocab_size, lengths)
    return [np.array(ids, np.int64) for ids in found]


def compute_text_perplexity(
    tokenizer_json: bytes, sequences: Sequence[Int64Array], references: Sequence[Float32Array]
) -> float | None:
    """Perplexity of eager logits [len, V] on the built-in texts; None if the sequences are other tokens.

    Engine and eager model read the weights in the same way, so their logits agree even where that way is wrong: this
    number shows it.
    """
    tokenizer, losses = load_tokenizer(tokenizer_json), list[float]()
    for text, ids, logits in zip(TEXTS, sequences, references, strict=True):
        if tokenizer.encode(text).ids[: len(ids)] != ids.tolist():
            return None
        losses += [-float(log_softmax(row)[token]) for row, token in zip(logits, ids[1:], strict=False)]
    return math.exp(min(float(np.mean(losses)), _MAX_NATS))


_MAX_NATS = 500.0  # no model is that sure, and all that is said of more is that it is chance


def _draw_random_tokens(vocab_size: int, lengths: Sequence[int]) -> list[Int64Array]:
    generator = np.random.default_rng(20)
    return [generator.integers(0, vocab_size, length, dtype=np.int64) for length in lengths]


def find_unchecked_reason(recipe: PartRecipe) -> str | None:
    """Why engines of a recipe cannot be compared with eager transformers here; None if they can."""
    if recipe.check == NO_CHECK:
        return "not checked: asked not to"
    return find_backend(recipe.backend).find_unchecked_reason(recipe)


def check_engine(
    folder: Path,
    entry: ModelEntry,
    sequences: Sequence[
        Int64Array
    ],  # from :func:`build_check_sequences`, or from :func:`build_text_sequences` for an approximation
    references: Sequence[Float32Array],  # eager logits [len, V] of each sequence
    adapted: Sequence[Sequence[Float32Array]] = (),  # the same with each adapter that requests may choose
    *,
    full: bool = False,  # one token at a time too
) -> EngineCheck:
    """Run the engine on ``sequences`` and compare; the worst of its graphs and steps, else CheckFailedError."""
    checks = []
    truth = [Reference.of_texts(each) for each in (references, *adapted)]
    for unpad_kv in (True,) if entry.engine.padded is None else (True, False):
        for name, adapter, rows in run_engine(
            folder, entry, sequences, unpad_kv=unpad_kv, adapters=len(adapted), full=full
        ):
            closeness, found = None, compare_logits(rows, truth[adapter])
            if entry.approximation is None:
                _require_equal(entry, found, name)
            else:
                closeness = _require_close(entry, rows, truth[adapter], name)
            checks.append((float(found.largest.max()), closeness))
    return _merge_checks(checks)


def _merge_checks(checks: Sequence[tuple[float, Closeness | None]]) -> EngineCheck:
    """The largest error and the least closeness of several runs."""
    parts = [closeness for _, closeness in checks if closeness is not None]
    shares = [part.agreement for part in parts if part.agreement is not None]
    return EngineCheck(
        max(error for error, _ in checks),
        min(shares, default=None),
        max((part.divergence for part in parts), default=None),
        max((part.lost for part in parts), default=None),
    )


def _require_close(entry: ModelEntry, rows: Rows, reference: Reference, kind: str) -> Closeness:
    # Models park attention on a text's first token (Xiao et al. 2023): one channel of it is thousands of times as large
    # as the others, and is taken back in the last layers. Eight bits lose what is left, and only that token's logits.
    # They would outweigh all the others here: 8.3 nats beside 0.02 (Qwen2.5-Coder-1.5B).
    judged = [(row, reference.logits[place]) for place, row in rows if place[1] > 0]
    closeness = measure_closeness(*map(np.stack, zip(*judged, strict=True)))
    if not all(np.isfinite(row).all() for _, row in rows):
        closeness = closeness._replace(agreement=None, divergence=float("nan"), lost=float("nan"))
    obstacle = closeness.obstacle(str(entry.approximation))
    if obstacle is not None:
        raise CheckFailedError(
            f"the {entry.source.architecture} {entry.approximation} {kind} is too far from eager transformers: "
            f"{obstacle}.",
            "report this model; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )
    return closeness


def _require_equal(entry: ModelEntry, found: Differences, kind: str) -> None:
    # In 16 bits the reference is rounded as often as the engine is: both may be off.
    sides = 1 if entry.dtype == "float32" else 2
    limit = sides * logit_tolerance(entry.dtype, len(entry.attention.layers)).largest
    if bad := np.flatnonzero(~found.within(LogitTolerance(limit, limit))).tolist():
        row, position = found.places[bad[0]]
        raise CheckFailedError(
            f"the {entry.source.architecture} {kind} differs from eager transformers by {found.largest[bad[0]]:.3g} "
            f"(at most {limit * found.scales[bad[0]]:.3g} is allowed) at position {position} of check sequence {row}.",
            "report this model; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )


def _wide_steps(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """New tokens of each row in each step: a prefill, and a verify step."""
    return [tuple(np.subtract(lengths, VERIFY_LENS).tolist()), VERIFY_LENS]


def _narrow_steps(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """A short prefill, then one token of each row for as long as both have some."""
    left = np.subtract(lengths, PREFILL_LENS)
    rest = tuple((left - left.min()).tolist())
    return [PREFILL_LENS, *[(1,) * len(lengths)] * int(left.min()), *([rest] if any(rest) else [])]


def _count_logit_tokens(entry: ModelEntry, count: int) -> int:
    """Tokens of ``count`` new ones that get logits: an engine with profiles computes no more than verifying needs."""
    if entry.engine.limits is None:
        return count
    return min(count, max(profile.num_logit_rows for profile in entry.engine.limits.profiles) // len(VERIFY_LENS))


def run_engine(
    folder: Path,
    entry: ModelEntry,
    sequences: Sequence[Int64Array],
    *,
    unpad_kv: bool = True,
    adapters: int = 0,
    full: bool = False,
) -> list[tuple[str, int, Rows]]:
    """What one graph computes in wide steps, in full also one token at a time; alone, and with each adapter.

    Each run has a name for messages, and the number of its adapter, 0 for none.
    """
    from specexport.compile.check_parts import PartwiseExecutor

    name, lengths = "engine" if unpad_kv else "engine's padded-KV graph", [len(sequence) for sequence in sequences]
    scripts = {name: _wide_steps(lengths)}
    if full:
        scripts[f"{name}, one token at a time,"] = _narrow_steps(lengths)
    executor = _make_executor(folder, entry, sequences, unpad_kv=unpad_kv)

    def run_all_steps() -> list[tuple[str, int, Rows]]:
        runs, run = [], OutputRun(executor, [sequence.tolist() for sequence in sequences], unpad_kv=unpad_kv)
        for adapter in range(adapters + 1):
            of = f" with adapter {entry.adapters[adapter - 1].name}" if adapter else ""
            if adapters:
                executor.default_adapter = adapter
            for kind, steps in scripts.items():
                run.runner.reset()
                for counts in steps:
                    run.step(kind + of, counts, wanted=[_count_logit_tokens(entry, count) for count in counts])
                runs.append((kind + of, adapter, run.cases[kind + of]))
        return runs

    try:
        if isinstance(executor, PartwiseExecutor):
            run_all_steps()  # writes the steps down
            executor.compute()
        return run_all_steps()
    finally:
        executor.close()


def _make_executor(folder: Path, entry: ModelEntry, sequences: Sequence[Int64Array], *, unpad_kv: bool) -> Executor:
    from specexport.compile.check_parts import PartwiseExecutor, is_large

    num_rows, kv_capacity = len(sequences), max(len(sequence) for sequence in sequences) + max(VERIFY_LENS)
    if is_large(folder, entry):
        graph = entry.engine if unpad_kv or entry.engine.padded is None else entry.engine.padded
        return PartwiseExecutor(
            folder / graph.path, entry, num_rows=num_rows, kv_capacity=kv_capacity, num_threads=available_cores()
        )
    return open_new_engine(folder, entry, num_rows=num_rows, kv_capacity=kv_capacity, unpad_kv=unpad_kv)


def open_new_engine(
    folder: Path,
    entry: ModelEntry,
    *,
    num_rows: int,
    kv_capacity: int,
    unpad_kv: bool = True,
    lender: CacheLender | None = None,  # of a head without caches of its own
) -> Executor:
    """Open a just built engine for a few steps; raises SpecexportError if the runtime has no such backend."""
    from specexport_runtime.executors.open import find_engine_backend

    backend = find_engine_backend(entry.backend)
    if backend is None:
        raise SpecexportError(f"the runtime has no backend {entry.backend!r} to run a new engine with.")
    return backend.open(
        EngineRequest(
            folder=folder,
            entry=entry,
            role="new engine",
            num_rows=num_rows,
            kv_capacity=kv_capacity,
            lookahead=1,
            spin=False,
            unpad_kv=unpad_kv,
            cuda_graphs=False,
            lender=lender,
        )
    )

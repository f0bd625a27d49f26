"""The build's own proof: a new engine's logits against eager transformers, on a prefill and a ragged verify step.

The padded-KV graph is held to the same numbers, with padding entries in one of its two cache rows; a draft's graph for
steps of one token a row, with such steps between.

``specexport verify`` proves much more; this one is quick enough to run in every build and catches a wrong trace,
pass or lowering before a bundle exists.
"""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specexport.backends.registry import find_backend
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.manifest import ModelEntry
from specexport_runtime.errors import CheckFailedError, SpecexportError
from specexport_runtime.executors.base import EngineRequest, Executor, Float32Array, Int64Array

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of a logit by dtype, for logits of magnitude up to 1; it grows in proportion beyond (rounding).

Those of the 16-bit types are a guess from their precision (11 and 8 bits): no engine of theirs was run yet.
"""

QUANTIZED_LIMITS = {"int8": 0.15, "int4": 0.8}
"""Largest unexplained share of the logits at the median position by quantization; see :func:`unexplained_shares`.

Share 0 is no error, 1 what one guess for all positions leaves, 2 what logits of other positions leave. Quantized
activations are rounded, so an error of a rounding in the float operators between them can move a value by a whole step:
in models with large activations single positions differ wholly, and only most of them can be held to a limit.
"""

QUANTIZED_MATCHES = {"int8": 0.75, "int4": 0.4}
"""Least share of positions whose logits are nearer to the eager ones there than to those of any other position.

Gemma 3 270M, the worst of those measured, reaches 0.88 and 0.53, tiny random models 1; chance is 0.06.
"""

PREFILL_LENS = (6, 3)
VERIFY_LENS = (3, 5)
"""Tokens of the two sequences in each step: unequal in both, so that rows, padding and positions are told apart."""


class _Graph(NamedTuple):
    """One graph of a model, and the steps that it is checked with.

    Attributes:
        name: for messages.
        unpad_kv: False for the padded-KV graph.
        steps: tokens of the two sequences in each step.
    """

    name: str
    unpad_kv: bool = True
    steps: tuple[tuple[int, ...], ...] = (PREFILL_LENS, VERIFY_LENS)


_PADDED = _Graph("engine's padded-KV graph", unpad_kv=False)
_ONE_TOKEN = _Graph("engine's one-token graph", steps=((6, 3), (1, 1), (1, 1), (1, 1), (0, 2)))


def check_sequences(vocab_size: int) -> list[Int64Array]:
    """The two token sequences of the check: fixed, spread over the whole vocabulary.

    Args:
        vocab_size: V.
    """
    generator = np.random.default_rng(20)
    lengths = [prefill + verify for prefill, verify in zip(PREFILL_LENS, VERIFY_LENS, strict=True)]
    return [generator.integers(0, vocab_size, length, dtype=np.int64) for length in lengths]


def check_obstacle(recipe: BuildRecipe) -> str | None:
    """Why engines of a recipe cannot be compared with eager transformers here; None if they can.

    Args:
        recipe: resolved.
    """
    if not recipe.check:
        return "not checked: asked not to"
    return find_backend(recipe.backend).check_obstacle(recipe)


def check_engine(folder: Path, entry: ModelEntry, sequences: Seq[Int64Array], references: Seq[Float32Array]) -> float:
    """Run the engine on ``sequences`` and compare every logit.

    Args:
        folder: the model's folder.
        entry: its manifest entry.
        sequences: tokens of each sequence, as from :func:`check_sequences`.
        references: eager logits [len, V] of each sequence.

    A quantized engine is another function than the eager model, and its logits differ visibly. It is held to what a
    wrong scale, weight or row would break: at the median position it leaves little of the logits unexplained, and at
    nearly every position its logits are nearer to the eager ones there than to those of any other position.

    Returns:
        the largest absolute difference.

    Raises:
        CheckFailedError: it is beyond the tolerance; names the sequence and the position.
    """
    compare = _compare if entry.quantize is None else _compare_quantized
    others = ((_PADDED, entry.padded_path), (_ONE_TOKEN, entry.one_token_path))
    graphs = [_Graph("engine"), *(graph for graph, path in others if path is not None)]
    errors = []
    for graph in graphs:
        outputs = _run(folder, entry, sequences, unpad_kv=graph.unpad_kv, steps=graph.steps)
        errors.append(compare(entry, outputs, references, graph.name))
    return max(errors)


def unexplained_shares(found: Float32Array, reference: Float32Array) -> Float32Array:
    """Squared error of each position's logits over what the mean logits of all positions leave there.

    Logits have a large part that is the same at every position; an error relative to their size would hide a mix-up of
    positions behind it.

    Args:
        found: the engine's logits [n, V].
        reference: eager logits [n, V] at the same positions.

    Returns:
        share of each position [n].
    """
    spread = np.square(reference - reference.mean(axis=0)).sum(axis=-1)
    shares: Float32Array = np.square(found - reference).sum(axis=-1) / spread
    return shares


def _compare_quantized(
    entry: ModelEntry, outputs: Seq[Float32Array], references: Seq[Float32Array], kind: str
) -> float:
    wanted = [(index, position) for index in range(len(outputs)) for position in _wanted(entry, index)]
    found = np.stack([outputs[index][position] for index, position in wanted])
    reference = np.stack([references[index][position] for index, position in wanted])
    distances = np.stack([np.square(row - reference).sum(axis=-1) for row in found])
    limit, least = QUANTIZED_LIMITS[str(entry.quantize)], QUANTIZED_MATCHES[str(entry.quantize)]
    share = float(np.median(unexplained_shares(found, reference)))
    matches = float((distances.diagonal() <= distances.min(axis=1)).mean())
    # "Not <=": logits that are not numbers must fail.
    if not share <= limit or not matches >= least or not np.isfinite(found).all():
        raise CheckFailedError(
            f"the {entry.architecture} {entry.quantize} {kind} is "
            f"too far from eager transformers: {share:.3g} of the logits at the median position are unexplained (at "
            f"most {limit:g} is allowed), and {matches:.0%} of the positions have the logits nearest to their own (at "
            f"least {least:.0%}).",
            "report this model; `--dump-passes DIR` shows each stage. The bundle was not written.",
        )
    return float(np.abs(found - reference).max())


def _compare(entry: ModelEntry, outputs: Seq[Float32Array], references: Seq[Float32Array], kind: str) -> float:
    worst = 0.0
    for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        # A position that is not a number must fail: compare with "not <=".
        errors = np.abs(output - reference).max(axis=-1)[_wanted(entry, index)]
        limit = TOLERANCES[entry.dtype] * max(1.0, float(np.abs(reference).max()))
        bad = np.flatnonzero(~(errors <= limit))
        if bad.size:
            raise CheckFailedError(
                f"the {entry.architecture} {kind} differs from eager transformers by {errors[bad[0]]:.3g} (at most "
                f"{limit:.3g} is allowed) at position {_wanted(entry, index)[bad[0]]} of check sequence {index}.",
                "report this model; `--dump-passes DIR` shows each stage. The bundle was not written.",
            )
        worst = max(worst, float(errors.max()))
    return worst


def _most_logits(entry: ModelEntry) -> int:
    """Logit rows that one sequence may ask of a step: an engine with profiles computes no more than verifying needs."""
    rows = max((profile.num_logit_rows for profile in entry.profiles), default=2 * sum(VERIFY_LENS))
    return rows // len(VERIFY_LENS)


def _wanted(entry: ModelEntry, index: int) -> list[int]:
    """Positions of check sequence ``index`` whose logits are compared."""
    positions: list[int] = []
    start = 0
    for count in (PREFILL_LENS[index], VERIFY_LENS[index]):
        positions += range(start + count - min(count, _most_logits(entry)), start + count)
        start += count
    return positions


def _run(
    folder: Path,
    entry: ModelEntry,
    sequences: Seq[Int64Array],
    *,
    unpad_kv: bool = True,
    steps: Seq[Seq[int]] = (PREFILL_LENS, VERIFY_LENS),
) -> list[Float32Array]:
    """Logits [len, V] of each sequence; NaN where none were asked for."""
    from specexport_runtime.packing.batch import ModelRunner, RowWork

    executor = _make_executor(folder, entry, sequences, unpad_kv=unpad_kv)
    try:
        runner = ModelRunner(executor, unpad_kv=unpad_kv)
        found = [np.full((len(sequence), entry.vocab_size), np.nan, np.float32) for sequence in sequences]
        for counts in steps:
            starts = [runner.kv.kv_len(row) for row in range(len(sequences))]
            given = [min(count, _most_logits(entry)) for count in counts]
            work = [
                RowWork(sequence[start : start + count].tolist(), wanted)
                for sequence, start, count, wanted in zip(sequences, starts, counts, given, strict=True)
            ]
            logits = np.asarray(runner.step(0, work))
            for row, (start, count, wanted) in enumerate(zip(starts, counts, given, strict=True)):
                runner.kv.commit(row, start + count)
                first = runner.logit_starts[row]
                found[row][start + count - wanted : start + count] = logits[first : first + wanted]
    finally:
        executor.close()
    return found


def _make_executor(folder: Path, entry: ModelEntry, sequences: Seq[Int64Array], *, unpad_kv: bool) -> Executor:
    from specexport_runtime.executors.open import backend_of

    backend = backend_of(entry.backend)
    if backend is None:
        raise SpecexportError(f"the runtime has no backend {entry.backend!r} to check a new engine with.")
    return backend.open(
        EngineRequest(
            folder=folder,
            entry=entry,
            role="new engine",
            num_rows=len(sequences),
            kv_capacity=max(len(sequence) for sequence in sequences) + max(VERIFY_LENS),
            lookahead=1,
            spin=False,
            unpad_kv=unpad_kv,
            cuda_graphs=False,
        )
    )

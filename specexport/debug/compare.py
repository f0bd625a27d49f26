"""Two graphs of a model in one step: where they part, which layers are at fault, and what each of those costs.

Three questions about graph B beside its reference A, in a step whose inputs are given:

1. *How far is B from A?* Both run with every common tensor as an output; errors pile up from layer to layer.
2. *Whose error is it?* B runs once more, and every common tensor that a node reads is A's. What then differs in a
   tensor was made between it and the tensors before it.
3. *What does it cost?* A runs once for each layer, with that layer's own error added. The logits are then those of a
   model in which only this layer is B's.

An engine that does not show its layers is held against another by what it leaves behind: cache entries, and logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np

from specexport.compare import relative_error
from specexport.compile.closeness import mean_divergence
from specexport.debug.capture import CapturedStep
from specexport.debug.graph import IN, NUDGE, EngineGraph, Tensors, cut_graph, nudge_graph
from specexport.debug.points import TensorPair, match_tensors
from specexport_runtime.abi import LOGITS
from specexport_runtime.bundle.opened import Bundle
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork

NOTICEABLE = 1e-5
"""Own errors up to this are how sums are ordered; what they do to the logits is not measured."""


@dataclass(frozen=True)
class LayerRow:
    """One tensor that both graphs have."""

    label: str  # the layer, or the operator and the tensor
    op: str  # what gives it
    layer: int | None  # number of the transformer layer; None outside of them
    error: float  # relative error (root mean square) where everything before it is of the graph that is looked at
    within: bool  # ``error`` is within the tolerance
    own_error: float | None  # the same where everything before it is the reference's; None if that cannot be told
    # mean Kullback-Leibler divergence of the next-token distributions, in nats, if only this layer is of the graph that
    # is looked at; None if its own error is too small to be looked at, or it was not asked for
    divergence: float | None


@dataclass(frozen=True)
class Comparison:
    """What was found."""

    rows: tuple[LayerRow, ...]  # every tensor that both graphs have, in the order of the reference graph
    first: str | None  # label of the first that leaves the tolerance; None if none does
    # labels of the layers whose own error does something to the logits, largest divergence first
    ranking: tuple[str, ...]
    tolerance: float  # largest relative error
    divergence: float  # mean Kullback-Leibler divergence of the logits of the whole graphs, in nats
    same_token: float  # share of the step's logit rows whose likeliest token is the same
    # relative error of the graph's logits to the engine's own in this step: graphs with all their layers as outputs are
    # optimized less; None if no graph was replayed
    replayed_error: float | None

    def row(self, label: str) -> LayerRow:
        """The row of a label."""
        return next(row for row in self.rows if row.label == label)


def compare_graphs(
    reference: EngineGraph,  # what is right
    other: EngineGraph,  # what is looked at, the graph that the step was captured from
    step: CapturedStep,
    *,
    tolerance: float,  # largest relative error
    same_names: bool,  # names that tracing gave mean the same in both graphs
    layers: Sequence[str] = (),  # patterns of the labels whose effect on the logits is measured; empty takes all
    num_threads: int = 1,
    # called with a label, its number from 1 and how many there are, before its effect is measured
    on_layer: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Compare two graphs of a model in one step."""
    pairs = match_tensors(reference, other, same_names=same_names)
    if not any(pair.reference.key[0] != "name" for pair in pairs):
        raise CheckFailedError("the two graphs have no layer in common.")
    _check_layers(layers, pairs)
    wanted = [pair.reference.name for pair in pairs], [pair.name for pair in pairs]
    right, wrong = (
        graph.run(step.feeds_of(graph.inputs()), list(dict.fromkeys([*names, LOGITS.name])), num_threads)
        for graph, names in zip((reference, other), wanted, strict=True)
    )
    # Another lowering may hold the same numbers in another shape.
    pairs = [pair for pair in pairs if right[pair.reference.name].size == wrong[pair.name].size]
    own = _own_tensors(other, step, pairs, right, wrong, num_threads)
    errors, own_errors = _errors(pairs, right, wrong), _errors(pairs, right, own)
    faulty = [
        pair
        for pair, error in zip(pairs, own_errors, strict=True)
        if error > NOTICEABLE and _matches_any(pair.label, layers)
    ]
    effects = _effects(reference, step, faulty, right, own, num_threads, on_layer)
    rows = [
        LayerRow(
            pair.label,
            pair.reference.op,
            pair.reference.layer,
            error,
            within=error <= tolerance,
            own_error=own_error,
            divergence=effects.get(pair.label),
        )
        for pair, error, own_error in zip(pairs, errors, own_errors, strict=True)
    ]
    ranking = sorted(effects, key=lambda label: -effects[label])
    replayed = relative_error(wrong[LOGITS.name], step.logits)
    return _make_comparison(rows, ranking, tolerance, right, wrong, replayed)


def _make_comparison(
    rows: Sequence[LayerRow],
    ranking: Sequence[str],
    tolerance: float,
    right: Tensors,
    wrong: Tensors,
    replayed: float | None,
) -> Comparison:
    first, second = right[LOGITS.name], wrong[LOGITS.name]
    return Comparison(
        tuple(rows),
        next((row.label for row in rows if not row.within), None),
        tuple(ranking),
        tolerance,
        mean_divergence(second, first),
        float(np.mean(first.argmax(axis=1) == second.argmax(axis=1))),
        replayed,
    )


def _errors(pairs: Sequence[TensorPair], right: Tensors, other: Tensors) -> list[float]:
    """Relative error of each tensor."""
    names = [(pair.reference.name, pair.name) for pair in pairs]
    return [relative_error(other[name].reshape(right[own].shape), right[own]) for own, name in names]


def _check_layers(layers: Sequence[str], pairs: Sequence[TensorPair]) -> None:
    for pattern in layers:
        if not any(_matches_any(pair.label, [pattern]) for pair in pairs):
            known = [pair.label for pair in pairs if pair.reference.key[0] != "name"]
            raise InvalidRequestError(
                f"--layer {pattern}: the two graphs have no such layer in common.",
                f"give one of {known[0]}, {known[1]}, …, {known[-1]}; * stands for anything.",
            )


def _matches_any(label: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(label, pattern) for pattern in patterns)


def _own_tensors(
    other: EngineGraph,
    step: CapturedStep,
    pairs: Sequence[TensorPair],
    right: Tensors,
    wrong: Tensors,
    num_threads: int,
) -> Tensors:
    """What each tensor of the graph is if all that it is computed from is the reference's."""
    given = {pair.name: right[pair.reference.name].reshape(wrong[pair.name].shape) for pair in pairs}
    cut = cut_graph(other, {name: tensor.ndim for name, tensor in given.items()})
    inputs = {name: rank for name, rank in cut.inputs().items() if not name.endswith(IN)}
    feeds = step.feeds_of(inputs) | {name + IN: tensor for name, tensor in given.items()}
    return cut.run(feeds, list(given), num_threads)


def _effects(
    reference: EngineGraph,
    step: CapturedStep,
    pairs: Sequence[TensorPair],
    right: Tensors,
    own: Tensors,
    num_threads: int,
    on_layer: Callable[[str, int, int], None] | None,
) -> dict[str, float]:
    """Divergence of the logits if one layer at a time has its own error, by label."""
    if not pairs:
        return {}
    ranks = {pair.reference.name: right[pair.reference.name].ndim for pair in pairs}
    nudged, logits = nudge_graph(reference, ranks, LOGITS.name)
    inputs = {name: rank for name, rank in nudged.inputs().items() if not name.endswith(NUDGE)}
    feeds = step.feeds_of(inputs) | {name + NUDGE: np.zeros((1,) * rank, np.float32) for name, rank in ranks.items()}
    effects, session = {}, nudged.open([logits], num_threads)
    for number, pair in enumerate(pairs, start=1):
        if on_layer is not None:
            on_layer(pair.label, number, len(pairs))
        name = pair.reference.name
        error = own[pair.name].reshape(right[name].shape) - right[name]
        (found,) = session.run([logits], feeds | {name + NUDGE: error})
        effects[pair.label] = mean_divergence(found, right[LOGITS.name])
    return effects


def compare_engines(
    reference: Bundle, other: Bundle, role: str, step: CapturedStep, *, tolerance: float, num_threads: int | None
) -> Comparison:
    """Repeat a step in two engines, and compare what it leaves; IncompatibleError if one cannot run here."""
    found = []
    for bundle in (other, reference):  # the engine that may not run here comes first
        executor = open_executor(bundle, role, num_threads=num_threads, spin=False)
        try:
            found.append(replay_step(executor, step, bundle.manifest.lookahead))
        finally:
            executor.close()
    wrong, right = found
    count = min(len(right[LOGITS.name]), len(wrong[LOGITS.name]))
    for tensors in found:
        tensors[LOGITS.name] = tensors[LOGITS.name][-count:]
    rows = []
    for name, tensor in right.items():
        error, layer = relative_error(wrong[name], tensor), None if name == LOGITS.name else int(name.split(".")[1])
        op = "linear" if layer is None else "cache"
        rows.append(LayerRow(name, op, layer, error, error <= tolerance, None, None))
    return _make_comparison(rows, (), tolerance, right, wrong, None)


def replay_step(executor: Any, step: CapturedStep, lookahead: int) -> Tensors:
    """Cache entries ``layers.{i}.keys`` and ``.values`` of a step's tokens, and the logits of its last ones."""
    runner, parts = ModelRunner(executor), {"k": "keys", "v": "values"}
    runner.prefill(0, step.context)
    logits = runner.step(0, [RowWork(step.tokens, min(len(step.tokens), lookahead + 1))]).copy()
    found: Tensors = {}
    for name, entries in executor.read_cache_entries(0, step.past, step.past + len(step.tokens)).items():
        kind, _, layer = name.partition("_cache.")
        found[f"layers.{layer}.{parts[kind]}"] = entries
    return {**dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1]))), LOGITS.name: logits}

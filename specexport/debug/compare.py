"""Two graphs of a model in one step: where they part, which layers are at fault, and what each of those costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np

from specexport.compile.closeness import divergence
from specexport.debug.capture import CapturedStep
from specexport.debug.graph import IN, NUDGE, EngineGraph, cut_graph, nudge_graph
from specexport.debug.points import TensorPair, pair_points
from specexport.debug.runs import Tensors, compare_outputs, make_runner, quiet, run_outputs
from specexport_runtime.abi import LOGITS
from specexport_runtime.errors import CheckFailedError, InvalidRequestError
from specexport_runtime.executors.base import Float32Array

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
    """Compare two graphs of a model in one step; CheckFailedError if polygraphy cannot run one of them."""
    pairs = pair_points(reference, other, same_names=same_names)
    if not any(pair.reference.key[0] != "name" for pair in pairs):
        raise CheckFailedError("the two graphs have no layer in common.")
    _check_layers(layers, pairs)
    with quiet():
        names = {pair.reference.name: pair.name for pair in pairs}
        wanted = [*dict.fromkeys([*names, LOGITS.name])], [*dict.fromkeys([*names.values(), LOGITS.name])]
        right, wrong = (
            run_outputs(graph, step.feeds_of(graph.inputs()), outputs, name=name, num_threads=num_threads)
            for graph, outputs, name in zip((reference, other), wanted, ("reference", "debugged"), strict=True)
        )
        # Another lowering may hold the same numbers in another shape.
        pairs = [pair for pair in pairs if right[pair.reference.name].size == wrong[pair.name].size]
        names = {pair.reference.name: pair.name for pair in pairs}
        errors = compare_outputs(right, wrong, names, tolerance)
        own = _own_tensors(other, step, pairs, right, wrong, num_threads)
        own_errors = compare_outputs(right, own, names, tolerance)
        faulty = [
            pair for pair in pairs if own_errors[pair.reference.name][0] > NOTICEABLE and _fits(pair.label, layers)
        ]
        effects = _effects(reference, step, faulty, right, own, num_threads, on_layer)
    rows = tuple(
        LayerRow(
            pair.label,
            pair.reference.op,
            pair.reference.layer,
            *errors[pair.reference.name],
            own_errors[pair.reference.name][0],
            effects.get(pair.label),
        )
        for pair in pairs
    )
    return Comparison(
        rows,
        next((row.label for row in rows if not row.within), None),
        tuple(sorted(effects, key=lambda label: -effects[label])),
        tolerance,
        mean_divergence(right[LOGITS.name], wrong[LOGITS.name]),
        float(np.mean(right[LOGITS.name].argmax(axis=1) == wrong[LOGITS.name].argmax(axis=1))),
        _relative(step.logits, wrong[LOGITS.name]),
    )


def _check_layers(layers: Sequence[str], pairs: Sequence[TensorPair]) -> None:
    for pattern in layers:
        if not any(_fits(pair.label, [pattern]) for pair in pairs):
            known = [pair.label for pair in pairs if pair.reference.key[0] != "name"]
            raise InvalidRequestError(
                f"--layer {pattern}: the two graphs have no such layer in common.",
                f"give one of {known[0]}, {known[1]}, …, {known[-1]}; * stands for anything.",
            )


def _fits(label: str, patterns: Sequence[str]) -> bool:
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
    return run_outputs(cut, feeds, list(given), name="layer by layer", num_threads=num_threads)


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
    effects = {}
    with make_runner(nudged, [logits], name="one layer at a time", num_threads=num_threads) as runner:
        for number, pair in enumerate(pairs, start=1):
            if on_layer is not None:
                on_layer(pair.label, number, len(pairs))
            name = pair.reference.name
            error = own[pair.name].reshape(right[name].shape) - right[name]
            found = runner.infer(feeds | {name + NUDGE: error})[logits]
            effects[pair.label] = mean_divergence(right[LOGITS.name], found)
    return effects


def mean_divergence(right: Float32Array, wrong: Float32Array) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the next-token distributions that logits [R, V] stand for."""
    return float(np.mean([divergence(second, first) for first, second in zip(right, wrong, strict=True)]))


def _relative(right: Float32Array, wrong: Float32Array) -> float:
    size = float(np.square(right, dtype=np.float64).mean())
    return float(np.sqrt(np.square(right - wrong, dtype=np.float64).mean() / size)) if size else float("inf")

"""Engines that do not show their layers, compared by what they leave behind: cache entries of every layer, and logits.

polygraphy's ``TrtRunner`` gives every output its own memory, and these engines write caches in place: so each runs in
its own executor.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.debug.capture import CapturedStep
from specexport.debug.compare import Comparison, LayerRow, mean_divergence
from specexport.debug.runs import Tensors, compare_outputs, quiet
from specexport_runtime.abi import LOGITS
from specexport_runtime.bundle.opened import Bundle
from specexport_runtime.executors.open import open_executor
from specexport_runtime.packing.batch import ModelRunner, RowWork

if TYPE_CHECKING:
    from polygraphy.backend.base import BaseRunner

_PARTS = {"k": "keys", "v": "values"}


def make_engine_runner(bundle: Bundle, role: str, step: CapturedStep, num_threads: int | None) -> "BaseRunner":
    """A polygraphy runner that repeats a step in a bundle's engine, with cache rows that are long enough."""
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class EngineRunner(BaseRunner):  # type: ignore[misc]
        """Runs the tokens before the step and the step, and gives what the step has left."""

        def activate_impl(self) -> None:
            self.executor = open_executor(bundle, role, num_threads=num_threads, spin=False)

        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata()

        def infer_impl(self, feed_dict: Any) -> Any:  # noqa: ARG002  # polygraphy's signature
            self.inference_time = 0.0
            return OrderedDict(replay_step(self.executor, step, bundle.manifest.lookahead))

        def deactivate_impl(self) -> None:
            self.executor.close()

    return EngineRunner(name=bundle.manifest.name)


def replay_step(executor: Any, step: CapturedStep, lookahead: int) -> Tensors:
    """Cache entries ``layers.{i}.keys`` and ``.values`` of a step's tokens, and the logits of its last ones."""
    runner = ModelRunner(executor)
    runner.prefill(0, step.context)
    rows = min(len(step.tokens), lookahead + 1)
    logits = runner.step(0, [RowWork(step.tokens, rows)]).copy()
    found: Tensors = {}
    for name, entries in executor.cache_entries(0, step.past, step.past + len(step.tokens)).items():
        kind, _, layer = name.partition("_cache.")
        found[f"layers.{layer}.{_PARTS[kind]}"] = entries
    return {**dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1]))), LOGITS.name: logits}


def compare_engines(
    reference: Bundle, other: Bundle, role: str, step: CapturedStep, *, tolerance: float, num_threads: int | None
) -> Comparison:
    """Repeat a step in two engines, and compare what it leaves; IncompatibleError if one cannot run here."""
    from polygraphy.comparator import Comparator

    with quiet():
        # The engine that may not run here comes first.
        runners = [make_engine_runner(bundle, role, step, num_threads) for bundle in (other, reference)]
        ((_, (wrong,)), (_, (right,))) = Comparator.run(runners, data_loader=[{}])
        right, wrong = dict(right.items()), dict(wrong.items())
        rows = min(len(right[LOGITS.name]), len(wrong[LOGITS.name]))
        right[LOGITS.name], wrong[LOGITS.name] = right[LOGITS.name][-rows:], wrong[LOGITS.name][-rows:]
        errors = compare_outputs(right, wrong, {name: name for name in right}, tolerance)
    found = tuple(
        LayerRow(name, "cache" if name != LOGITS.name else "linear", _layer_of(name), *errors[name], None, None)
        for name in right
    )
    return Comparison(
        found,
        next((row.label for row in found if not row.within), None),
        (),
        tolerance,
        mean_divergence(right[LOGITS.name], wrong[LOGITS.name]),
        float(np.mean(right[LOGITS.name].argmax(axis=1) == wrong[LOGITS.name].argmax(axis=1))),
        None,
    )


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None

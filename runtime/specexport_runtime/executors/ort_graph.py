"""One graph of a model, open in a session of ONNX Runtime and checked against the manifest."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from specexport_runtime.abi import CACHE_INPUTS, STATE_INPUTS, state_shapes
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.ort_session import open_session


class OrtGraph(NamedTuple):
    """A graph that is ready to run."""

    session: Any  # the ``onnxruntime.InferenceSession``
    inputs: frozenset[str]  # names of all its inputs


def open_graph(
    path: Path,
    entry: ModelEntry,
    step_inputs: Collection[str],
    *,
    num_threads: int,
    spin: bool,
) -> OrtGraph:
    """Open a graph whose inputs must be ``step_inputs`` and the caches and states of ``entry``; see ``open_session``.

    IncompatibleError if the inputs are others, or states have other sizes.
    """
    session = open_session(path, num_threads, spin)
    inputs = frozenset(value.name for value in session.get_inputs())
    caches = {spec.name.format(i=i) for i in range(len(entry.attention.layers)) for spec in CACHE_INPUTS}
    caches |= {spec.name.format(i=i) for i in range(len(entry.states)) for spec in STATE_INPUTS}
    if inputs != caches | set(step_inputs):
        odd = sorted(inputs ^ (caches | set(step_inputs)))
        raise IncompatibleError(f"{path}: inputs differ from the manifest's: {', '.join(odd)}.", "build it again.")
    _check_sizes(path, entry, session)
    return OrtGraph(session, inputs)


def _check_sizes(path: Path, entry: ModelEntry, session: Any) -> None:
    """Compare the sizes of states: a step would find only that its memory does not fit."""
    wanted = state_shapes(entry.states, 0, 0)
    for value in session.get_inputs():
        shape = wanted.get(value.name)
        if shape is None:
            continue
        sizes = [size for size in value.shape if isinstance(size, int)]
        expected = [1, *(size for size in shape[2:] if size)]
        if sizes != expected or value.type != "tensor(float)":
            raise IncompatibleError(
                f"{path}: {value.name} has the sizes {sizes} ({value.type}), and the manifest says {expected}.",
                "build it again.",
            )

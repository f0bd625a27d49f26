"""Running graphs with polygraphy: all layers of a step, each layer alone, and what each layer's error does.

Three questions about graph B beside its reference A, in a step whose inputs are given:

1. *How far is B from A?* Both run with every common tensor as an output; errors pile up from layer to layer.
2. *Whose error is it?* B runs once more, and every common tensor that a node reads is A's. What then differs in a
   tensor was made between it and the tensors before it.
3. *What does it cost?* A runs once for each layer, with that layer's own error added. The logits are then those of a
   model in which only this layer is B's.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from specexport.debug.capture import Feeds
from specexport.debug.graph import EngineGraph
from specexport_runtime.errors import CheckFailedError, MissingDependencyError, not_installed, pip_install

Tensors = dict[str, npt.NDArray[Any]]


def require_polygraphy() -> None:
    """Check that polygraphy and what it needs is there; MissingDependencyError if not."""
    from importlib.util import find_spec

    missing = [name for name in ("polygraphy", "onnx", "onnx_ir", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"`specexport debug` needs {not_installed(missing)}.",
            pip_install("debug", "export", "cpu"),
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Polygraphy says nothing on standard output, and its errors are ours."""
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        try:
            yield
        except PolygraphyException as error:
            raise CheckFailedError(f"polygraphy gave up: {str(error).splitlines()[0]}.") from error


def run_outputs(graph: EngineGraph, feeds: Feeds, outputs: Sequence[str], *, name: str, num_threads: int) -> Tensors:
    """Run a graph once with some tensors as its outputs."""
    from polygraphy.comparator import Comparator

    runner = make_runner(graph, outputs, name=name, num_threads=num_threads)
    ((_, (result,)),) = Comparator.run([runner], data_loader=[feeds])
    return dict(result.items())


def make_runner(graph: EngineGraph, outputs: Sequence[str], *, name: str, num_threads: int) -> Any:
    """An ``OnnxrtRunner`` of a graph that gives ``outputs``."""
    from polygraphy.backend.onnx import ModifyOutputs
    from polygraphy.backend.onnxrt import OnnxrtRunner

    marked = ModifyOutputs(graph.to_proto, outputs=list(outputs))
    return OnnxrtRunner(lambda: _open(marked(), graph.folder, num_threads), name=name)


def _open(proto: Any, folder: Path, num_threads: int) -> Any:
    """A session over the engine's own weights. polygraphy's loader would want them beside the graph, or inside it."""
    import onnxruntime

    from specexport_runtime.bundle.files import native_path
    from specexport_runtime.executors.external_data import FOLDER_KEY, follow_links
    from specexport_runtime.executors.operators import register

    options = onnxruntime.SessionOptions()
    register(options)
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry(FOLDER_KEY, native_path(follow_links(proto, folder)))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare_outputs(
    reference: Tensors, other: Tensors, names: dict[str, str], tolerance: float
) -> dict[str, tuple[float, bool]]:
    """Relative error (root mean square) of each tensor, and whether it is within the tolerance.

    polygraphy's ``Comparator`` gives a signal-to-noise ratio: ``10 ** (-dB / 20)``. ``names`` maps the reference's to
    the other's.
    """
    from polygraphy.comparator import Comparator, IterationResult, RunResults, SnrCompareFunc

    sides = (
        {name: reference[name] for name in names},
        {name: other[twin].reshape(reference[name].shape) for name, twin in names.items()},
    )
    results = RunResults()
    for runner, tensors in zip(("reference", "debugged"), sides, strict=True):
        results.append((runner, [IterationResult(tensors, runner_name=runner)]))
    compare = SnrCompareFunc(snr_threshold=-20 * math.log10(tolerance))
    (found,) = Comparator.compare_accuracy(results, compare_func=compare)
    ((result,),) = found.values()
    return {name: (float(10 ** (-item.snr / 20)), bool(item)) for name, item in result.items()}

"""A lowered graph as an engine of ``TrtExecutor``: torch for the operators, our kernels for the plugin nodes.

Pass ``proof_loader(device)`` as the executor's ``load``. An engine file is one of ``graph.write_engine``.
"""
# mypy: disable-error-code="no-any-unimported"

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specexport_runtime.abi import CU_NEW_TOKENS, INPUT_IDS
from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.errors import SpecexportError, UnsupportedModelError
from specexport_runtime.executors.trt_engine import EngineTensor
from specexport_runtime.executors.trt_load import EngineLoader
from tools.proof.devices import Device
from tools.proof.graph import Graph, Node, read_engine
from tools.proof.operators import OPERATORS
from tools.proof.plugins import find_plugin, run_plugin

if TYPE_CHECKING:
    from torch import Tensor

Run = Callable[[list[Any], int], Any]


class Step(NamedTuple):
    """One node, ready to run."""

    run: Run  # takes its inputs and the new tokens of a row; returns a tensor, or several in a list or tuple
    inputs: tuple[str, ...]  # names of its tensors; lists of ints are bound in ``run``
    outputs: tuple[str, ...]  # names of what it makes
    last_used: tuple[str, ...]  # names that no later step reads


def proof_loader(device: Device) -> EngineLoader:
    """A loader for ``TrtExecutor(load=…)``, for one executor on one device."""

    def load(path: Path, _file: EngineFile, _gpu_name: str) -> ProofEngine:
        graph, weights = read_engine(path)
        return ProofEngine(graph, dict(weights), device)

    return load


class ProofEngine:
    """See ``trt_engine.TrtEngine``; ``weights`` are numpy arrays by the initializer's name.

    UnsupportedModelError: an operator is not known here, or its shapes depend on what it computes.
    """

    activation_bytes = 0  # torch has its own memory

    def __init__(self, graph: Graph, weights: dict[str, Any], device: Device) -> None:
        import torch

        self.graph, self.device = graph, device
        self.tensors = tuple(
            EngineTensor(tensor.name, tensor.shape, is_input)
            for tensors, is_input in ((graph.inputs, True), (graph.outputs, False))
            for tensor in tensors
        )
        self.steps = plan_steps(graph)
        read = {name for step in self.steps for name in step.inputs}  # shapes and axes are bound already
        self.constants: dict[str, Tensor] = {}
        for name in (*graph.constants, *graph.weights):
            array = graph.constants[name] if name in graph.constants else weights.pop(name)
            if name in read:
                self.constants[name] = torch.from_numpy(array).to(device.name)

    def make_context(self, profile: int, activations: int, stream: int, *, is_fixed: bool) -> "ProofContext":  # noqa: ARG002
        """See ``trt_engine.TrtEngine.make_context``; every context takes any size."""
        return ProofContext(self)

    def close(self) -> None:
        """See ``trt_engine.TrtEngine.close``."""
        self.constants.clear()


class ProofContext:
    """See ``trt_engine.TrtEngineContext``."""

    def __init__(self, engine: ProofEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._work: Callable[[], None] | None = None

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """See ``EngineContext.set_shape``."""
        self._shapes[name] = shape
        self._work = None

    def set_address(self, name: str, address: int) -> None:
        """See ``EngineContext.set_address``."""
        self._addresses[name] = address
        self._work = None

    def is_capturable(self, stream: int) -> bool:  # noqa: ARG002
        """See ``EngineContext.is_capturable``."""
        return True

    def enqueue(self, stream: int) -> None:
        """See ``EngineContext.enqueue``; SpecexportError if torch or Triton failed."""
        if self._work is None:
            self._work = self._bind()
        try:
            self._engine.device.put(stream, self._work)
        except SpecexportError:
            raise
        except Exception as error:
            raise SpecexportError(
                f"the proof engine could not run the step: {type(error).__name__}: {error}"
            ) from error

    def _bind(self) -> Callable[[], None]:
        """The step as it is bound now: what is bound later changes nothing in a graph that was recorded."""
        graph, view = self._engine.graph, self._engine.device.view
        inputs = {
            tensor.name: view(self._addresses[tensor.name], self._shapes[tensor.name], tensor.dtype)
            for tensor in graph.inputs
        }
        num_rows = self._shapes["logit_rows"][0]
        outputs = {}
        for tensor in graph.outputs:
            source = tensor.name.replace("_out", "")
            if source in inputs:
                if self._addresses[tensor.name] != self._addresses[source]:
                    raise SpecexportError(f"{tensor.name} must be the memory of {source}.")
                continue
            outputs[tensor.name] = view(self._addresses[tensor.name], (num_rows, *tensor.shape[1:]), tensor.dtype)
        num_seqs = self._shapes[CU_NEW_TOKENS.name][0] - 1
        new_tokens = -(-self._shapes[INPUT_IDS.name][0] // max(num_seqs, 1))
        steps, constants = self._engine.steps, self._engine.constants

        def work() -> None:
            import torch

            with torch.inference_mode():
                values = run_steps(steps, constants | inputs, new_tokens)
                for name, output in outputs.items():
                    output.copy_(values[name])

        return work


def run_steps(steps: tuple[Step, ...], values: "dict[str, Tensor]", new_tokens: int) -> "dict[str, Tensor]":
    """Run a graph; returns all values that were not dropped, the graph's outputs among them."""
    for step in steps:
        made = step.run([values[name] for name in step.inputs], new_tokens)
        if len(step.outputs) == 1 and not isinstance(made, (list, tuple)):
            values[step.outputs[0]] = made
        else:
            values.update(zip(step.outputs, made, strict=True))
        for name in step.last_used:
            del values[name]
    return values


def plan_steps(graph: Graph) -> tuple[Step, ...]:
    """The nodes of a graph as steps; UnsupportedModelError as in :class:`ProofEngine`."""
    kept = {tensor.name for tensor in graph.outputs}
    steps: list[Step] = []
    for node in reversed(graph.nodes):
        run, tensors = _plan_node(node, graph)
        dropped = tuple(name for name in dict.fromkeys((*tensors, *node.outputs)) if name not in kept)
        kept.update(tensors)
        steps.append(Step(run, tensors, node.outputs, dropped))
    return tuple(reversed(steps))


def _plan_node(node: Node, graph: Graph) -> tuple[Run, tuple[str, ...]]:
    """How a node runs, and the names of the tensors that it takes."""
    spec = find_plugin(node.op)
    if spec is not None:
        return lambda tensors, new_tokens: run_plugin(spec, tensors, new_tokens), node.inputs
    if node.op not in OPERATORS:
        raise UnsupportedModelError(f"the proof engine has no operator {node.op}, which {node.outputs[0]} comes from.")
    operator = OPERATORS[node.op]
    bound: dict[int, list[int] | None] = {i: None for i, name in enumerate(node.inputs) if not name}
    for i in operator.ints:
        if i < len(node.inputs) and node.inputs[i]:
            if node.inputs[i] not in graph.constants:
                raise UnsupportedModelError(f"{node.op} {node.outputs[0]} takes a shape that the graph computes.")
            bound[i] = graph.constants[node.inputs[i]].reshape(-1).tolist()
    places = [i for i in range(len(node.inputs)) if i not in bound]
    function, attributes, total = operator.run, node.attributes, len(node.inputs)

    def run(tensors: list[Any], _: int) -> Any:
        arguments = [bound.get(i) for i in range(total)]
        for i, tensor in zip(places, tensors, strict=True):
            arguments[i] = tensor
        return function(*arguments, **attributes)

    return run, tuple(node.inputs[i] for i in places)

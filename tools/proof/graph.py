"""The file of a proof engine: a lowered graph as JSON, and its weights beside it. Needs numpy only.

A machine with a GPU often lacks all that a graph is traced with, so the graphs of the models of the tests for a GPU
are kept in ``graphs/``, and their weights are made on the spot (``checkpoints``).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FOLDER = Path(__file__).parent / "graphs"
_GRAPH = "graph"  # entry of the file; no value of a graph is called that


class Tensor(NamedTuple):
    """An input or output of a graph: its name, numpy dtype, and shape with -1 where steps differ."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Node(NamedTuple):
    """A node: its operator, names of its inputs (empty where one is left out) and outputs, plain attributes."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


class Graph(NamedTuple):
    """A lowered graph without its weights."""

    inputs: tuple[Tensor, ...]  # step inputs, then caches
    outputs: tuple[Tensor, ...]  # logits, token ids and caches
    nodes: tuple[Node, ...]  # in an order in which they can run
    constants: Mapping[str, Array]  # small initializers by name
    weights: Mapping[str, str]  # all other initializers: name of the checkpoint's tensor, or "" where it is not known

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The cache inputs, [-1, H, L, D]: keys and values of each layer in turn."""
        return tuple(tensor for tensor in self.inputs if "_cache." in tensor.name)


def to_json(graph: Graph) -> str:
    """A graph as text, one node a line."""
    constants = {
        name: [str(array.dtype), list(array.shape), array.reshape(-1).tolist()]
        for name, array in graph.constants.items()
    }
    parts = {
        "inputs": [json.dumps(item) for item in graph.inputs],
        "outputs": [json.dumps(item) for item in graph.outputs],
        "nodes": [json.dumps(item, separators=(",", ":")) for item in graph.nodes],
        "constants": [json.dumps([name, *rest]) for name, rest in constants.items()],
        "weights": [json.dumps(item) for item in graph.weights.items()],
    }
    between = ",\n"
    body = between.join(f'"{name}": [\n{between.join(lines)}\n]' for name, lines in parts.items())
    return f"{{\n{body}\n}}\n"


def from_json(text: str) -> Graph:
    """The inverse of :func:`to_json`."""
    data = json.loads(text)
    inputs, outputs = (
        tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in data[key]) for key in ("inputs", "outputs")
    )
    nodes = tuple(Node(op, tuple(given), tuple(made), rest) for op, given, made, rest in data["nodes"])
    constants = {name: np.array(values, dtype).reshape(shape) for name, dtype, shape, values in data["constants"]}
    return Graph(inputs, outputs, nodes, constants, dict(data["weights"]))


def shipped_graph(model: str, role: str) -> Graph:
    """The kept graph of a model (``"small"``, ``"target"``)."""
    return from_json((FOLDER / f"{model}-{role}.json").read_text(encoding="utf-8"))


def write_engine(path: Path, graph: Graph, weights: Mapping[str, Array]) -> None:
    """Write an engine file, complete when this returns; ``weights`` are float16 or float32, by name of initializer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    text = np.frombuffer(to_json(graph).encode(), np.uint8)
    arrays: dict[str, Array] = {_GRAPH: text} | {name: weights[name] for name in graph.weights}
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    part.replace(path)


def read_engine(path: Path) -> tuple[Graph, Iterable[tuple[str, Array]]]:
    """Read an engine file: the graph, and its weights one after another."""
    file = np.load(path, allow_pickle=False)
    graph = from_json(file[_GRAPH].tobytes().decode())
    return graph, ((name, file[name]) for name in graph.weights)

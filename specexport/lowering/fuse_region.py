"""What rotates a query or a key: the part of a traced graph between a projection and its attention, and what it does.

A rotary embedding comes in many forms (one operator, halves that are swapped and negated, pairs, a part of each head
only, scaled frequencies). Instead of matching forms, the part of the graph that depends on ``positions`` is cut out and
run: what it does to chosen vectors is the rotation's tables, what it does to random ones checks them.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from specexport_runtime.abi import POSITIONS

if TYPE_CHECKING:
    import onnx_ir as ir

_MAX_NODES = 64
_TOLERANCE = 1e-5  # of vectors with entries around 1
_ROOT = "root"  # what is rotated, in the model of a region
Array = npt.NDArray[np.float32]


class Region(NamedTuple):
    """The nodes between ``root``, which knows no position, and ``value``, an input of attention."""

    root: "ir.Value"  # what is rotated, in a layout that ``RegionProbe`` knows
    value: "ir.Value"  # the result, [T, heads*D]
    # names of the values that depend on positions alone and meet the data: regions with the same tables rotate by the
    # same angles
    tables: frozenset[str]


class Rotation(NamedTuple):
    """A rotary embedding as tables."""

    cos: Array  # [rows, rotary_dim / 2], times the scale that the model gives them
    sin: Array  # likewise
    interleaved: bool  # pairs are neighbours, not halves

    def apply(self, x: Array) -> Array:
        """Rotate x [rows, heads, D], row p at position p."""
        half = self.cos.shape[1]
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        out = x.copy()
        if self.interleaved:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            out[..., 0 : 2 * half : 2] = first * cos - second * sin
            out[..., 1 : 2 * half : 2] = second * cos + first * sin
        else:
            first, second = x[..., :half], x[..., half : 2 * half]
            out[..., :half] = first * cos - second * sin
            out[..., half : 2 * half] = second * cos + first * sin
        return out


def position_nodes(graph: "ir.Graph") -> tuple[set["ir.Value"], set["ir.Value"]]:
    """Values that depend on positions, and those of them that depend on nothing else (constants aside)."""
    start = next(value for value in graph.inputs if value.name == POSITIONS.name)
    dependent, alone = {start}, {start}
    for node in graph:
        given = [x for x in node.inputs if x is not None and not x.is_initializer()]
        if node.domain == "" and any(x in dependent for x in given):
            dependent.update(node.outputs)
            if all(x in alone for x in given):
                alone.update(node.outputs)
    return dependent, alone


def find_region(
    value: "ir.Value", order: "dict[ir.Node, int]", dependent: "set[ir.Value]", alone: "set[ir.Value]"
) -> Region | None:
    """The region that ends in ``value``, from the nearest value without positions; None if it is not understood."""
    frontier: set[ir.Value] = {value}
    tables: set[ir.Value] = set()
    for passed in range(_MAX_NODES):
        if len(frontier) == 1 and (root := next(iter(frontier))) not in dependent:
            if any(x.dtype not in (None, value.dtype) for x in tables):
                return None  # it rotates in another type than it is given, and tables have the type of what they turn
            names = frozenset(str(x.name) for x in tables)
            return Region(root, value, names) if passed else None
        last = max(frontier, key=lambda x: -1 if x.producer() is None else order[x.producer()])  # type: ignore[index]
        node = last.producer()
        if node is None or node.domain != "":
            return None
        frontier.difference_update(node.outputs)
        for x in node.inputs:
            if x is None or x.is_initializer():
                continue
            (tables if x in alone else frontier).add(x)
        if not frontier:
            return None
    return None


class RegionProbe:
    """Runs a region on heads [rows, num_heads, head_dim]; ValueError if the layout of its root is not known."""

    def __init__(self, region: Region, opset: int, num_heads: int, head_dim: int) -> None:
        import onnxruntime

        self.heads, self.dim = num_heads, head_dim
        self.root_dims = [dim if isinstance(dim, int) else -1 for dim in region.root.shape or ()]
        by_token = [1, -1, num_heads, head_dim], [1, -1, num_heads * head_dim]
        if self.root_dims not in ([1, num_heads, -1, head_dim], *by_token):
            raise ValueError(f"{region.root.name} has shape {region.root.shape}")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            _extract_model(region, opset), options, providers=["CPUExecutionProvider"]
        )

    def run(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        """What becomes of x [rows, heads, D] at ``positions`` [rows]."""
        rows = len(x)
        root = x[None].transpose(0, 2, 1, 3) if self.root_dims[1] == self.heads and len(self.root_dims) == 4 else x
        shape = [rows if dim == -1 else dim for dim in self.root_dims]
        root = np.ascontiguousarray(root).reshape(shape)
        feeds = {_ROOT: root, POSITIONS.name: positions}
        wanted = {item.name for item in self.session.get_inputs()}
        (out,) = self.session.run(None, {name: feeds[name] for name in wanted})
        return np.asarray(out, np.float32).reshape(rows, self.heads, self.dim)


def _extract_model(region: Region, opset: int) -> bytes:
    import onnx_ir as ir

    whole = region.root.graph
    assert whole is not None  # noqa: S101 - a traced model's value
    positions = next(value for value in whole.inputs if value.name == POSITIONS.name)
    graph = ir.convenience.extract(whole, [region.root, positions], [region.value])
    graph.inputs[0].name = _ROOT
    graph.opset_imports.clear()
    graph.opset_imports[""] = opset
    _widen_to_float32(graph)
    return bytes(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())


def _widen_to_float32(graph: "ir.Graph") -> None:
    """Let a region of 16-bit values compute in float32: what it does is asked for, not what it rounds."""
    import onnx_ir as ir

    half, whole = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}, ir.DataType.FLOAT
    for weight in graph.initializers.values():
        if weight.dtype in half and weight.const_value is not None:
            weight.const_value = ir.tensor(weight.const_value.numpy().astype(np.float32), name=weight.name)
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() in half:
            node.attributes.add(ir.AttrInt64("to", int(whole)))
    for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
        if value.dtype in half:
            value.type = ir.TensorType(whole)  # not its dtype: copies of a value share the type


def measure_rotation(probe: RegionProbe, rows: int, limit: int | None = None) -> Rotation | None:
    """The tables of positions 0 … rows-1 (the last repeated after ``limit``); None for no rotary embedding."""
    limit = rows if limit is None else min(rows, limit)
    dim = probe.dim
    one = np.zeros((2, probe.heads, dim), np.float32)
    one[..., 0] = 1
    moved = np.flatnonzero(probe.run(one, np.array([0, 1]))[1, 0])
    if len(moved) != 2 or moved[0] != 0:
        return None
    interleaved = bool(moved[1] == 1 and dim > 2)
    first = np.zeros((rows, 1, dim), np.float32)
    first[..., 0 : dim : 2 if interleaved else 1] = 1
    if not interleaved:
        first[..., moved[1] :] = 0
    out = probe.run(np.repeat(first, probe.heads, 1), np.minimum(np.arange(rows), limit - 1))[:, 0]
    if interleaved:
        half = int(np.count_nonzero(np.any(out[:, 1::2] != 0, axis=0)))
        cos, sin = out[:, 0 : 2 * half : 2], out[:, 1 : 2 * half : 2]
    else:
        half = int(moved[1])
        cos, sin = out[:, :half], out[:, half : 2 * half]
    rotation = Rotation(np.ascontiguousarray(cos), np.ascontiguousarray(sin), interleaved)
    return rotation if is_same_rotation(probe, rotation, limit) else None


def is_same_rotation(probe: RegionProbe, rotation: Rotation, limit: int | None = None) -> bool:
    """Whether the region does to random vectors what the tables say, at positions spread over all below ``limit``."""
    random = np.random.default_rng(0)
    rows = len(rotation.cos) if limit is None else min(limit, len(rotation.cos))
    positions = np.unique(np.linspace(0, rows - 1, 16).astype(np.int64))
    x = random.standard_normal((len(positions), probe.heads, probe.dim), np.float32)
    part = Rotation(rotation.cos[positions], rotation.sin[positions], rotation.interleaved)
    allowed = _TOLERANCE * max(1.0, float(np.abs(part.cos).max()))
    return bool(np.allclose(probe.run(x, positions), part.apply(x), rtol=0, atol=allowed))

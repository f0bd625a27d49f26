"""How passes and lowerings write ONNX: one dialect, and what it promises."""

import ast
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specexport.onnx_emit import Emitter, SharedResults, add_input, constant, lazy_weight

SOURCES = Path(__file__).parents[2] / "specexport"
MAKES_NODES = {"ir.node", "ir.Node", "ir.tape.Tape", "ir.from_onnx_text", "onnx.helper.make_node", "helper.make_node"}
MAKES_NODES |= {f"{at}.parse_{kind}" for at in ("parser", "onnx.parser") for kind in ("function", "graph", "node")}
MAY_MAKE_NODES = {("onnx_emit.py", "ir.node"), ("lowering/recurrence.py", "parser.parse_function")}
"""Nodes of a graph, and bodies of model-local functions."""
LOADED_FOR_ONNX_IR = (
    "passes",
    "compile/check_parts.py",
    "trace/export.py",
    "trace/unroll.py",
    "debug/graph.py",
    "debug/save.py",
    "debug/points.py",
)
"""Passes derive from onnx_ir's, and nothing loads the trace but to trace, or the graphs of `debug` but to compare them:
these import it at the top."""


def graph() -> ir.Graph:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["T", 4]))
    return ir.Graph([x], [], nodes=[], opset_imports={"": 23}, name="g")


def test_nothing_else_makes_nodes_and_onnx_ir_is_loaded_when_it_is_needed() -> None:
    makers, at_the_top = set(), set()
    for path in SOURCES.rglob("*.py"):
        name, tree = path.relative_to(SOURCES).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        makers |= {(name, call) for call in calls & MAKES_NODES}
        imports = [part.name for node in tree.body if isinstance(node, ast.Import) for part in node.names]
        at_the_top |= {name for each in imports if each.split(".")[0] == "onnx_ir"}
    assert makers == MAY_MAKE_NODES
    assert at_the_top
    assert not [name for name in at_the_top if not name.startswith(LOADED_FOR_ONNX_IR)]


def test_names_tell_the_place_or_are_the_graphs() -> None:
    given = graph()
    named, plain = Emitter(given, "layer.0"), Emitter(given)
    first = named.op("Neg", given.inputs[0])
    second = named.op("Abs", first, name="magnitude")
    halves = named.node("Split", [second], {"axis": 1, "num_outputs": 2}, outputs=2)
    third = plain.op("Neg", halves.outputs[1])
    assert [node.name for node in named.nodes] == ["layer.0.0.Neg", "magnitude", "layer.0.2.Split"]
    assert (first.name, second.name, third.name) == ("layer.0.0.Neg", None, None)
    assert [value.name for value in halves.outputs] == ["layer.0.2.Split.0", "layer.0.2.Split.1"]
    named.place()
    plain.place()
    assert second.name == "val_0"
    assert not named.nodes
    assert [node.op_type for node in given] == ["Neg", "Abs", "Split", "Neg"]


def test_dtypes_follow_the_inputs_or_the_operator() -> None:
    given = graph()
    emit, (x,) = Emitter(given, "e"), given.inputs
    wide = emit.cast(x, ir.DataType.FLOAT)
    less = emit.op("Less", x, emit.const(1.0, "float16"))
    assert emit.cast(wide, ir.DataType.FLOAT) is wide
    assert [value.dtype for value in (wide, less, emit.op("Shape", x), emit.op("ArgMax", x))] == [
        ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT64,
    ]  # fmt: skip
    assert emit.op("Where", less, emit.const(0), emit.const(1)).dtype == ir.DataType.INT64
    assert emit.op("TRT_Attention", None, x).dtype == x.dtype
    assert emit.op("Neg", x, shape=["T", 4]).shape == ir.Shape(["T", 4])


def test_equal_constants_are_one() -> None:
    given = graph()
    emit = Emitter(given, "e")
    assert emit.const([1, 2]) is Emitter(given, "f").const([1, 2])
    others = [emit.const([1, 3]), emit.const([[1, 2]]), emit.const([1, 2], "int32"), emit.const(range(99))]
    assert len({emit.const([1, 2]), *others, emit.const(range(1, 100))}) == 6
    half = constant(given, "half", np.float16([0.5]))
    assert constant(given, "half", np.float16([0.5])) is half
    assert half.dtype == ir.DataType.FLOAT16
    with pytest.raises(ValueError, match="another constant half"):
        constant(given, "half", np.float16([0.25]))


def test_a_lazy_weight_is_made_when_it_is_read() -> None:
    given, made = graph(), []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(6, dtype=np.float32).reshape(2, 3)

    weight = lazy_weight(given, "w", ir.DataType.FLOAT, [2, 3], make)
    assert lazy_weight(given, "w", ir.DataType.FLOAT, [2, 3], pytest.fail) is weight
    with pytest.raises(ValueError, match="another weight w"):
        lazy_weight(given, "w", ir.DataType.FLOAT, [3, 2], make)
    assert not made
    assert weight.const_value is not None
    np.testing.assert_array_equal(weight.const_value.numpy(), make())


def test_nodes_go_where_they_are_placed_and_take_the_place_of_another() -> None:
    given = graph()
    before = Emitter(given, "old")
    old = before.op("Neg", given.inputs[0], shape=["T", 4], name="old")
    reader = before.op("Abs", old)
    before.place()
    emit = Emitter(given, "new")
    emit.replace(old.producer(), [emit.node("Neg", [emit.op("Identity", given.inputs[0])]).outputs[0]])
    (read,) = reader.producer().inputs
    assert (read.name, read.dtype, read.shape) == ("val_0", ir.DataType.FLOAT16, ir.Shape(["T", 4]))
    for place, kind in (("before", "Sin"), ("after", "Exp")):
        emit = Emitter(given, place)
        emit.op(kind, given.inputs[0])
        emit.place(**{place: reader.producer()})
    assert [node.op_type for node in given] == ["Identity", "Neg", "Sin", "Abs", "Exp"]
    add_input(given, "late", ir.DataType.INT32, ["B"])
    add_input(given, "early", ir.DataType.INT32, ["B"], at=0)
    assert [value.name for value in given.inputs] == ["early", "x", "late"]


def test_tensors_that_are_made_together_are_made_once_for_each_round() -> None:
    made: list[int] = []

    def make() -> tuple[np.ndarray, ...]:
        made.append(1)
        return np.array([len(made)]), np.array([10 * len(made)])

    both = SharedResults(make)
    assert [int(both.part(at)[0]) for at in (0, 1, 1, 0)] == [1, 10, 20, 2]
    assert len(made) == 2

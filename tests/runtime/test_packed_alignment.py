"""Packed int4 weights in a file of their own: what ONNX Runtime gets wrong there, and that it is mended."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from specexport_runtime.executors import ort_session
from specexport_runtime.executors.packed_alignment import ALIGNMENT, align_packed
from specexport_runtime.executors.prepacked import DATA_NAME, GRAPH_NAME

LAYERS = 4
DEPTH, WIDTH, BLOCK = 64, 48, 32


def save_model(path: Path, *, nested: bool) -> None:
    """A few short ``MatMulNBits`` side by side, or inside the branch of an ``If`` that every step takes."""
    generator = np.random.default_rng(3)
    blocks = DEPTH // BLOCK
    nodes, weights = [], []
    for i in range(LAYERS):
        parts = {
            f"codes{i}": generator.integers(0, 256, (WIDTH, blocks, BLOCK // 2), np.uint8),
            f"scales{i}": generator.uniform(0.01, 0.02, WIDTH * blocks).astype(np.float32),
            f"zeros{i}": generator.integers(0, 256, WIDTH * blocks // 2, np.uint8),
        }
        weights += [numpy_helper.from_array(value, name) for name, value in parts.items()]
        attributes = {"K": DEPTH, "N": WIDTH, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        inputs = ["x", *parts]
        nodes.append(helper.make_node("MatMulNBits", inputs, [f"y{i}"], domain="com.microsoft", **attributes))
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["T", WIDTH]) for i in range(LAYERS)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", DEPTH])]
    if nested:
        inputs.append(helper.make_tensor_value_info("gate", TensorProto.BOOL, []))
        zeros = [helper.make_node("Sub", [f"y{i}", f"y{i}"], [f"n{i}"]) for i in range(LAYERS)]
        others = [helper.make_tensor_value_info(f"n{i}", TensorProto.FLOAT, ["T", WIDTH]) for i in range(LAYERS)]
        branches = {
            "then_branch": helper.make_graph(nodes, "then", [], outputs, weights),
            "else_branch": helper.make_graph([*nodes, *zeros], "else", [], others, weights),
        }
        nodes = [helper.make_node("If", ["gate"], [value.name for value in outputs], **branches)]
        weights = []
    graph = helper.make_graph(nodes, "int4", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def packed_offsets(graph: onnx.GraphProto) -> list[int]:
    """Where each packed buffer lies, those of subgraphs included."""
    entries = [entry.value for tensor in graph.initializer for entry in tensor.external_data if "prepack" in entry.key]
    found = [int(buffer.split(";")[0]) for value in entries for buffer in value.split("|")[1:]]
    subgraphs = [each.g for node in graph.node for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]
    return found + [offset for subgraph in subgraphs for offset in packed_offsets(subgraph)]


def outputs(session: object, *, nested: bool) -> list[np.ndarray]:
    """Outputs of steps of 1, 2 and 5 tokens."""
    generator = np.random.default_rng(4)
    feeds = [{"x": generator.standard_normal((tokens, DEPTH), np.float32)} for tokens in (1, 2, 5)]
    gate = {"gate": np.array(True)} if nested else {}
    return [value for feed in feeds for value in session.run(None, feed | gate)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("nested", [False, True])
def test_what_the_file_gives_is_what_the_engine_gives(
    nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def note(graph: Path, data: Path) -> int:
        model = onnx.load(graph, load_external_data=False)
        assert len(packed_offsets(model.graph)) >= LAYERS
        # Should ONNX Runtime align them one day, this module has done its work.
        assert any(offset % ALIGNMENT for offset in packed_offsets(model.graph))
        moved.append(align_packed(graph, data))
        return moved[-1]

    monkeypatch.setattr(ort_session, "align_packed", note)
    save_model(tmp_path / "engine.onnx", nested=nested)
    ort_session._write_prepacked(tmp_path / "engine.onnx", tmp_path, 1)
    assert moved[0] > 0
    written = onnx.load(tmp_path / GRAPH_NAME, load_external_data=False)
    assert not any(offset % ALIGNMENT for offset in packed_offsets(written.graph))
    assert align_packed(tmp_path / GRAPH_NAME, tmp_path / DATA_NAME) == 0
    expected = outputs(ort_session._open_plain(tmp_path / "engine.onnx", 1, False), nested=nested)
    found = outputs(ort_session._open_prepacked(tmp_path, 1, False), nested=nested)
    for want, got in zip(expected, found, strict=True):
        np.testing.assert_array_equal(want, got)


def test_unaligned_the_file_gives_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "align_packed", lambda graph, data: 0)
    save_model(tmp_path / "engine.onnx", nested=False)
    ort_session._write_prepacked(tmp_path / "engine.onnx", tmp_path, 1)
    expected = outputs(ort_session._open_plain(tmp_path / "engine.onnx", 1, False), nested=False)
    found = outputs(ort_session._open_prepacked(tmp_path, 1, False), nested=False)
    assert not all(np.array_equal(want, got) for want, got in zip(expected, found, strict=True))


def test_the_rest_of_the_graph_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "align_packed", lambda graph, data: 0)
    save_model(tmp_path / "engine.onnx", nested=True)
    ort_session._write_prepacked(tmp_path / "engine.onnx", tmp_path, 1)
    before = onnx.load(tmp_path / GRAPH_NAME, load_external_data=False)
    align_packed(tmp_path / GRAPH_NAME, tmp_path / DATA_NAME)
    after = onnx.load(tmp_path / GRAPH_NAME, load_external_data=False)

    def forget(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            kept = [entry for entry in tensor.external_data if "prepack" not in entry.key]
            del tensor.external_data[:]
            tensor.external_data.extend(kept)
        for node in graph.node:
            for each in node.attribute:
                if each.type == onnx.AttributeProto.GRAPH:
                    forget(each.g)

    assert before != after
    forget(before.graph)
    forget(after.graph)
    assert before == after


def test_a_file_that_is_too_short_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "align_packed", lambda graph, data: 0)
    save_model(tmp_path / "engine.onnx", nested=False)
    ort_session._write_prepacked(tmp_path / "engine.onnx", tmp_path, 1)
    (tmp_path / DATA_NAME).write_bytes((tmp_path / DATA_NAME).read_bytes()[:3000])
    with pytest.raises(ValueError, match="beyond the end"):
        align_packed(tmp_path / GRAPH_NAME, tmp_path / DATA_NAME)

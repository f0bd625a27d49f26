"""An engine may name the file that its weights are in; it must lie beside the engine."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from specexport_runtime.errors import BundleError
from specexport_runtime.executors.ort_session import open_session

SECRET = np.arange(4, dtype=np.float32)


def graph_with_weights_at(location: str) -> bytes:
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


@pytest.mark.parametrize("way", ["parent", "absolute", "link", "beside"])
def test_weights_outside_the_folder_are_not_read(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    SECRET.tofile(tmp_path / "secret.bin")
    SECRET.tofile(folder / "beside.bin")
    (folder / "link.bin").symlink_to("../secret.bin")
    places = {"parent": "../secret.bin", "absolute": str(tmp_path / "secret.bin"), "link": "link.bin"}
    (folder / "model.onnx").write_bytes(graph_with_weights_at(places.get(way, "beside.bin")))
    if way == "beside":
        session = open_session(folder / "model.onnx", 1, spin=False)
        assert np.array_equal(session.run(None, {})[0], SECRET)
        return
    with pytest.raises(BundleError, match="cannot load this engine"):
        open_session(folder / "model.onnx", 1, spin=False)

"""What a TensorRT build refuses, and what it reads out of the builder's words. Uses the real parser, and no GPU."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.backends import present_gpu
from specexport.backends.trt_package import TENSORRT, TENSORRT_RTX, configure
from specexport.backends.trt_report import find_network_problems, parse_layers, summarize
from specexport.backends.trt_worker import Job, build, main
from specexport_runtime.errors import CheckFailedError

F16 = 10  # onnx's number of float16


def write_model(path, nodes, inputs, outputs):
    import onnx
    from onnx import helper

    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, str(path))
    return path


def make_job(folder: Path, model: Path, shapes: dict[str, Any], **changes: Any) -> Job:
    fields = {"backend": "tensorrt-rtx", "model": str(model), "sm": "89", "profiles": ["decode 1x1"]}
    fields |= {"shapes": [shapes], "engine": str(folder / "model.engine"), "log": str(folder / "log")}
    return Job(**fields | {"num_layers": 0, "float32_products": [], "plugins": []} | changes)


def fixed(*shape: int) -> tuple[tuple[int, ...], ...]:
    return (shape, shape, shape)


def test_an_input_that_the_parser_drops_is_an_error(tmp_path: Path) -> None:
    """TensorRT reads the standard Attention, drops its lengths, and says so in a warning only: the result is wrong."""
    from onnx import helper

    shape = [1, 2, 8, 16]
    tensors = dict.fromkeys(("q", "k", "v"), (F16, shape))
    attention = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lens"], ["y"], is_causal=1)
    model = write_model(tmp_path / "m.onnx", [attention], tensors | {"lens": (7, [1])}, {"y": F16})
    shapes = dict.fromkeys("qkv", fixed(*shape)) | {"lens": fixed(1)}
    with pytest.raises(CheckFailedError, match=r"would not be exact: .*(?i:unused)"):
        build(make_job(tmp_path, model, shapes), io.StringIO())
    assert not (tmp_path / "model.engine").exists()


def test_a_graph_that_tensorrt_cannot_read_is_an_error_on_the_line_protocol(tmp_path, capsys):
    from onnx import helper

    model = write_model(tmp_path / "m.onnx", [helper.make_node("Foo", ["x"], ["y"])], {"x": (1, [2])}, {"y": 1})
    (tmp_path / "job.json").write_text(json.dumps(make_job(tmp_path, model, {"x": fixed(2)})._asdict()))
    assert main(str(tmp_path / "job.json")) == 1
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (event["event"], event["kind"]) == ("error", "CheckFailedError")
    assert "TensorRT cannot read the graph" in event["message"]
    assert (tmp_path / "log").read_text(), "what TensorRT said is kept"


def test_a_hidden_float32_product_is_refused_and_one_of_the_model_is_not(tmp_path: Path) -> None:
    from onnx import helper

    nodes = [
        helper.make_node("Cast", ["k_cache.0"], ["wide"], to=1),
        helper.make_node("MatMul", ["wide", "wide"], ["y"], name="router"),
    ]
    model = write_model(tmp_path / "m.onnx", nodes, {"k_cache.0": (F16, [16, 16])}, {"y": 1})
    shapes = {"k_cache.0": fixed(16, 16)}
    with pytest.raises(CheckFailedError, match="router multiplies matrices in float32"):
        build(make_job(tmp_path, model, shapes), io.StringIO())
    report = build(make_job(tmp_path, model, shapes, float32_products=["router"]), io.StringIO())
    assert (tmp_path / "model.engine").stat().st_size > 1000
    assert report["aliased"] == []
    assert report["peak_memory_bytes"] > 10**7
    assert report["engine_bytes"] == (tmp_path / "model.engine").stat().st_size
    assert set(report["memory"]) == {"libraries", "network", "engine", "largest"}
    own = {name: parts["own"] for name, parts in report["memory"].items()}
    assert 10**6 < own["libraries"] <= own["engine"] <= own["largest"] <= report["peak_memory_bytes"]
    assert report["layers_from"] == "builder"
    with pytest.raises(CheckFailedError, match="0 of 2 caches are updated in place"):
        build(make_job(tmp_path, model, shapes, num_layers=1), io.StringIO())
    with pytest.raises(CheckFailedError, match=r"inputs are not the contract's: .*surplus"):
        build(make_job(tmp_path, model, shapes | {"surplus": fixed(1)}, float32_products=["router"]), io.StringIO())


Tensors = list[tuple[str, str, str]]


def layer_text(name: str, inputs: Tensors, outputs: Tensors, constants: Tensors = ()) -> str:  # type: ignore[assignment]
    given, made, fixed_ = (
        ", ".join(f"{{ Name: {n}, Dimensions: [{d}], Strides: [1], Datatype: {t}, Format: x }}" for n, d, t in values)
        for values in (inputs, outputs, constants)
    )
    return (
        f"Name: {name}, LayerType: {'gemm' if 'gemm' in name else 'kgen'}, Inputs: [ {given}], "
        f"Constants: [ {fixed_}], Outputs: [ {made}], TacticName: t, StreamId: 0, Metadata: \n"
    )


def test_layers_are_read_and_given_to_their_profiles() -> None:
    cache = ("k_cache_out.0", "1,2,64,16", "Half")
    marked = ("k_cache_out.0 [profile 1]", "-1,2,64,16", "Half")
    text = "Layers:\n" + "".join(
        [
            layer_text("__myl_Scat_myl0_0", [("k", "5,32", "Half"), cache], [cache]),  # an append is no copy
            layer_text("__myl_Resh_myl0_1", [cache], [("a", "4,16,64", "Half")]),  # repeated for 4 heads, turned
            layer_text("_gemm_mha_v2_myl0_2", [("q", "4,5,16", "Half"), cache], [("o", "4,5,16", "Half")]),
            layer_text("wide_gemm_myl0_3", [("x", "5,32", "Float"), ("w", "32,8", "Float")], [("y", "5,8", "Float")]),
            layer_text("alpha_gemm_myl0_4", [("x", "5,32", "Half"), ("alpha", "1", "Float")], [("y", "5,8", "Half")]),
            # The builder's second subgraph is not always the second profile: the tensors' names say which it is.
            layer_text("__myl_Resh_myl3_0", [marked], [("b", "-1,64,16", "Half")]),
        ]
    )
    layers = parse_layers([text, "Total Weights Memory: 3 bytes"])
    assert [layer.profile for layer in layers] == [0, 0, 0, 0, 0, 1]
    first, second = summarize(layers, ["verify 1x5", "prefill"])
    assert first == {
        "profile": "verify 1x5", "kernels": 5, "fused_attention": 1, "float32_matmuls": ["wide_gemm_myl0_3"],
        "kv_copy_bytes": 4 * 64 * 16 * 2, "quantized_products": 0, "expanded_weights": 0,
    }  # fmt: skip
    assert second["kv_copy_bytes"] == 2 * 64 * 16 * 2, "one row, where their number is not fixed"


def test_products_of_quantized_weights_are_told_from_kernels_that_make_them_float() -> None:
    scales, codes = ("s", "4,64", "Half"), ("w", "512,64", "Int4")
    wide = layer_text("__myl_Fc_myl0_0", [("x", "600,512", "Half")], [("y", "600,64", "Half")], [codes, scales])
    text = "Layers:\n" + "".join(
        [
            wide,
            layer_text("__myl_Fc_myl0_1", [("x", "5,64", "Half")], [("y", "5,8", "Half")], [("v", "64,8", "FP8")]),
            layer_text("__myl_CastMul_myl0_2", [], [("w", "512,64", "Half")], [codes, scales]),
            layer_text("some_gemm_myl0_3", [("x", "5,512", "Half"), ("w", "512,64", "Half")], [("y", "5,64", "Half")]),
        ]
    )
    (row,) = summarize(parse_layers([text]), ["verify 1x5"])
    assert (row["quantized_products"], row["expanded_weights"]) == (2, 1)


STRIPPED = """
import numpy as np
import tensorrt_rtx as trt

logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
for flags in ((), ("STRIP_PLAN",), ("REFIT",)):
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float16, (4, 64))
    weights = np.ones((64, 64), np.float16)
    w = network.add_constant((64, 64), trt.Weights(weights)).get_output(0)
    none = trt.MatrixOperation.NONE
    network.mark_output(network.add_matrix_multiply(x, none, w, none).get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    for flag in flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    print(builder.build_serialized_network(network, config) is not None)
"""


def test_tensorrt_strips_no_weights_without_a_gpu() -> None:
    """Why engines hold their weights. If this fails, docs/gpu.md is out of date, and stripping can be had."""
    if present_gpu.query_gpu_architecture() is not None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, "-c", STRIPPED], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-3:] == ["True", "False", "False"], done.stderr


class Config(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(calls=[], num_compute_capabilities=0)
        self.set_flag = self.calls.append
        self.set_compute_capability = lambda *given: self.calls.append(given)


def test_the_two_packages_differ_in_architecture() -> None:
    trt = SimpleNamespace(
        BuilderFlag=SimpleNamespace(REQUIRE_USER_ALLOCATION="user"), ComputeCapability=SimpleNamespace(SM89="89!")
    )
    rtx, full, plugins = Config(), Config(), Config()
    configure(trt, TENSORRT_RTX, rtx, "89")
    configure(trt, TENSORRT, full, "90")
    configure(trt, TENSORRT, plugins, "90", has_plugins=True)
    assert (rtx.calls, full.calls) == ([("89!", 0), "user"], ["user"])
    assert rtx.num_compute_capabilities == 1
    assert plugins.calls == [], "the flag is incompatible with plugins that carry their kernels"


def test_caches_of_a_plugin_engine_are_checked_too() -> None:
    names = SimpleNamespace(ATTENTION_INPUT=1, KV_CACHE_UPDATE=2, MATRIX_MULTIPLY=3, PLUGIN_V3=4)
    trt = SimpleNamespace(LayerType=names, DataType=SimpleNamespace(HALF=1, BF16=2, FLOAT=0))

    def tensor(name: str) -> Any:
        return SimpleNamespace(name=name, dtype=1)

    def network(outputs: list[str]) -> Any:
        inputs = [tensor(name) for name in ("k", "v", "k_cache.0", "v_cache.0")]
        layer = SimpleNamespace(
            name="attention.0.kv_append", type=4, get_input=lambda i: inputs[i], get_output=lambda i: tensor(outputs[i])
        )
        given, found = inputs[2:], [tensor("k_cache_out.0"), tensor("v_cache_out.0")]
        return SimpleNamespace(
            num_layers=1, get_layer=lambda _i: layer, num_inputs=2, get_input=lambda i: given[i],
            num_outputs=2, get_output=lambda i: found[i],
        )  # fmt: skip

    assert find_network_problems(trt, network(["k_cache_out.0", "v_cache_out.0"]), 1) == []
    assert find_network_problems(trt, network(["k_cache_out.0", "copy"]), 1) == ["v_cache.0 is not updated in place"]
    assert "2 of 4 caches are updated in place" in find_network_problems(
        trt, network(["k_cache_out.0", "v_cache_out.0"]), 2
    )

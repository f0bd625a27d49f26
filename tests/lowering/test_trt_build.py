"""Lowered models parsed and built by TensorRT-RTX, which needs no GPU for that."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from specexport.lowering import trt_native
from specexport_runtime.abi import ALIGNED_STEP_INPUTS, LayerGeometry
from specexport_runtime.bundle.profiles import Profile
from tests.support.cases.unpadded_cases import Case, one_node_model
from tests.support.models.half_models import trace
from tests.support.references.lowered import lower_tensorrt

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

CAPACITY = 40
PROFILES = (Profile("decode", 2, 1, 2, 2), Profile("verify", 2, 5, 10, 10), Profile("prefill", 2, 16, 16, 8))
MODELS = {
    ("llama", "float16", 5): ("folded", "folded"), ("llama", "float16", 1): ("fused-causal", "fused-causal"),
    ("gemma3", "bfloat16", 5): ("folded", "folded"), ("gemma3", "bfloat16", 1): ("fused-masked", "fused-causal"),
    ("gemma2", "float16", 1): ("explicit", "explicit"), ("gpt_oss", "float32", 1): ("explicit", "explicit"),
}  # fmt: skip
"""Forms of the layers by model, dtype and fold."""


def geometry(model: ir.Model, layer: int) -> LayerGeometry:
    by_name = {str(value.name): list(value.shape) for value in model.graph.inputs if value.shape is not None}
    keys, values = by_name[f"k_cache.{layer}"], by_name[f"v_cache.{layer}"]
    return LayerGeometry(keys[1], keys[3], values[3])


@pytest.mark.one_of_kind
@pytest.mark.parametrize(("name", "dtype", "fold"), MODELS)
def test_lowered_models_build_without_a_warning_that_matters(name: str, dtype: str, fold: int, tmp_path: Path) -> None:
    from specexport.backends.trt import TrtPlan, write_trt_engines

    model = trace(name, dtype).ir_model.clone()
    forms = lower_tensorrt(model, kv_capacity=CAPACITY, fold=fold)
    assert forms == MODELS[name, dtype, fold]
    layers = tuple(geometry(model, i) for i in range(2))
    profiles = tuple(profile._replace(fold=fold) for profile in PROFILES)
    plan = TrtPlan("tensorrt-rtx", ("89",), profiles, layers, CAPACITY)
    names = [spec.name for spec in ALIGNED_STEP_INPUTS]
    (engine,) = write_trt_engines(model, plan, tmp_path, note=lambda _: None, names=names)
    report = engine.report
    assert (tmp_path / engine.path).stat().st_size > 100_000
    assert len(report.aliased) == 4, "every cache is updated in place"
    if fold > 1:
        assert [row.kv_copy_bytes for row in report.profiles] == [0] * len(PROFILES)
    fused = sum(form != "explicit" for form in forms)
    assert report.attention_nodes == fused
    assert [row.fused_attention for row in report.profiles] == [fused] * len(PROFILES)


def build(model: ir.Model, case: Case, sm: str) -> tuple[bool, str]:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.said.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse(ir.to_proto(model).SerializeToString()), log.said
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, sm), 0)
    for rows, new in ((1, 1), (4, 1), (4, 5), (1, 64)):
        profile = builder.create_optimization_profile()
        tokens = rows * new
        sizes = {"kv_lens": (rows, 1), "row_totals": (rows, 1), "cu_new_tokens": (rows + 1,)}
        sizes |= {"tile_index": (rows, new), "untile_index": (tokens,), "q": (tokens, case.heads * case.k_dim)}
        sizes |= dict.fromkeys("kv", (tokens, case.kv_heads * case.k_dim))
        sizes |= {f"{name}_cache": (rows, case.kv_heads, CAPACITY, case.k_dim) for name in "kv"}
        for i in range(network.num_inputs):
            name = network.get_input(i).name
            profile.set_shape(name, *[sizes[name]] * 3)
        config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None, "; ".join(log.said)


def lower_one(case: Case, dtype: str) -> tuple[ir.Model, str]:
    from specexport.lowering.common import drop_unused_step_inputs

    model = one_node_model(case, dtype)
    model.graph.inputs.pop()  # positions, which a lone layer does not read
    for value in model.graph.inputs:  # words of the contract that are sizes of a dimension, not their product
        value.shape = ir.Shape(["num_seqs_and_one" if dim == "B+1" else dim for dim in value.shape or ()])
    (form,) = trt_native.replace_attention(model, kv_capacity=CAPACITY)
    drop_unused_step_inputs(model)
    return model, form


@pytest.mark.parametrize(("size", "window", "sm"), [(80, -1, "SM80"), (256, 6, "SM120")])
def test_head_sizes_of_the_table_have_a_fused_kernel(size: int, window: int, sm: str) -> None:
    case = Case((), k_dim=size, v_dim=size, window=window)
    model, form = lower_one(case, "bfloat16")
    assert form == ("fused-masked" if window > 0 else "fused-causal")
    assert build(model, case, sm) == (True, "")


OUTSIDE = {
    "size 8": (Case((), k_dim=8, v_dim=8), "float16"),
    "size 20": (Case((), k_dim=20, v_dim=20), "bfloat16"),
    "size 264": (Case((), k_dim=264, v_dim=264), "float16"),
    "float": (Case((), k_dim=64, v_dim=64), "float32"),
    "three heads": (Case((), heads=3, kv_heads=1, k_dim=64, v_dim=64), "float16"),
    "as many kv heads": (Case((), heads=2, kv_heads=2, k_dim=64, v_dim=64), "float16"),
}


@pytest.mark.parametrize(("case", "dtype"), OUTSIDE.values(), ids=OUTSIDE)
def test_outside_the_table_a_fused_node_fails_and_the_chosen_form_builds(case, dtype, monkeypatch):
    model, form = lower_one(case, dtype)
    assert form == "explicit"
    assert build(model, case, "SM89") == (True, "")
    table = {"MULTIPLE": 1, "SMALLEST": 1, "LARGEST": 1024, "DTYPES": ("FLOAT", "FLOAT16", "BFLOAT16"), "HEADS": 1}
    for name, value in table.items():
        monkeypatch.setattr(trt_native, f"_FUSED_{name}", value)
    model, form = lower_one(case, dtype)
    assert form == "fused-causal"
    built, said = build(model, case, "SM89")
    assert not built
    assert "not supported by a dedicated kernel" in said


def test_four_heads_are_enough() -> None:
    case = Case((), heads=4, kv_heads=1, k_dim=64, v_dim=64)
    model, form = lower_one(case, "float16")
    assert form == "fused-causal"
    assert build(model, case, "SM89") == (True, "")

"""The plugins' definitions, driven as TensorRT's builder drives them, with the kernels compiled for real.

``tensorrt.plugin`` is NVIDIA's own Python, from the wheel of the bindings. The C++ side is a fake: no library runs.
"""

import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest

from specexport.kernels import launch
from specexport.kernels.compile import entry_name, entry_parameters
from specexport.kernels.spec import KernelSpec
from specexport.lowering import trt_plugin
from specexport.plugin import definitions
from specexport.plugin.definitions import MAX_SHARED_BYTES, compile_plugin, register_plugins, tile_options
from specexport.plugin.naming import graph_shape, plugin_name, plugin_names, plugin_spec
from specexport_runtime.errors import CheckFailedError, IncompatibleError, MissingDependencyError, UserInputError
from tests.support.cases.unpadded_cases import CASES, one_node_model
from tests.support.fakes.fake_tensorrt import DataType, Embedded, Given, embed, install
from tests.support.references.evaluator import ATTRIBUTES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plugins-compiled")]  # slow together

CAPACITY = 100
ATTENTION = KernelSpec(
    kernel="ragged_attention", dtype="bfloat16", num_heads=8, kv_num_heads=2, head_size=64, scale=0.125
)
PLAIN = replace(ATTENTION, scale=1.0)
SPECS = {
    "append": replace(PLAIN, kernel="kv_append", dtype="float16", num_heads=2),
    "attention": ATTENTION,
    "everything": replace(
        ATTENTION, dtype="float16", v_head_size=32, window=7, softcap=30.0, sinks=True, tree=True, num_splits=4
    ),
    "combine": replace(PLAIN, kernel="combine_splits", num_splits=4),
    "multi_head": replace(ATTENTION, kv_num_heads=8, head_size=80),
    "one_tile": replace(ATTENTION, head_size=256),
}
TYPES = {
    "float16": DataType.HALF, "bfloat16": DataType.BF16, "float32": DataType.FLOAT,
    "int32": DataType.INT32, "int64": DataType.INT64,
}  # fmt: skip
# Decode and verify (5 tokens a row) of eight rows, one prefill chunk.
PROFILES = [{"T": 8, "B": 8, "B+1": 9}, {"T": 40, "B": 8, "B+1": 9}, {"T": 256, "B": 1, "B+1": 2}]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing compiled before counts, and nothing is left behind."""
    compile_plugin.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A process in which nothing is registered yet."""
    monkeypatch.setattr(definitions, "_KERNELS", {})
    found = importlib.util.find_spec("tensorrt_bindings")  # importing it would need the libraries
    if found is None or not found.submodule_search_locations:
        pytest.skip("tensorrt-cu13-bindings is not installed")
    return install(monkeypatch, found.submodule_search_locations[0])


def sizes_of(spec: KernelSpec) -> dict[str, int]:
    heads, kv_heads, d, dv = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    sizes = {"Hq": heads, "H": kv_heads, "D": d, "Dv": dv, "S": spec.num_splits, "L": CAPACITY}
    return sizes | {"Hq*D": heads * d, "H*D": kv_heads * d, "H*Dv": kv_heads * dv, "Hq*Dv": heads * dv}


def given_inputs(spec: KernelSpec) -> list[Given]:
    """The node's inputs: sizes of the step vary, the rest is fixed."""
    known: Mapping[str | int, str | int] = sizes_of(spec)  # type: ignore[assignment]
    return [
        Given(TYPES[spec.dtype if x.dtype == "model" else x.dtype], tuple(known.get(w, w) for w in graph_shape(x)))
        for x in spec.signature.inputs
    ]


def embed_all(trt: Any, spec: KernelSpec, sm: str | int) -> list[Embedded]:
    register_plugins([plugin_name(spec)], sm)
    return embed(trt, plugin_name(spec), ATTRIBUTES, given_inputs(spec), PROFILES)


class Recorder:
    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        self.grid = grid
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


def launched(spec: KernelSpec, tiles: Any, step: Mapping[str, int], patch: pytest.MonkeyPatch) -> Recorder:
    import torch

    recorder = Recorder(launch.KERNELS[spec.kernel])
    patch.setitem(launch.KERNELS, spec.kernel, recorder)
    sizes = sizes_of(spec) | step
    tensors = {}
    for item in (*spec.signature.inputs, *spec.signature.outputs):
        dtype = getattr(torch, spec.dtype if item.dtype == "model" else item.dtype)
        tensors[item.name] = torch.zeros([sizes[w] if isinstance(w, str) else w for w in item.shape], dtype=dtype)
    launch.launch(spec, tensors, tiles)
    return recorder


@pytest.mark.parametrize("name", SPECS)
def test_an_engine_launches_what_the_launcher_does(name, trt, monkeypatch):
    """Grid, int arguments and their order, at the sizes of the profile and at others."""
    spec = SPECS[name]
    signature = spec.signature
    for found, profile in zip(embed_all(trt, spec, 90), PROFILES, strict=True):
        tiles = compile_plugin(spec, 90).by_tactic[found.tactic].tiles
        for step in (profile, {"T": 3, "B": 2, "B+1": 3}, {"T": 65, "B": 7, "B+1": 8}):
            wanted = launched(spec, tiles, step, monkeypatch)
            params = found.launch(step)
            assert (params["grid_x"], params["grid_y"], params["grid_z"]) == wanted.grid
            assert found.ints(step) == [wanted.arguments[item.name] for item in signature.ints]
            assert found.ints(step)[1:] in ([], [step["B"], CAPACITY])
            shapes = [[wanted.arguments[item.name].shape] for item in signature.outputs]
            assert [[x for x in s if x != 1] for s in found.output_shapes(step)] == [
                [x for x in shape if x != 1] for (shape,) in shapes
            ]


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        ("append", 90), ("everything", 90), ("combine", 90), ("combine", 120),
        pytest.param("everything", 80, marks=pytest.mark.whole),
        pytest.param("everything", 120, marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_the_code_takes_inputs_then_ints_then_outputs(name: str, sm: int, trt: types.ModuleType) -> None:
    """No scratch pointers: the parameters are as many as TensorRT passes."""
    spec = SPECS[name]
    for found in embed_all(trt, spec, sm):
        code = found.code.decode()
        passed = len(spec.signature.inputs), len(found.ints(PROFILES[0])), len(found.output_types)
        kinds = ["u64"] * passed[0] + ["u32"] * passed[1] + ["u64"] * passed[2]
        assert [parameter.type for parameter in entry_parameters(code)] == kinds
        assert entry_name(code) == found.kernel
        assert re.search(rf"\.target sm_{sm}a?$", code, re.MULTILINE)
        params = found.launch(PROFILES[0])
        assert f".reqntid {params['block_x']}\n" in code
        assert (params["block_y"], params["block_z"]) == (1, 1)
        assert params["shared_mem"] == compile_plugin(spec, sm).by_tactic[found.tactic].shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize("sm", ["86", "87"])
def test_gpus_of_the_same_generation_run_the_oldest_code(sm: str, trt: types.ModuleType) -> None:
    found = embed_all(trt, SPECS["combine"], sm)
    assert re.search(rb"\.target sm_80$", found[0].code, re.MULTILINE)


def test_only_the_caches_are_aliased_and_only_partial_sums_are_float32(trt: types.ModuleType) -> None:
    for name, spec in SPECS.items():
        found = embed_all(trt, spec, 90)[0]
        assert found.aliases == ([2, 3] if name == "append" else [-1] * len(found.aliases))
        assert set(found.output_types) == {TYPES["float32" if spec is SPECS["everything"] else spec.dtype]}


def test_each_profile_has_the_tile_that_holds_a_rows_queries(trt: types.ModuleType) -> None:
    """Decode: 1 token of 4 heads; verify: 5; a chunk: the largest there is."""
    assert [found.tactic for found in embed_all(trt, SPECS["attention"], 90)] == [16, 32, 32]
    assert [found.tactic for found in embed_all(trt, SPECS["multi_head"], 90)] == [16, 16, 32]
    assert [found.tactic for found in embed_all(trt, SPECS["one_tile"], 90)] == [0, 0, 0]
    codes = [found.code for found in embed_all(trt, SPECS["attention"], 90)]
    assert codes[0] != codes[1] == codes[2]


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("head_size", [16, 64, 96, 128, 256])
def test_tactics_are_numbered_by_their_tiles(head_size: int, sm: int) -> None:
    spec = replace(ATTENTION, head_size=head_size, v_head_size=head_size)
    options = tile_options(spec, sm)
    assert all(tactic in (0, tiles.block_m) for tactic, tiles in options.items())
    assert (0 in options) == (len(options) == 1)


@pytest.mark.parametrize("name", ["append", "attention", "combine"])
@pytest.mark.parametrize("wrong", [DataType.FLOAT, DataType.HALF, DataType.INT8, DataType.INT64])
def test_other_types_are_a_key_error(name: str, wrong: DataType, trt: types.ModuleType) -> None:
    spec = SPECS[name]
    register_plugins([plugin_name(spec)], 90)
    for index, right in enumerate(given_inputs(spec)):
        if right.dtype is not wrong:
            inputs = given_inputs(spec)
            inputs[index] = right._replace(dtype=wrong)
            with pytest.raises(KeyError):
                embed(trt, plugin_name(spec), ATTRIBUTES, inputs, PROFILES)


def test_registering_again_is_allowed_and_the_last_architecture_counts(trt: types.ModuleType) -> None:
    name = plugin_name(SPECS["append"])
    register_plugins([name, name], "90")
    register_plugins([name, plugin_name(SPECS["combine"])], 80)
    found = embed(trt, name, ATTRIBUTES, given_inputs(SPECS["append"]), PROFILES)
    assert b".target sm_80" in found[0].code
    api = sys.modules["tensorrt.plugin"]
    with pytest.raises(ValueError, match="already has a def"):
        definitions._register_plugin(trt, api, name)


@pytest.mark.parametrize(
    ("name", "splits"), [("everything", 3), pytest.param("values_smaller", 1, marks=pytest.mark.whole)]
)
def test_graphs_name_plugins_that_agree_with_them(name: str, splits: int, trt: types.ModuleType) -> None:
    """Every node of a lowered graph finds its plugin, with the types and shapes that the graph says."""
    model = one_node_model(CASES[name], "float16")
    trt_plugin.replace_attention(model, kv_capacity=CAPACITY, num_splits=splits)
    register_plugins(plugin_names(model), 90)
    words = {"num_tokens": 40, "num_seqs": 8, "T": 40, "B": 8, "B+1": 9}
    of_graph = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.INT32: "int32"}
    for node in model.graph:
        inputs = [
            Given(TYPES[of_graph[x.dtype]], tuple(d if isinstance(d, int) else d.value for d in x.shape))
            for x in node.inputs
        ]
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        (found,) = embed(trt, node.op_type, attributes, inputs, [words])
        assert found.output_types == [TYPES[of_graph[value.dtype]] for value in node.outputs]
        assert found.output_shapes(words) == [
            [d if isinstance(d, int) else words[d.value] for d in value.shape] for value in node.outputs
        ]
        assert found.kernel == plugin_spec(node.op_type).kernel


def test_no_names_need_no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # importing it would raise
    register_plugins([], 90)
    assert sys.modules["tensorrt"] is None


def test_what_cannot_be_embedded_is_named(trt: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plugin_name(ATTENTION)
    with pytest.raises(UserInputError, match="no architecture sm 75"):
        register_plugins([name], "75")
    with pytest.raises(CheckFailedError, match="'my_plugin' is not the name"):
        register_plugins(["my_plugin"], 90)
    monkeypatch.setattr(definitions, "MAX_SHARED_BYTES", 20000)
    with pytest.raises(CheckFailedError, match=r"needs \d+ bytes of shared memory, a launch has 20000"):
        register_plugins([name], 90)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match="need Triton"):
        register_plugins([plugin_name(replace(ATTENTION, scale=0.5))], 90)


def test_a_tensorrt_that_cannot_embed_kernels_is_named(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trt.plugin, "aot_impl")
    with pytest.raises(IncompatibleError, match=r"TensorRT 11.4.0 cannot embed compiled kernels.* no aot_impl"):
        register_plugins([plugin_name(SPECS["combine"])], 90)

"""A lowered model: which inputs remain, and that caches are updated in the memory they came in."""

import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.backends.registry import find_backend
from specexport_runtime.errors import RecipeError
from tests.support.models.tiny_models import make_llama
from tests.support.models.tiny_traces import tiny_model
from tests.support.references.engine_harness import Engine, build

STEP = ["input_ids", "positions", "logit_rows", "kv_lens", "cu_new_tokens"]


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Heads of one size, and values of another size than keys."""
    folder = tmp_path_factory.mktemp(request.param)
    model, layers, _ = build(tiny_model(request.param), folder)
    return folder, model, layers


def test_only_the_step_inputs_that_are_read_remain(built: Any) -> None:
    _, model, _ = built
    names = [value.name for value in model.graph.inputs]
    assert [name for name in names if "cache" not in name] == STEP


def test_each_layer_is_one_node_of_our_own(built: Any) -> None:
    _, model, layers = built
    counts = Counter(node.op_type for node in model.graph if node.domain == "specexport")
    assert counts.keys() == {"UnpaddedAttention", "BlockLinear", "BlockEmbedding"}
    assert counts["UnpaddedAttention"] == len(layers)
    assert not model.functions


def test_caches_are_updated_in_the_memory_they_came_in_whatever_its_capacity(built: Any) -> None:
    folder, _, layers = built
    results = []
    for capacity in (16, 512):
        engine = Engine(folder, layers, num_rows=3, capacity=capacity)
        before = {name: cache.copy() for name, cache in engine.caches.items()}
        results.append([engine.step([[5, 6, 7, 8], [9, 10]], [0, 0], first_row=1)])
        for name, cache in engine.caches.items():
            assert np.isnan(cache[0]).all(), "a row outside the step was touched"
            assert np.isfinite(cache[1, 0, :, :4]).all()
            assert np.isfinite(cache[2, 0, :, :2]).all()
            # The second row is shorter: nothing after its own tokens may change.
            np.testing.assert_array_equal(cache[1:, :, :, 4:], before[name][1:, :, :, 4:])
        before = {name: cache[2].copy() for name, cache in engine.caches.items()}
        results[-1] += [engine.step([[4, 5], []], [4, 2], first_row=1), engine.step([[3]], [6], first_row=1)]
        for name, cache in engine.caches.items():
            assert np.isfinite(cache[1, 0, :, :7]).all()
            np.testing.assert_array_equal(cache[2], before[name], "a row without tokens was written")
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(RecipeError, match="backend 'cuda' is not in this release"):
        find_backend("cuda")


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(make_llama(tie_word_embeddings=True), tmp_path / name)
    for file in ("model.onnx", "model.onnx.data", "model.padded.onnx"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in (tmp_path / "a" / "model.onnx").read_bytes()


def test_weights_that_are_written_side_by_side_are_few_and_give_the_same_bytes(tmp_path, monkeypatch):
    import onnx_ir as ir

    from specexport.backends import ort
    from specexport.onnx_emit import lazy_weight

    count, size = 24, 1 << 16
    alive, most = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def make(number: int) -> np.ndarray:
        nonlocal alive, most
        array = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        weakref.finalize(array, gone)
        alive += 1
        most = max(most, alive)
        time.sleep(0.002)
        return array

    monkeypatch.setattr(ort, "_IN_FLIGHT_BYTES", 3 * size)
    for workers in (1, 8):
        graph = ir.Graph([], [], nodes=[], name="weights", opset_imports={"": 23})
        for number in range(count):
            lazy_weight(graph, f"w{number}", ir.DataType.UINT8, (size,), partial(make, number))
        ort.write_onnx(ir.Model(graph, ir_version=10), tmp_path / str(workers), workers=workers)
        assert most <= {1: 2, 8: 3}[workers]
    for name in (ort.ENGINE_NAME, ort.DATA_NAME):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "8" / name).read_bytes()


def test_weights_are_stored_once_in_one_page_aligned_file(tmp_path: Path) -> None:
    import onnx

    model = make_llama(tie_word_embeddings=True)
    build(model, tmp_path)
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data", "model.padded.onnx"]
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    external = {t.name: {e.key: e.value for e in t.external_data} for t in proto.graph.initializer if t.external_data}
    big = {name: entry for name, entry in external.items() if int(entry["length"]) >= 4096}
    lengths = sum(int(entry["length"]) for entry in external.values())
    assert 0.95 * parameters < lengths < 1.05 * parameters, "the tied embedding is a fifth of the weights"
    assert (tmp_path / "model.onnx.data").stat().st_size < lengths + len(external) * 4096
    assert all(int(entry["offset"]) % 4096 == 0 for entry in big.values())
    assert {entry["location"] for entry in external.values()} == {"model.onnx.data"}


def test_no_token_of_a_quantized_model_depends_on_where_a_tile_of_attention_ends(tmp_path: Path) -> None:
    """Flash attention takes 2 D = 32 queries at a time: the last of 33 would be multiplied by another kernel."""
    from specexport.backends.ort import write_onnx
    from specexport.passes.pipeline import default_passes, run_passes
    from tests.support.models.tiny_models import VOCAB
    from tests.support.models.tiny_traces import trace_of
    from tests.support.references.lowered import lower_ort_cpu

    traced = trace_of(tiny_model("llama"))
    assert traced.layers[0].k_dim == traced.layers[0].v_dim == 16
    run_passes(traced.ir_model, default_passes("float32", quantize="int8"))
    lower_ort_cpu(traced.ir_model)
    write_onnx(traced.ir_model, tmp_path)
    tokens = np.random.default_rng(8).integers(3, VOCAB, 70).tolist()
    one = Engine(tmp_path, traced.layers, num_rows=1, capacity=80)
    wanted = np.concatenate([one.step([[token]], [at]) for at, token in enumerate(tokens)])
    for past in (0, 5):
        for width in (16, 17, 32, 33, 34, 49, 64, 65):
            engine = Engine(tmp_path, traced.layers, num_rows=2, capacity=80)
            if past:
                engine.step([tokens[:past]], [0])
            ragged = engine.step([tokens[past : past + width], tokens[:3]], [past, 0])
            np.testing.assert_array_equal(ragged, np.concatenate([wanted[past : past + width], wanted[:3]]))
            alone = engine.step([tokens[past : past + width]], [past])
            np.testing.assert_array_equal(alone, wanted[past : past + width])

"""The executor drives lowered graphs: they are evaluated in numpy over the fake GPU's memory, against eager logits."""

import numpy as np
import pytest

from specexport.lowering import trt_native
from specexport.lowering.tensorrt import lower_tensorrt
from specexport.trace.check import reference_logits
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.executors.trt import TrtExecutor
from specexport_runtime.executors.trt_engine import EngineTensor
from specexport_runtime.executors.trt_pack import SPECS
from specexport_runtime.packing.batch import IDLE, ModelRunner, RowWork
from tests.support.cases import chance
from tests.support.fakes.trt_fakes import FakeContext, FakeEngine, FakeGpu, make_entry, make_profiles
from tests.support.models.half_models import trace
from tests.support.models.tiny_models import VOCAB
from tests.support.references.engine_harness import make_checkpoint
from tests.support.references.trt_evaluator import make_evaluator

LOOKAHEAD, ROWS, CAPACITY = 3, 3, 64


class GraphEngine(FakeEngine):
    """Computes a lowered ``onnx_ir`` model instead of a fake one."""

    def __init__(self, gpu, entry, model):
        super().__init__(gpu, entry, None)
        self.evaluator = make_evaluator(model, ("float32", "float16", "bfloat16"))

        def tensor(value, is_input):
            shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
            return EngineTensor(str(value.name), shape, is_input)

        inputs, outputs = (
            [tensor(v, i) for v in vs] for i, vs in ((True, model.graph.inputs), (False, model.graph.outputs))
        )
        self.tensors = (*inputs, *outputs)

    def make_context(self, profile, activations, stream, *, is_fixed):
        super().make_context(profile, activations, stream, is_fixed=is_fixed)
        self.contexts[-1] = GraphContext(self, self.entry.engine.limits.profiles[profile])
        return self.contexts[-1]


class GraphContext(FakeContext):
    def run(self, shapes, addresses):
        gpu, dtype = self.engine.gpu, self.engine.entry.dtype
        self.engine.runs.append(self.profile)
        feeds = {
            name: gpu.array(addresses[name], shape, SPECS[name].dtype if name in SPECS else dtype)
            for name, shape in shapes.items()
        }
        assert all(np.isfinite(array).all() for name, array in feeds.items() if "cache" in name)
        with np.errstate(all="ignore"):  # slots of a tile that hold no token
            results = self.engine.evaluator.run(None, {name: array.copy() for name, array in feeds.items()})
        for name, array in zip(self.engine.evaluator.output_names, results, strict=True):
            gpu.array(addresses[name], array.shape, str(array.dtype))[:] = array


def open_lowered(folder, traced, gpu, fold):
    model = traced.ir_model.clone()
    lower_tensorrt(model, kv_capacity=CAPACITY, fold=fold)
    caches = {str(value.name): value.shape for value in model.graph.inputs if "cache" in str(value.name)}
    layers = tuple(
        LayerGeometry(caches[f"k_cache.{i}"][1], caches[f"k_cache.{i}"][3], caches[f"v_cache.{i}"][3])
        for i in range(len(caches) // 2)
    )
    entry = make_entry(
        LOOKAHEAD,
        ROWS,
        dtype="float32",
        vocab_size=VOCAB,
        layers=layers,
        inputs=tuple(str(value.name) for value in model.graph.inputs if "cache" not in str(value.name)),
        profiles=tuple(profile._replace(fold=fold) for profile in make_profiles(LOOKAHEAD, ROWS, 32)),
        kv_capacity=CAPACITY,
        max_positions=256,
    )
    path = folder / entry.engine.files[0].path
    path.parent.mkdir()
    path.write_bytes(b"engine")
    engine = GraphEngine(gpu, entry, model)
    return TrtExecutor(entry, entry.engine.files[0], folder, num_rows=ROWS, driver=gpu, load=lambda *_: engine), engine


@pytest.mark.one_of_kind
@pytest.mark.fuzz
@pytest.mark.parametrize("fold", [1, LOOKAHEAD + 1])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_kind_of_step_gives_eager_logits(tmp_path, monkeypatch, name, fold):
    """Prefill in chunks, verification, decoding, holes, windows at the arena's end; graphs replayed throughout."""
    monkeypatch.setattr(trt_native, "_FUSED_DTYPES", ("FLOAT",))
    traced = trace(name, "float32")
    executor, engine = open_lowered(tmp_path, traced, FakeGpu(1 << 26), fold)
    executor.capture(executor.fixed_shapes())
    random = np.random.default_rng(chance.seed(3))
    texts = [random.integers(3, VOCAB, 50).tolist() for _ in range(ROWS)]
    expected = reference_logits(make_checkpoint(traced.model), texts)
    limit = 3e-5 * max(float(np.abs(logits).max()) for logits in expected)
    runner, at = ModelRunner(executor), [0] * ROWS

    def step(first_row, counts, accepted):
        """Rejected tokens are fed again by a later step."""
        work = []
        for row, count in enumerate(counts, start=first_row):
            work.append(RowWork(texts[row][at[row] : at[row] + count], min(count, LOOKAHEAD + 1)) if count else IDLE)
        logits = runner.step(first_row, work).copy()
        wanted = [
            expected[row][at[row] + count - item.num_logits : at[row] + count]
            for row, (count, item) in enumerate(zip(counts, work, strict=True), start=first_row)
        ]
        assert np.abs(logits - np.concatenate(wanted)).max() < limit
        for row, kept in enumerate(accepted, start=first_row):
            at[row] += kept
            runner.kv.commit(row, at[row]) if kept else None

    for first_row, counts, accepted in [
        (0, [9, 4, 17], [9, 4, 17]),
        (0, [4, 1, 3], [2, 1, 1]),
        (0, [1, 1, 1], [1, 1, 1]),
        (2, [4], [4]),
        (1, [2, 4], [1, 3]),
        (0, [3, 0, 4], [3, 0, 2]),
        (0, [12, 4, 0], [12, 2, 0]),
        (1, [1], [1]),
        (0, [4, 4, 4], [4, 3, 2]),
        (1, [13, 4], [13, 1]),
        (0, [1, 1, 1], [1, 1, 1]),
    ]:
        step(first_row, counts, accepted)
    assert executor.graphs.replays >= 5
    assert {profile.kind for profile in engine.runs} == {"decode", "verify", "prefill"}
    ids = runner.step(0, [RowWork([texts[row][at[row]]], 1) for row in range(ROWS)], "token_ids")
    assert ids.tolist() == [int(expected[row][at[row]].argmax()) for row in range(ROWS)]

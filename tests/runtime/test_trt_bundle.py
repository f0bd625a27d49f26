"""Bundles with TensorRT engines: on a fake GPU they generate like the fake model, and what does not fit is refused."""

import pytest
from click.testing import CliRunner

from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.cli.command import runtime_cli
from specexport_runtime.errors import BundleError, IncompatibleError, SpecexportError
from specexport_runtime.executors import cuda_driver, ort_cuda, trt_engine
from specexport_runtime.executors.gpu import GpuInfo
from specexport_runtime.executors.open import open_executor
from specexport_runtime.executors.trt_open import choose_engine
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.loop import MAX_MODEL_LEN, make_draft, make_target
from tests.support.fakes.trt_bundles import LOOKAHEAD, ROWS, make_tokenizer, write_bundle
from tests.support.fakes.trt_fakes import FakeEngine, FakeGpu, make_entry

PROMPTS = [[3], [1, 2, 3, 4, 5], [16] * 9, [7, 0, 7], [2, 2], [11, 5, 0, 1], [4] * 50]
PARAMS = [SamplingParams(max_tokens=6 + 4 * i, temperature=0.9 * (i % 2), seed=i) for i in range(len(PROMPTS))]


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "bundle")


class Machine:
    """A machine with one fake GPU for every driver that is made: as if each had the same GPU to itself."""

    def __init__(self, monkeypatch, **options):
        self.gpus, self.engines, self.opened = [], [], []
        self.options = options
        self.fails = None
        monkeypatch.setattr(cuda_driver, "CudaDriver", self.make_gpu)
        monkeypatch.setattr(trt_engine, "load_engine", self.load)

    def make_gpu(self):
        self.gpus.append(FakeGpu(**self.options))
        return self.gpus[-1]

    def load(self, path, file, gpu_name):
        self.opened.append(path.name)
        role = path.parent.name
        if role == self.fails:
            raise BundleError(f"{path}: cannot load this engine")
        entry = load_bundle(path.parents[1]).manifest.models[role]
        self.engines.append(FakeEngine(self.gpus[-1], entry, make_target() if role == "target" else make_draft("good")))
        return self.engines[-1]


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def reference():
    return engine_of(
        make_target(), make_tokenizer(), draft=make_draft("good"), max_model_len=MAX_MODEL_LEN, lookahead=LOOKAHEAD
    )


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "chained", "none"])
def test_a_loaded_bundle_generates_what_the_model_does(bundle, machine, drafter):
    engine, plain = SpecEngine.load(bundle, max_num_seqs=ROWS), reference()
    results, expected = (e.generate(PROMPTS, PARAMS, drafter=drafter) for e in (engine, plain))
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert machine.opened == ["model.sm89.engine"] * 2  # not those of sm120 beside them
    assert all(gpu.calls["launch"] > 3 for gpu in machine.gpus[: 1 + (drafter in {"draft-model", "chained"})])
    engine.close()
    assert [gpu.in_use for gpu in machine.gpus] == [0, 0]
    assert all(made.closed for made in machine.engines)


@pytest.mark.parametrize("drafter", ["draft-model", "chained"])
def test_k_is_chosen(bundle, machine, drafter):
    engine = SpecEngine.load(bundle, max_num_seqs=ROWS, adaptive=True)
    results = engine.generate(PROMPTS, PARAMS, drafter=drafter, num_speculative_tokens="auto")
    greedy = [i for i, params in enumerate(PARAMS) if not params.temperature]
    plain = reference().generate(PROMPTS, PARAMS, speculation=False)
    assert [results[i].token_ids for i in greedy] == [plain[i].token_ids for i in greedy]
    assert set(engine.cost_curves.drafters) == {"draft-model"}
    engine.close()


@pytest.mark.parametrize(("built", "gpu", "chosen"), [
    (("any", "sm89"), "sm89", "sm89"), (("any", "sm89"), "sm90", "any"), (("sm89", "any"), "sm120", "any"),
])  # fmt: skip
def test_a_portable_engine_is_for_gpus_that_have_none_of_their_own(built, gpu, chosen):
    engines = tuple(EngineFile(f"model.{sm}.engine", sm, "tensorrt-rtx", "1.7") for sm in built)
    found = choose_engine(make_entry(files=engines), "the target", GpuInfo("GPU", gpu, 1, 1))
    assert found.sm == chosen


def test_graphs_are_recorded_at_load_the_largest_first(bundle, machine):
    engine = SpecEngine.load(bundle, max_num_seqs=ROWS)
    for executor, widths in ((engine.target, [20, 10, 5, 4, 2, 1]), (engine.draft, [8, 4, 4, 2, 2, 1])):
        keys = executor.graphs.keys
        assert [executor._sizes.profiles[key.profile][1].num_tokens for key in keys] == widths
    engine.close()


def test_graphs_can_be_turned_off(bundle, machine):
    engine = SpecEngine.load(bundle, max_num_seqs=ROWS, cuda_graphs=False)
    results = engine.generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [r.token_ids for r in reference().generate(PROMPTS, PARAMS)]
    assert [gpu.calls["launch"] for gpu in machine.gpus] == [0, 0]
    assert [gpu.captures for gpu in machine.gpus] == [0, 0]


def test_a_gpu_without_an_engine_names_both_and_the_rebuild_command(bundle, monkeypatch):
    machine = Machine(monkeypatch, sm="sm86")
    with pytest.raises(IncompatibleError, match="specexport build --backend tensorrt-rtx --sm 86"):
        SpecEngine.load(bundle, max_num_seqs=ROWS)
    machine = Machine(monkeypatch, sm="sm90")
    with pytest.raises(IncompatibleError) as caught:
        SpecEngine.load(bundle, max_num_seqs=ROWS)
    assert caught.value.message.endswith("the target has engines for sm89, sm120; FakeGPU is sm90.")
    assert (
        caught.value.hint == "build it again with `specexport build --backend ort-cuda`: tensorrt-rtx is not for sm90."
    )
    assert machine.opened == []
    assert machine.gpus[0].closed


@pytest.mark.parametrize("fails", ["target", "draft"])
def test_an_engine_that_cannot_be_loaded_leaves_nothing_behind(bundle, machine, fails):
    machine.fails = fails
    with pytest.raises(BundleError, match="cannot load"):
        SpecEngine.load(bundle, max_num_seqs=ROWS)
    assert all(gpu.in_use == 0 and gpu.closed for gpu in machine.gpus)
    assert len(machine.gpus) == 1 + (fails == "draft")


def test_recording_that_breaks_the_engine_leaves_nothing_behind(bundle, machine, monkeypatch):
    monkeypatch.setattr(FakeGpu, "launch", lambda *_: None)
    monkeypatch.setattr(FakeGpu, "synchronize", lambda *_: (_ for _ in ()).throw(SpecexportError("launch failure")))
    with pytest.raises(SpecexportError, match="launch failure"):
        SpecEngine.load(bundle, max_num_seqs=ROWS)
    assert machine.gpus[0].in_use == 0


def test_as_many_sequences_as_the_engine_was_built_for_and_no_more(bundle, machine):
    engine = SpecEngine.load(bundle)
    assert engine.current_load().max_num_seqs == ROWS == 4
    engine.close()
    with pytest.raises(IncompatibleError, match=r"built for 4 sequences.*max_num_seqs is 8") as caught:
        SpecEngine.load(bundle, max_num_seqs=8)
    assert "--max-num-seqs 4" in caught.value.hint


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx", "ort-cuda"])
def test_padded_kv_is_refused(tmp_path, machine, backend):
    bundle = load_bundle(write_bundle(tmp_path / "bundle", backend=backend), max_num_seqs=ROWS)
    with pytest.raises(IncompatibleError, match=f"padded KV needs backend ort-cpu; the target was built for {backend}"):
        open_executor(bundle, "target", unpad_kv=False)
    assert machine.gpus == []


def test_without_a_gpu_generate_says_so_in_one_line(bundle):
    cuda = pytest.importorskip("cuda.bindings.runtime")
    if int(cuda.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(runtime_cli, ["generate", str(bundle), "t1 t2", "--max-num-seqs", "4"])
    assert result.exit_code == 3, result.output
    assert result.stderr.startswith("error: there is no usable NVIDIA GPU or driver here")
    assert result.stderr.count("\n") == 1


def test_ort_cuda_bundles_get_their_executor(tmp_path, monkeypatch):
    """What it records and warms up is in ``test_warm_up``."""
    made, recorded = [], []

    class Stand:
        splits_rows = False

        def __init__(self, *args, **options):
            made.append((args, options))

        def capture(self, shapes):
            recorded.append(shapes)

        def reserve_rows(self, request):
            assert request.num_rows == 3

    monkeypatch.setattr(ort_cuda, "warm_up", lambda executor, shapes, *_: None)
    monkeypatch.setattr(ort_cuda, "OrtCudaExecutor", Stand)
    bundle = load_bundle(write_bundle(tmp_path / "bundle", backend="ort-cuda"), max_num_seqs=3, max_model_len=40)
    for graphs in (None, True):
        open_executor(bundle, "target", cuda_graphs=graphs)
        (path, entry), options = made[-1]
        assert path == tmp_path / "bundle" / "target" / "model.sm89.engine"
        assert entry.backend == "ort-cuda"
        assert options == {"num_rows": 3, "kv_capacity": 40 + LOOKAHEAD + 1, "cuda_graphs": graphs}
    assert all(recorded)


def test_graphs_on_a_cpu_are_refused_not_ignored(demo_bundle):
    result = CliRunner().invoke(runtime_cli, ["generate", str(demo_bundle), "x", "--cuda-graphs"])
    assert result.exit_code == 2, result.output
    assert "was built for ort-cpu. Fix: leave --cuda-graphs out." in result.stderr

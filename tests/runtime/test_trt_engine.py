"""Loading a TensorRT engine file, with the real package where it is installed, and a stand-in for the rest."""

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from specexport_runtime import errors
from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.executors.trt_engine import load_engine
from tests.support.cases.present_gpu import has_gpu


def file_for(builder="tensorrt-rtx", version=None):
    return EngineFile("model.sm89.engine", "sm89", builder, version or "1.7.1.116")


@pytest.fixture(scope="module")
def tiny_engine():
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (-1, 4))
    network.mark_output(network.add_activation(x, trt.ActivationType.RELU).get_output(0))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 4), (1, 4), (2, 4))
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return trt.__version__, bytes(builder.build_serialized_network(network, config))


@pytest.mark.parametrize("part", ["nothing", "the header", "all but one byte", "other bytes"])
def test_a_truncated_or_unreadable_file_is_refused(tiny_engine, tmp_path, part, capfd):
    version, data = tiny_engine
    cut = {"nothing": 0, "the header": 64, "all but one byte": -1}
    path = tmp_path / "model.sm89.engine"
    path.write_bytes(b"nonsense" * 100 if part == "other bytes" else data[: cut[part]])
    with pytest.raises(errors.BundleError, match="cannot load this engine of") as caught:
        load_engine(path, file_for(version=version), "NVIDIA L4")
    assert str(path) in caught.value.message
    assert f"tensorrt-rtx {version}" in caught.value.message
    assert "build it again" in caught.value.hint
    assert capfd.readouterr().err == "", "TensorRT's own log stays out of the way"


LEFT_OVER = """
import gc, sys
from pathlib import Path
import tensorrt_rtx as trt
from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.errors import SpecexportError
from specexport_runtime.executors.trt_engine import load_engine

make, quiet = trt.Runtime, trt.Logger(trt.Logger.ERROR)

def with_a_left_over(logger):
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    cycle = [make(quiet)]
    cycle.append(cycle)
    del cycle
    gc.set_threshold(gc.get_count()[0] + more)
    if was_enabled:
        gc.enable()
    return make(logger)

trt.Runtime = with_a_left_over
path, version = Path(sys.argv[1]), sys.argv[2]
for more in range(1, 30):  # one of them begins a collection in the logger
    try:
        load_engine(path, EngineFile(path.name, "sm89", "tensorrt-rtx", version), "NVIDIA L4")
    except SpecexportError as error:
        print(type(error).__name__, gc.isenabled())
"""


def test_a_runtime_left_to_the_garbage_collector_does_not_block_the_next_load(tiny_engine, tmp_path):
    """TensorRT logs under a lock that releasing a runtime waits for, and a collection may begin in our logger."""
    if has_gpu():
        pytest.skip("this machine has a GPU")
    version, data = tiny_engine
    (tmp_path / "model.sm89.engine").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OVER, str(tmp_path / "model.sm89.engine"), version],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["IncompatibleError", "True"] * 29, done.stderr[-1000:]


def test_another_version_names_both_and_the_rebuild_command(tmp_path):
    trt = pytest.importorskip("tensorrt_rtx")
    with pytest.raises(errors.IncompatibleError) as caught:
        load_engine(tmp_path / "absent", file_for(version="1.0.0.1"), "NVIDIA L4")
    assert "built by tensorrt-rtx 1.0.0.1" in caught.value.message
    assert f"{trt.__version__} is installed" in caught.value.message
    assert "specexport build --backend tensorrt-rtx --sm 89" in caught.value.hint


@pytest.mark.parametrize("builder", ["tensorrt", "tensorrt-rtx"])
def test_a_package_that_is_not_installed_or_unknown_is_named(monkeypatch, tmp_path, builder):
    monkeypatch.setitem(sys.modules, builder.replace("-", "_"), None)
    with pytest.raises(errors.IncompatibleError, match="'abacus'"):
        load_engine(tmp_path / "absent", file_for("abacus"), "NVIDIA L4")
    with pytest.raises(errors.MissingDependencyError, match=f"{builder} is not installed") as caught:
        load_engine(tmp_path / "absent", file_for(builder), "NVIDIA L4")
    assert caught.value.hint == errors.make_install_hint(builder)


class StandIn:
    """The parts of a TensorRT package that loading and running an engine touch; it writes down what it is told."""

    __version__ = "11.4"
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
    CudaGraphStrategy = SimpleNamespace(DISABLED="disabled")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", NONE="none")
    TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2)

    def __init__(self, complaint=None, kernels=b"compiled"):
        self.told = []
        self.complaint, self.kernels = complaint, kernels
        self.logger = None
        self.configs = []
        self.works = True

    def Runtime(self, logger):
        assert not gc.isenabled()
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, data):
        assert not gc.isenabled()
        self.given = data
        if self.complaint:
            self.logger.log(2, "a warning")
            self.logger.log(1, self.complaint)
            self.logger.log(1, "and so on")
            return None
        return self

    device_memory_size_v2 = 512
    num_io_tensors = 2

    def get_tensor_name(self, i):
        return ("input_ids", "logits")[i]

    def get_tensor_shape(self, name):
        return (-1,) if name == "input_ids" else (-1, 17)

    def get_tensor_mode(self, name):
        return "in" if name == "input_ids" else "out"

    def create_runtime_config(self):
        config = SimpleNamespace(strategy=None, cache=None)
        config.set_execution_context_allocation_strategy = lambda value: setattr(config, "strategy", value)
        config.create_runtime_cache = lambda: self
        config.set_runtime_cache = lambda cache: setattr(config, "cache", cache)
        self.configs.append(config)
        return config

    def deserialize(self, data):
        self.told.append(("kernels", data))
        return True

    def serialize(self):
        return self.kernels

    def create_execution_context(self, config):
        assert not gc.isenabled()
        self.told.append(("context", config))
        return self

    def __getattr__(self, name):
        if not name.startswith(("set_", "execute_")):
            raise AttributeError(name)

        def method(*arguments):
            self.told.append((name, *arguments))
            if not self.works:
                self.logger.log(1, "the reason")
            return self.works

        return method


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    def make(module="tensorrt_rtx", **options):
        package = StandIn(**options)
        monkeypatch.setitem(sys.modules, module, package)
        monkeypatch.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
        if not (tmp_path / "engine").exists():
            (tmp_path / "engine").write_bytes(b"12345")
        builder = module.replace("_", "-")
        return package, lambda: load_engine(tmp_path / "engine", file_for(builder, "11.4"), "NVIDIA RTX 4090")

    return make


@pytest.mark.parametrize(
    ("complaint", "error", "fix"),
    [
        ("Error Code 1: Cuda Runtime (out of memory)", errors.IncompatibleError, "--max-num-seqs"),
        ("Error Code 1: Cuda Runtime (cudaError 35)", errors.IncompatibleError, "nvidia-smi"),
        ("Error Code 1: Serialization (size)", errors.BundleError, "build it again"),
        ("what is this", errors.BundleError, "build it again"),
    ],
)
def test_what_tensorrt_says_decides_whose_fault_it_is(stand_in, complaint, error, fix):
    _, load = stand_in(complaint=complaint)
    with pytest.raises(error) as caught:
        load()
    assert caught.value.message.endswith(complaint)
    assert fix in caught.value.hint


def test_a_context_of_rtx_keeps_compiled_kernels_and_records_no_graphs_itself(stand_in, tmp_path):
    package, load = stand_in()
    engine = load()
    assert package.given == b"12345"
    assert engine.activation_bytes == 512
    assert [tuple(tensor) for tensor in engine.tensors] == [("input_ids", (-1,), True), ("logits", (-1, 17), False)]
    for is_fixed in (True, False):
        engine.make_context(3, 4096, 77, is_fixed=is_fixed)
    fixed, ranged = package.configs
    assert fixed.strategy == ranged.strategy == "user"
    assert fixed.cuda_graph_strategy == ranged.cuda_graph_strategy == "disabled"
    assert fixed.dynamic_shapes_kernel_specialization_strategy == "eager"
    assert ranged.dynamic_shapes_kernel_specialization_strategy == "none"
    assert fixed.cache is ranged.cache is package
    assert ("set_device_memory", 4096, 512) in package.told
    assert ("set_optimization_profile_async", 3, 77) in package.told
    assert not any(told[0] == "kernels" for told in package.told)
    engine.close()
    written = list((tmp_path / "cache" / "rtx-kernels").iterdir())
    assert [path.name[16:] for path in written] == ["-11.4-NVIDIA-RTX-4090.bin"]
    assert written[0].read_bytes() == b"compiled"
    before = (tmp_path / "engine").stat()
    package, load = stand_in(kernels=b"compile")  # fewer than there were: what is there stays
    engine = load()
    engine.make_context(0, 4096, 77, is_fixed=True)
    assert ("kernels", b"compiled") in package.told
    engine.close()
    assert written[0].read_bytes() == b"compiled"
    os.utime(tmp_path / "engine", ns=(0, before.st_mtime_ns + 1))  # another engine in its place has kernels of its own
    package, load = stand_in(kernels=b"others")
    engine = load()
    engine.make_context(0, 4096, 77, is_fixed=True)
    engine.close()
    assert not any(told[0] == "kernels" for told in package.told)
    assert len(list((tmp_path / "cache" / "rtx-kernels").iterdir())) == 2


def test_the_first_load_says_that_it_compiles_and_where_it_keeps_that(stand_in, tmp_path, caplog):
    for turn in range(2):
        _, load = stand_in()
        engine = load()
        for is_fixed in (True, False):
            engine.make_context(0, 4096, 77, is_fixed=is_fixed)
        engine.close()
        assert len(caplog.messages) == 1, turn
    assert caplog.messages[0] == (
        f"TensorRT-RTX compiles kernels for {tmp_path / 'engine'}, for one to three minutes; "
        f"later loads take them from {tmp_path / 'cache' / 'rtx-kernels'}."
    )


def test_without_a_place_for_kernels_each_load_says_that_it_compiles(stand_in, tmp_path, caplog):
    _, load = stand_in()
    (tmp_path / "cache").write_text("a file")
    engine = load()
    engine.make_context(0, 4096, 77, is_fixed=True)
    assert "without a cache folder" in caplog.messages[-1]
    engine.close()
    assert (tmp_path / "cache").read_text() == "a file"


@pytest.mark.parametrize("when", ["a context", "a step"])
def test_a_gpu_that_is_full_names_what_to_lower(stand_in, monkeypatch, when):
    package, load = stand_in()
    engine = load()
    context = engine.make_context(0, 4096, 77, is_fixed=True)

    def fails(*_arguments):
        package.logger.log(1, "Error Code 1: Cuda Runtime (out of memory)")

    monkeypatch.setattr(package, "create_execution_context", fails)
    monkeypatch.setattr(package, "execute_async_v3", fails, raising=False)
    with pytest.raises(errors.IncompatibleError, match="out of memory") as caught:
        engine.make_context(1, 4096, 77, is_fixed=True) if when == "a context" else context.enqueue(77)
    assert "--max-num-seqs" in caught.value.hint


def test_a_runtime_that_is_null_is_not_called(stand_in, monkeypatch):
    package, load = stand_in()
    make = package.Runtime

    def complains(logger):
        logger.log(1, "Error Code 6: API Usage Error (CUDA initialization failure with error: 35)")
        return make(logger)

    monkeypatch.setattr(package, "Runtime", complains)
    monkeypatch.setattr(package, "deserialize_cuda_engine", lambda _data: pytest.fail("it was called"))
    with pytest.raises(errors.IncompatibleError, match="CUDA initialization failure") as caught:
        load()
    assert "580 or newer" in caught.value.hint


@pytest.mark.parametrize(("what", "mode"), [("folder", 0o770), ("file", 0o666), ("nothing", None)])
def test_kernels_that_others_could_have_written_are_not_loaded(stand_in, tmp_path, what, mode):
    _, load = stand_in()
    engine = load()
    engine.make_context(0, 4096, 77, is_fixed=True)
    engine.close()
    folder = tmp_path / "cache" / "rtx-kernels"
    (kept,) = folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder, kept)] == [0o700, 0o600]
    if mode is not None:
        (folder if what == "folder" else kept).chmod(mode)
    package, load = stand_in()
    engine = load()
    engine.make_context(0, 4096, 77, is_fixed=True)
    assert (("kernels", b"compiled") in package.told) == (what == "nothing")


def test_a_context_passes_everything_on_and_turns_false_into_an_error(stand_in):
    package, load = stand_in("tensorrt")
    context = load().make_context(1, 4096, 77, is_fixed=True)
    assert ("context", "user") in package.told
    assert package.configs == [], "TensorRT proper has no such options"
    assert context.is_capturable(77)
    context.set_shape("input_ids", (3,))
    context.set_address("logits", 512)
    context.enqueue(77)
    assert package.told[-3:] == [
        ("set_input_shape", "input_ids", (3,)),
        ("set_tensor_address", "logits", 512),
        ("execute_async_v3", 77),
    ]
    package.works = False
    for call in (
        lambda: context.set_shape("input_ids", (3,)),
        lambda: context.set_address("logits", 512),
        lambda: context.enqueue(77),
    ):
        with pytest.raises(errors.SpecexportError, match=r"TensorRT could not .*: the reason"):
            call()

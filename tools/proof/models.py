"""The models that a proof engine runs: which, how large, their engine files, and executors over them."""

from pathlib import Path
from typing import NamedTuple

from specexport.backends.profiles import engine_kv_capacity, plan_profiles
from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.entry import (
    AttentionEntry,
    EngineEntry,
    EngineFile,
    EngineLimits,
    ModelEntry,
    Parameters,
    SourceEntry,
)
from specexport_runtime.bundle.profiles import Profile
from specexport_runtime.executors.gpu import GpuDriver
from specexport_runtime.executors.trt import TrtExecutor
from tools.proof.checkpoints import SIZES, make_tensors
from tools.proof.devices import CudaDevice, Device, HostGpu
from tools.proof.engine import proof_loader
from tools.proof.graph import Graph, read_engine, shipped_graph, write_engine

SEED = 7  # that of ``ensure_pair``
MAX_NUM_TOKENS = 512


class Plan(NamedTuple):
    """One pair."""

    is_decisive: bool  # see ``make_tensors``
    lookahead: int  # K
    max_model_len: int  # most tokens of a sequence
    max_num_seqs: int  # cache rows


PLANS = {
    "tiny": Plan(False, 4, 256, 4),
    "small": Plan(False, 4, 4096, 4),  # long enough for several splits
    "large": Plan(True, 8, 8704, 8),
}
"""By name of their sizes in ``checkpoints``."""


def kv_capacity(plan: Plan) -> int:
    """Entries of a cache row, as a build would have it."""
    return engine_kv_capacity(plan.max_model_len, plan.lookahead)


def ensure_engine(folder: Path, model: str, role: str) -> Path:
    """The engine file of one model of a pair; both are written unless they are there."""
    paths = {each: folder / f"{model}-{each}.npz" for each in ("target", "draft")}
    if not all(path.is_file() for path in paths.values()):
        tensors = dict(make_tensors(SIZES[model], seed=SEED, decisive=PLANS[model].is_decisive))
        for each, path in paths.items():
            graph = shipped_graph(model, each)
            write_engine(path, graph, {name: tensors[key] for name, key in graph.weights.items()})
    return paths[role]


def plan_entry(graph: Graph, path: Path, profiles: tuple[Profile, ...], sm: str) -> ModelEntry:
    """What a manifest would say of an engine; ``sm`` is such as ``"sm90"``, ``profiles`` are its step sizes."""
    sizes = [tensor.shape for tensor in graph.caches]
    logits = next(tensor for tensor in graph.outputs if tensor.name == "logits")
    layers = tuple(LayerGeometry(k[1], k[3], v[3]) for k, v in zip(sizes[::2], sizes[1::2], strict=True))
    dtype, count = graph.caches[0].dtype, path.stat().st_size // 2
    return ModelEntry(
        backend="tensorrt",
        dtype=dtype,
        vocab_size=logits.shape[1],
        max_positions=None,
        source=SourceEntry(path.stem, "", "proof"),
        parameters=Parameters(count, count),
        attention=AttentionEntry(layers, dtype),
        engine=EngineEntry(
            path=path.name,
            inputs=tuple(tensor.name for tensor in graph.inputs if tensor not in graph.caches),
            lowering="plugin",
            files=(EngineFile(path.name, sm, "proof", "0", 0),),
            limits=EngineLimits(profiles, sizes[0][2], max(profile.num_seqs for profile in profiles)),
        ),
    )


def profiles_of(model: str, role: str) -> tuple[Profile, ...]:
    """The profiles that a build would plan."""
    plan = PLANS[model]
    tokens = min(MAX_NUM_TOKENS, plan.max_model_len)
    return plan_profiles(role, lookahead=plan.lookahead, max_num_seqs=plan.max_num_seqs, max_num_tokens=tokens)


def open_engine(
    path: Path, profiles: tuple[Profile, ...], *, num_rows: int, graphs: bool, gpu: HostGpu | None = None
) -> TrtExecutor:
    """Open an engine file as ``open_trt_executor`` opens a TensorRT engine.

    ``profiles`` are step sizes to run, as a build would plan them; ``num_rows`` are cache rows; with ``graphs`` the
    fixed profiles' steps are recorded before the first one is asked for. ``gpu`` is a CPU that plays a GPU; None stands
    for the real one, by way of cuda-python. IncompatibleError: there is no GPU, or too little memory.
    MissingDependencyError: cuda-python is not installed.
    """
    driver: GpuDriver
    device: Device
    if gpu is None:
        from specexport_runtime.executors.cuda_driver import CudaDriver

        driver, device = CudaDriver(), CudaDevice()
    else:
        driver = device = gpu
    graph, _ = read_engine(path)
    entry = plan_entry(graph, path, profiles, driver.info().sm)
    executor = TrtExecutor(
        entry, entry.engine.files[0], path.parent, num_rows=num_rows, driver=driver, use_graphs=graphs,
        load=proof_loader(device),
    )  # fmt: skip
    if graphs:
        executor.capture(executor.fixed_shapes())
    return executor
